// The files that were changed, as a tree, and the calls that changed them, newest first. Each has its diffs and undo.

import { html, useMemo, useState } from "./vendor/standalone.js";
import { UNAPPLIED, Undo } from "./changes.js";
import { DiffView, summary } from "./diff.js";
import { parseDiff } from "./diff/parse.js";
import { filesOf, treeOf } from "./files/tree.js";

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
  return html`<${Files} changes=${changes} onUndo=${onUndo} busy=${busy} />
    <h2 class="files-head">Calls</h2>
    <ol class="file-changes" aria-label="Changes, newest first">
      ${changes.toReversed().map((change) => html`<${Change} key=${change.call_id} change=${change} onUndo=${onUndo} busy=${busy} />`)}
    </ol>`;
}

/** What became of each file, as a tree. */
function Files({ changes, onUndo, busy }) {
  const files = useMemo(() => filesOf(changes), [changes]);
  const counts = Map.groupBy(files, (file) => file.outcome);
  const sum = ["added", "changed", "moved", "removed"].filter((each) => counts.has(each)).map((each) => `${counts.get(each).length} ${each}`);
  return html`<h2 class="files-head">Files <span class="change-word">${sum.join(", ") || "as they were before"}</span></h2>
    ${files.length > 0 && html`<div class="file-tree" role="group" aria-label="Changed files"><${Nodes} nodes=${treeOf(files)} onUndo=${onUndo} busy=${busy} /></div>`}`;
}

function Nodes({ nodes, onUndo, busy }) {
  return html`<ul>
    ${nodes.map(({ name, file, children }) => html`<li key=${name}>
      ${file && html`<${File} key=${file.path} name=${name} file=${file} onUndo=${onUndo} busy=${busy} />`}
      ${children.length > 0 && html`<details open><summary><span class="chevron" aria-hidden="true"></span>${name}/</summary><${Nodes} nodes=${children} onUndo=${onUndo} busy=${busy} /></details>`}
    </li>`)}
  </ul>`;
}

/** A file and what became of it. When it is opened, the diff of each call that changed it, oldest first. */
function File({ name, file, onUndo, busy }) {
  const [open, setOpen] = useState(false);
  const { path, origin, outcome, steps } = file;
  return html`<button type="button" class="quiet file-name" aria-expanded=${open ? "true" : "false"} title=${path} onClick=${() => setOpen(!open)}>
      <span class="chevron" aria-hidden="true"></span><span class="file-path">${name}</span>
      <span class=${`file-outcome is-${outcome}`}>${outcome}${outcome === "moved" ? ` from ${origin}` : ""}</span>
    </button>
    ${open && html`<ol class="file-steps" aria-label=${`Changes to ${path}`}>
      ${steps.map(({ change, path: then }) => html`<li key=${change.call_id}>
        <header class="change-head"><span class="change-tool">${change.tool}</span> <${Time} at=${change.at} /> <${Undoing} change=${change} onUndo=${onUndo} busy=${busy} /></header>
        ${parseDiff(change.diff).files.some((each) => each.path === then) ? html`<${DiffView} diff=${change.diff} path=${then} />` : html`<p class="change-word">No diff of this file is recorded.</p>`}
      </li>`)}
    </ol>`}`;
}

const Time = ({ at }) => at && html`<time datetime=${at} title=${new Date(at).toLocaleString()}>${clock(at)}</time>`;

function Change({ change, onUndo, busy }) {
  const { tool, at, paths = [], diff, undone, unapplied } = change;
  const [open, setOpen] = useState(false);
  return html`<li class=${`change ${undone ? "is-undone" : ""}`}>
    <article aria-label=${`${tool}: ${paths.join(", ") || "no paths"}`}>
      <header class="change-head">
        <span class="change-tool">${tool}</span>
        <${Time} at=${at} />
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
