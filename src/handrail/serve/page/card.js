// A tool call: it fills while its arguments are written, then shows how it goes and what came of it.

import { Agent } from "./agent.js";
import { Arguments } from "./arguments.js";
import { Changes } from "./changes.js";
import { drawnFor, useNow } from "./hooks.js";
import { Icon } from "./icons.js";
import { Closed, Question } from "./question.js";
import { agentsOf, isOver, questionsOf } from "./store.js";
import { html, useState } from "./vendor/standalone.js";
import { count, dollars, duration, STATUS } from "./words.js";

export const Card = drawnFor(
  ({ id, view }) => {
    const agents = agentsOf(view, id);
    // With agents in it anything may have changed; without, only these.
    return [view.calls[id], view.activities[`progress-${id}`], agents.length ? view : null, ...questionsOf(view, id), ...closedOf(view, id)];
  },
  ({ id, view, conversation }) => {
    const call = view.calls[id];
    const facts = call.facts ?? {};
    const agents = agentsOf(view, id);
    const questions = questionsOf(view, id);
    const status = statusOf(call, questions);
    return html`<section class=${`card ${status.replace(" ", "-")}`} role="group" aria-label=${`${call.name}, ${STATUS[status] ?? status}`}>
      <div class="card-head">
        <span class=${`status ${status.replace(" ", "-")}`}><${Icon} name=${status} /><span>${STATUS[status] ?? status}</span></span>
        <code class="tool">${call.name}</code>
        ${facts.undone && html`<span class="undone"><${Icon} name="undo" /> undone</span>`}
        <${Facts} facts=${facts} status=${status} />
      </div>
      <${Arguments} text=${call.arguments ?? ""} writing=${Boolean(call.writing)} />
      <${Progress} activity=${isOver(facts.status) ? null : view.activities[`progress-${id}`]} tool=${call.name} />
      ${agents.length > 0 &&
      html`<div class="agents" role="group" aria-label=${`Agents of ${call.name}`}>
        ${agents.map((agent) => html`<${Agent} key=${agent.id} agent=${agent} view=${view} conversation=${conversation} />`)}
      </div>`}
      ${questions.map((question) => html`<${Question} key=${question.id} question=${question} conversation=${conversation} inCard />`)}
      ${closedOf(view, id).map((closed) => html`<${Closed} key=${closed.question.id} closed=${closed} />`)}
      ${call.result !== undefined && html`<${Result} text=${call.result} status=${status} />`}
      ${facts.rolled_back && html`<${RolledBack} told=${facts.rolled_back} />`}
      ${(facts.diff || facts.paths?.length > 0) && isOver(facts.status) && html`<${Changes} id=${id} facts=${facts} conversation=${conversation} />`}
    </section>`;
  },
);

const closedOf = (view, id) => Object.values(view.closed).filter((closed) => closed.question.call_id === id);

function statusOf(call, questions) {
  if (questions.length) return "waiting";
  if (call.facts?.status) return call.facts.status;
  if (call.writing) return "writing";
  return call.result === undefined ? "running" : "ok";
}

/** How long it took or has taken, and what its nested runs cost. */
function Facts({ facts, status }) {
  const running = status === "running" && Boolean(facts.began_at);
  const now = useNow(running);
  // While it runs, whole tenths from the first second on: digits that race are hard to look at.
  const gone = running ? now - Date.parse(facts.began_at) / 1000 : 0;
  const seconds = running ? (gone >= 1 ? gone : null) : isOver(facts.status) ? facts.seconds : null;
  return html`<span class="facts">
    ${facts.usage && html`<span title="tokens of the agents in it">${count((facts.usage.input ?? 0) + (facts.usage.output ?? 0))} tokens</span>`}
    ${facts.cost && html`<span>${dollars(facts.cost)}</span>`}
    ${seconds !== null && seconds !== undefined && html`<time>${duration(Math.max(0, seconds))}</time>`}
  </span>`;
}

function Progress({ activity, tool }) {
  if (!activity) return null;
  const { message, done, total } = activity.content ?? {};
  const known = typeof done === "number" && typeof total === "number" && total > 0;
  return html`<div class="progress">
    <progress aria-label=${`Progress of ${tool}`} value=${known ? done : undefined} max=${known ? total : undefined}></progress>
    <p role="status">
      ${message && html`<span>${message}</span>`}
      ${known ? html`<span class="soft">${done} of ${total}</span>` : typeof done === "number" && html`<span class="soft">${done}</span>`}
    </p>
  </div>`;
}

const LONG = 420;

/** What the model was told. Long ones are folded, and stay where they are when they unfold. */
function Result({ text, status }) {
  const [open, setOpen] = useState(false);
  const long = text.length > LONG || text.split("\n").length > 8;
  if (!text) return null;
  return html`<div class=${`result ${status === "ok" ? "" : "not-ok"}`}>
    <pre class=${long && !open ? "folded" : ""} tabindex=${long && open ? 0 : undefined}>${text}</pre>
    ${long && html`<button type="button" class="link" aria-expanded=${String(open)} onClick=${() => setOpen(!open)}>${open ? "Show less" : `Show all (${text.split("\n").length} lines)`}</button>`}
  </div>`;
}

function RolledBack({ told }) {
  return html`<div class="rolled-back">
    <p><${Icon} name="undo" /> Rolled back: ${told.reason}</p>
    ${told.not_undone?.length > 0 &&
    html`<p>These could not be undone:</p>
      <ul>
        ${told.not_undone.map((what) => html`<li>${typeof what === "string" ? what : JSON.stringify(what)}</li>`)}
      </ul>`}
  </div>`;
}
