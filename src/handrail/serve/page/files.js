// File changes by call, newest first, each with its diff and undo.

import { html, useLayoutEffect, useRef, useState } from "./vendor/standalone.js";
import { UNAPPLIED } from "./changes.js";
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
        <${Undo} change=${change} onUndo=${onUndo} busy=${busy} />
      </div>
      ${open && html`<${DiffView} diff=${diff} />`}
    </article>
  </li>`;
}

/** An undo button, which asks for confirmation in the same place, or the reason why there is none. */
export function Undo({ change, onUndo, busy }) {
  const { call_id: id, tool, paths = [], undone, unapplied, undoable, problem } = change;
  const [asking, setAsking] = useState(false);
  const [refused, setRefused] = useState("");
  const [under, setUnder] = useState(false);
  const first = useRef(null);
  const button = useRef(null);
  const was = useRef(false);
  useLayoutEffect(() => {
    if (asking) first.current?.focus();
    else if (was.current) button.current?.focus();
    was.current = asking;
  }, [asking]);
  if (undone) return html`<span class="change-word">The changes were undone.</span>`;
  if (unapplied) return html`<span class="change-word">${UNAPPLIED}</span>`;
  if (!undoable) return html`<span class="change-word">This can’t be undone${problem ? `: ${problem}.` : "."}</span>`;
  const undo = async () => {
    setAsking(false);
    setRefused("");
    setUnder(true);
    try {
      await onUndo(id);
    } catch (error) {
      setRefused(error?.message ?? String(error));
    }
    setUnder(false);
  };
  const words = refused && html`<p class="field-error" role="alert">${refused}</p>`;
  if (under || busy === id) return html`<span class="change-word" role="status">Undoing…</span>`;
  if (!asking) {
    return html`<button type="button" class="quiet small" ref=${button} disabled=${Boolean(busy)} aria-label=${`Undo ${tool}`}
      onClick=${() => setAsking(true)}>Undo</button>${words}`;
  }
  const escape = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    setAsking(false);
  };
  return html`<span class="confirm" role="group" aria-label=${`Undo ${tool}?`} onKeyDown=${escape}>
    <span>Restore ${paths.length === 1 ? "this path" : `these ${paths.length} paths`}?</span>
    <button type="button" class="danger small" ref=${first} onClick=${undo}>Undo</button>
    <button type="button" class="quiet small" onClick=${() => setAsking(false)}>Keep</button>
  </span>`;
}

function clock(at) {
  const time = new Date(at);
  const today = time.toDateString() === new Date().toDateString();
  return time.toLocaleString([], today ? { hour: "2-digit", minute: "2-digit" } : { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
}
