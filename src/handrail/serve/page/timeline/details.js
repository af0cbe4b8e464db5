// Everything that is recorded about one span: for a call its arguments, result and diff, for a turn its request and answer.

import { Arguments } from "../arguments.js";
import { Copy } from "../copy.js";
import { DiffView } from "../diff.js";
import { html } from "../vendor/standalone.js";
import { lasting } from "./axis.js";

/** @param {{span: import("./spans.js").Span, within: import("./spans.js").Span[], trace: string, start: number, open: (id: string) => void}} props
 *    `within` are the calls of a turn, `start` is when the run began, and `open` shows another span. */
export function Details({ span, within, trace, start, open }) {
  return html`<div class="span-details">
    <dl class="values">
      ${factsOf(span, start).map(([name, text]) => html`<div key=${name}><dt>${name}</dt><dd tabindex=${text.length > 500 ? 0 : undefined}>${text}</dd></div>`)}
      ${trace && html`<div><dt>Trace</dt><dd class="trace">${trace} <${Copy} text=${trace} what="the trace id" /></dd></div>`}
    </dl>
    ${span.kind === "turn" && html`<${Turn} span=${span} within=${within} open=${open} />`}
    ${span.kind === "call" && html`<${Call} call=${span.record} />`}
  </div>`;
}

/** The facts about a span, as names and texts. */
function factsOf(span, start) {
  const { record, usage, kind } = span;
  const facts = [];
  const add = (name, text) => text && facts.push([name, text]);
  if (kind === "call") add("Status", [span.status, ...span.reversed].join(", "));
  if (kind === "turn") add("Model", span.model);
  for (const { model, error } of span.failed ?? []) add("Failed", `${model}: ${error}`);
  if (span.leftOut) add("Compacted", `${span.leftOut.toLocaleString("en")} messages were not sent`);
  const after = span.start - start;
  add("Began", `${new Date(span.start * 1000).toLocaleString()}${after < 0.001 ? "" : `, after ${lasting(after)}`}`);
  add(span.open ? "So far" : "Took", lasting(span.end - span.start));
  for (const wait of span.waits) add(wait.open ? "Waiting" : "Waited", `${lasting(wait.end - wait.start)} for ${wait.name}`);
  add("Policy", record.decision);
  add("Tokens", usage && `${usage.input.toLocaleString("en")} in${usage.cached ? ` (${usage.cached.toLocaleString("en")} from the cache)` : ""}, ${usage.output.toLocaleString("en")} out`);
  add("Cost", span.cost === null || span.cost === undefined ? "" : `$${span.cost}`);
  add("Remains", record.effects?.length > 0 && `${record.effects.join(", ")} can’t be undone`);
  return facts;
}

function Call({ call }) {
  return html`${call.arguments && html`<h3>Arguments</h3><${Arguments} text=${call.arguments} />`}
    ${call.message && html`<h3>Result</h3><${Text} text=${call.message} />`}
    ${call.diff && html`<h3>Changes</h3><${DiffView} diff=${call.diff} />`}`;
}

/** What was new in a turn's request, and its answer. */
function Turn({ span, within, open }) {
  const { said = [], text } = span.record;
  const results = span.before.filter((call) => call.message);
  return html`${(said.length > 0 || results.length > 0) && html`<h3>New in the request</h3>`}
    ${results.map((call) => html`<p class="span-source"><code>${call.tool}</code> returned</p><${Text} text=${call.message} />`)}
    ${said.map((each) => html`<p class="span-source">A person wrote</p><${Text} text=${each} />`)}
    ${(text || within.length > 0) && html`<h3>Answer</h3>`}
    ${text && html`<${Text} text=${text} />`}
    ${within.length > 0 && html`<ul class="span-calls" aria-label="Calls">
      ${within.map((call) => html`<li key=${call.id}><button type="button" class="link" onClick=${() => open(call.id)}><code>${call.label}</code></button> <bdi>${call.record.arguments}</bdi></li>`)}
    </ul>`}`;
}

const Text = ({ text }) => html`<pre class="span-text" tabindex=${text.length > 500 ? 0 : undefined}>${text}</pre>`;
