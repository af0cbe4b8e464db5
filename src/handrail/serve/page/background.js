// Background runs: a row at the call that has begun one, and a row where the model was told its end.

import { Icon } from "./icons.js";
import { Markdown } from "./markdown.js";
import { html, useState } from "./vendor/standalone.js";

const ICON = { done: "ok", failed: "error", cancelled: "cancelled" };
const HOW = { done: "is done", failed: "failed", cancelled: "was cancelled" };
const LONG = 160;

/** A background run that a call has begun, and what it is asked. Its state changes when its end is told. */
export function Begun({ content: { agent, message }, end }) {
  const state = end ? `${HOW[end] ?? "has ended"} in the background` : "works in the background";
  return html`<${Row} status=${end ?? "running"} name=${`${agent} ${state}`} text=${message} />`;
}

/** The end of a background run, with its answer or its error. */
export function Ended({ content: { agent, end, text } }) {
  return html`<${Row} status=${end} name=${`${agent} ${HOW[end] ?? "has ended"}`} text=${text} />`;
}

/** A row with a text, which is folded if it is long. */
function Row({ status, name, text }) {
  const [open, setOpen] = useState(false);
  const head = html`<${Icon} name=${ICON[status] ?? status} /><span class="background-name">${name}${text && ":"}</span>`;
  if (text.length <= LONG && !text.includes("\n")) return html`<p class=${`background ${status}`}>${head} <bdi>${text}</bdi></p>`;
  return html`<details class=${`background ${status}`} open=${open} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>${head} ${!open && html`<bdi class="background-start">${text.slice(0, LONG)}</bdi>`}</summary>
    ${open && html`<div class="background-body"><${Markdown} text=${text} /></div>`}
  </details>`;
}
