// Where the conversation was compacted: what is no longer sent to the model, and the summary in its place.

import { Icon } from "./icons.js";
import { Markdown } from "./markdown.js";
import { html, useState } from "./vendor/standalone.js";
import { count, many } from "./words.js";

/** A compaction. It is folded, and lists what it left out when the reader opens it. All of that stays in the log above it. */
export function Compacted({ content, view }) {
  const [open, setOpen] = useState(false);
  const { left_out: leftOut, shortened, summary, before, spent } = content;
  return html`<details class="compacted" open=${open} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>
      <${Icon} name="compacted" />
      <span class="compacted-name">Conversation compacted:</span> ${summed(leftOut.messages, shortened.messages, summary)}
    </summary>
    ${open &&
    html`<div class="compacted-body">
      <p class="soft">${WHY[content.why] ?? WHY.full} The whole conversation stays here and in the journal.</p>
      ${summary && html`<h3>Sent to the model instead</h3><${Markdown} text=${summary} />`}
      <${Listed} name="No longer sent to the model" ids=${leftOut.ids} view=${view} />
      <${Listed} name="Sent to the model in short form" ids=${shortened.ids} view=${view} />
      ${before && html`<p class="soft">Last request before it: ${cached(before)}.</p>`}
      ${spent && html`<p class="soft">Request for the summary: ${cached(spent)}.</p>`}
    </div>`}
  </details>`;
}

const WHY = {
  full: "The conversation had nearly filled the model’s window.",
  refused: "The provider refused the request as too long.",
  asked: "Somebody asked for it.",
};

function summed(leftOut, shortened, summary) {
  const parts = [leftOut && `${many(leftOut, "message")} left out`, shortened && `${many(shortened, "message")} shortened`, summary && "summarised"].filter(Boolean);
  return parts.join(", ") || "less of it is sent to the model";
}

function cached({ input, cached: read, cache_writes: written }) {
  return `${count(input)} tokens in, ${count(read)} of them from the provider’s cache${written ? `, ${count(written)} written to it` : ""}`;
}

function Listed({ name, ids, view }) {
  const lines = ids.map((id) => lineOf(view, id)).filter(Boolean);
  if (!lines.length) return null;
  return html`<h3>${name}</h3>
    <ul class="compacted-list" tabindex="0" aria-label=${name}>
      ${lines.map(([who, text]) => html`<li><span class="soft">${who}</span> <bdi>${text}</bdi></li>`)}
    </ul>`;
}

const LONGEST = 300;

/** A message or a call as one line: who said it, and the beginning of it. */
function lineOf(view, id) {
  const call = view.calls[id];
  const message = view.messages[id];
  if (call?.name) return [call.name, (call.result ?? call.arguments ?? "").slice(0, LONGEST)];
  if (!message) return null;
  const isUser = view.entries[""].some((entry) => entry.id === id && entry.kind === "user");
  return [isUser ? "You" : "Model", (message.text || (message.files ?? []).map((file) => file.name).join(", ")).slice(0, LONGEST)];
}
