// File changes by call, newest first, each with its diff and undo.

import { html, useState } from "./vendor/standalone.js";
import { UNAPPLIED, Undo } from "./changes.js";
import { DiffView, summary } from "./diff.js";
import { parseDiff } from "./diff/parse.js";

/**
 * @param {{changes: object[], onUndo: (callId: string) => any, busy?: boolean|string}} props
 *   `changes` as `GET /threads/{id}/files` returns them, oldest first. If the promise of `onUndo` rejects,
 *   its message is shown at the call. `busy` is true if nothing can be undone now, or the id of the call that is being undone.
 */
export function FilesPanel({ changes, onUndo, busy }) {
  if (!changes?.length) {
    return html`<div class="state">
      <h2>No files changed</h2>
      <p>Files that tools change in this conversation are listed here with their diffs, and you can undo the changes.</p>
    </div>`;
  }
  return html`<ol class="file-changes" aria-label="Changes, newest first">
    ${changes.toReversed().map((change) => html`<${Change} key=${change.call_id} change=${change} onUndo=${onUndo} busy=${busy} />`)}
  </ol>`;
}

function Change({ change, onUndo, busy }) {
  const { tool, at, paths = [], diff, undone, unapplied } = change;
  const [open, setOpen] = useState(false);
  return html`<li class=${`change ${undone ? "is-undone" : ""}`}>
    <article aria-label=${`${tool}: ${paths.join(", ") || "no paths"}`}>
      <header class="change-head">
        <span class="change-tool">${tool}</span>
        ${at && html`<time datetime=${at} title=${new Date(at).toLocaleString()}>${clock(at)}</time>`}
        ${undone && html`<span class="undone-mark">Undone</span>`}
        ${unapplied && html`<span class="unapplied">Not applied</span>`}
      </header>
      <ul class="change-paths" aria-label="Paths">${paths.map((path) => html`<li>${path}</li>`)}</ul>
      <div class="change-actions">
        ${diff && html`<button type="button" class="quiet small" aria-expanded=${open ? "true" : "false"} onClick=${() => setOpen(!open)}>
          <span class="chevron" aria-hidden="true"></span>${summary(parseDiff(diff).files)}
        </button>`}
        <${Undoing} change=${change} onUndo=${onUndo} busy=${busy} />
      </div>
      ${open && html`<${DiffView} diff=${diff} />`}
    </article>
  </li>`;
}

/** The undo button of a call, or the reason why there is none. */
function Undoing({ change, onUndo, busy }) {
  const { call_id: id, tool, paths = [], undone, unapplied, undoable, problem } = change;
  if (undone) return html`<span class="change-word">The changes were undone.</span>`;
  if (unapplied) return html`<span class="change-word">${UNAPPLIED}</span>`;
  if (!undoable) return html`<span class="change-word">This can’t be undone${problem ? `: ${problem}.` : "."}</span>`;
  return html`<${Undo} tool=${tool} paths=${paths} undo=${() => onUndo(id)} busy=${busy === id} disabled=${Boolean(busy)} />`;
}

function clock(at) {
  const time = new Date(at);
  const today = time.toDateString() === new Date().toDateString();
  return time.toLocaleString([], today ? { hour: "2-digit", minute: "2-digit" } : { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
}
