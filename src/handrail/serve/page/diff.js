// A diff of files. The diff is untrusted, so it is rendered as text nodes only.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/standalone.js";
import { parseDiff } from "./diff/parse.js";
import { rowsOf } from "./diff/words.js";

const KEPT_UNDER = "handrail.diff";
const FOLD_OVER = 400; // a file with more lines than this shows only its first lines
const FOLDED_TO = 200;
const OPEN_FILES = 12; // if there are more files than this, they start folded
const NARROW = 620; // below this width in pixels, two columns are unreadable

const views = new Set();

function keptMode() {
  try {
    return localStorage.getItem(KEPT_UNDER) === "split" ? "split" : "unified";
  } catch {
    return "unified"; // storage may be forbidden
  }
}

/** The mode that was chosen last, which all diffs without a `mode` share, and a function that changes it. */
function useKeptMode() {
  const [mode, setMode] = useState(keptMode);
  useEffect(() => {
    views.add(setMode);
    return () => views.delete(setMode);
  }, []);
  return [
    mode,
    (chosen) => {
      try {
        localStorage.setItem(KEPT_UNDER, chosen);
      } catch {
        // without storage, the choice lasts as long as the page
      }
      for (const set of views) set(chosen);
    },
  ];
}

/** Whether the element is too narrow for two columns. */
function useNarrow(ref) {
  const [narrow, setNarrow] = useState(false);
  useLayoutEffect(() => {
    setNarrow(ref.current.clientWidth < NARROW); // before the first paint, so that nothing jumps
    const look = new ResizeObserver(([entry]) => setNarrow(entry.contentRect.width < NARROW));
    look.observe(ref.current);
    return () => look.disconnect();
  }, []);
  return narrow;
}

/**
 * @param {{diff: string, path?: string, mode?: "unified"|"split", onMode?: (mode: string) => void}} props
 *   With `path`, only that file is shown. Without `mode`, the mode that was chosen last is used. A narrow view is always unified.
 */
export function DiffView({ diff, path, mode, onMode }) {
  const root = useRef(null);
  const narrow = useNarrow(root);
  const [kept, keep] = useKeptMode();
  const parsed = useMemo(() => parseDiff(diff), [diff]);
  const shown = narrow ? "unified" : (mode ?? kept);
  const choose = (chosen) => {
    keep(chosen);
    onMode?.(chosen);
  };
  const files = path === undefined ? parsed.files : parsed.files.filter((file) => file.path === path);
  const remarks = path === undefined ? parsed.remarks : [];
  return html`<div class="diff" ref=${root}>
    <div class="diff-bar">
      <span class="diff-sum">${summary(files)}</span>
      ${!narrow && files.some((file) => file.lines) && html`<${ModeToggle} mode=${shown} choose=${choose} />`}
    </div>
    ${files.map((file, at) => html`<${FileView} key=${`${at} ${file.path}`} file=${file} mode=${shown}
      openFirst=${files.length <= OPEN_FILES} />`)}
    ${remarks.length > 0 && html`<ul class="diff-remarks" aria-label="Other changes">
      ${remarks.map((line) => html`<li>${line}</li>`)}
    </ul>`}
  </div>`;
}

function ModeToggle({ mode, choose }) {
  const option = (value, label) => html`<button type="button" aria-pressed=${mode === value ? "true" : "false"}
    onClick=${() => choose(value)}>${label}</button>`;
  return html`<div class="segmented" role="group" aria-label="Diff layout">
    ${option("unified", "Unified")}${option("split", "Side by side")}
  </div>`;
}

/** The numbers of changed files and lines in words: "2 files, 3 lines added, 1 removed". */
export function summary(files) {
  if (!files.length) return "No files changed";
  const added = files.reduce((sum, file) => sum + file.added, 0);
  const removed = files.reduce((sum, file) => sum + file.removed, 0);
  const parts = [counted(files.length, "file")];
  if (added) parts.push(`${counted(added, "line")} added`);
  if (removed) parts.push(added ? `${removed.toLocaleString("en")} removed` : `${counted(removed, "line")} removed`);
  return parts.join(", ");
}

function counted(number, thing) {
  return `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`;
}

function FileView({ file, mode, openFirst }) {
  const [open, setOpen] = useState(openFirst);
  const [all, setAll] = useState(false);
  const folded = !all && file.lines > FOLD_OVER;
  return html`<section class="diff-file" aria-label=${`Changes to ${file.path}`}>
    <h4 class="diff-head">
      <button type="button" class="diff-fold" aria-expanded=${open ? "true" : "false"} onClick=${() => setOpen(!open)}>
        <span class="chevron" aria-hidden="true"></span>
        <span class="diff-path">${file.change === "renamed" && html`<span class="diff-from">${file.from}</span>${" → "}`}${file.path}</span>
        ${file.change !== "changed" && html`<span class=${`diff-word is-${file.change}`}>${file.change}</span>`}
        ${file.runsLater && html`<span class="diff-word is-later">runs later</span>`}
        <span class="diff-count">${count("added", "+", file.added)}${count("removed", "−", file.removed)}</span>
      </button>
    </h4>
    ${open && html`<div class="diff-body">
      ${file.notes.map((note) => html`<p class="diff-note">${note}</p>`)}
      ${file.change === "renamed" && !file.lines && html`<p class="diff-note">Moved without changes.</p>`}
      ${file.lines > 0 && html`<${Lines} file=${file} mode=${mode} most=${folded ? FOLDED_TO : Infinity} />`}
      ${folded && html`<button type="button" class="diff-more" onClick=${() => setAll(true)}>
        Show all ${file.lines.toLocaleString("en")} lines
      </button>`}
    </div>`}
  </section>`;
}

function count(word, sign, number) {
  if (!number) return null;
  return html`<span class=${`is-${word}`} title=${`${counted(number, "line")} ${word}`}>${sign}${number.toLocaleString("en")}</span>`;
}

/** The table of a file's lines. It is not built again when only the parent renders again. */
function Lines({ file, mode, most }) {
  const hunks = useMemo(() => file.hunks.map((hunk) => ({ header: hunk.header, rows: rowsOf(hunk.lines) })), [file]);
  return useMemo(() => {
    const body = [];
    let left = most;
    for (const hunk of hunks) {
      if (left <= 0) break;
      const rows = hunk.rows.slice(0, left);
      left -= rows.length;
      body.push(hunkHead(hunk.header, mode), ...(mode === "split" ? rows.map(splitRow) : unifiedRows(rows)));
    }
    return html`<div class="diff-scroll" tabindex="0" role="region" aria-label=${`Lines of ${file.path}`}>
      <table class=${`diff-lines is-${mode}`}>
        <caption class="unseen">${file.path}: ${counted(file.added, "line")} added, ${file.removed} removed</caption>
        ${mode === "split" && html`<colgroup>${["number", "sign", "text", "number", "sign", "text"].map((name) => html`<col class=${`col-${name}`} />`)}</colgroup>`}
        <tbody>${body}</tbody>
      </table>
    </div>`;
  }, [hunks, mode, most]);
}

function hunkHead(header, mode) {
  return html`<tr class="diff-hunk"><td colspan=${mode === "split" ? 6 : 4}>${header}</td></tr>`;
}

/** Orders removed lines before added ones, as in a unified diff. */
function unifiedRows(rows) {
  const out = [];
  let added = [];
  const flush = () => {
    out.push(...added);
    added = [];
  };
  for (const { left, right, pieces } of rows) {
    if (left && left === right) {
      flush();
      out.push(unifiedRow(left, null));
      continue;
    }
    if (left) out.push(unifiedRow(left, pieces?.[0]));
    if (right) added.push(unifiedRow(right, pieces?.[1]));
  }
  flush();
  return out;
}

function unifiedRow(line, pieces) {
  return html`<tr class=${`is-${line.type}`}>
    <td class="diff-number">${line.old}</td><td class="diff-number">${line.new}</td>
    ${cells(line, pieces)}
  </tr>`;
}

function splitRow({ left, right, pieces }) {
  return html`<tr>${side(left, left?.old, pieces?.[0])}${side(right, right?.new, pieces?.[1])}</tr>`;
}

function side(line, number, pieces) {
  if (!line) return html`<td class="diff-number is-none"></td><td class="diff-sign is-none"></td><td class="diff-text is-none"></td>`;
  return html`<td class=${`diff-number is-${line.type}`}>${number}</td>${cells(line, pieces)}`;
}

const SIGNS = { same: "", added: "+", removed: "−" };

function cells(line, pieces) {
  const kind = `is-${line.type}`;
  const sign = line.type === "same" ? null : html`<span aria-hidden="true">${SIGNS[line.type]}</span><span class="unseen">${line.type}</span>`;
  return html`<td class=${`diff-sign ${kind}`}>${sign}</td>
    <td class=${`diff-text ${kind}`}>${pieces ? pieces.map((piece) => word(piece, line.type)) : line.text}${line.bare && html`<span class="diff-bare"> no newline at the end</span>`}</td>`;
}

function word(piece, type) {
  if (!piece.changed) return piece.text;
  return type === "added" ? html`<ins>${piece.text}</ins>` : html`<del>${piece.text}</del>`;
}
