// The timeline of a run: spans on a time axis, and beside them the same spans as a tree of text, for the keyboard and
// for screen readers. A click or Enter shows everything about a span.

import { Sheet } from "./sheet.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/standalone.js";
import { axisOf, lasting } from "./timeline/axis.js";
import { Details } from "./timeline/details.js";
import { Picture } from "./timeline/picture.js";
import { isGoing, spansOf } from "./timeline/spans.js";

const MOST_ZOOM = 64;

/** @param {{tree: object}} props a run, as `GET /threads/{id}/runs/{run_id}` returns it */
export function Timeline({ tree }) {
  const now = useNow(isGoing(tree));
  const spans = useMemo(() => spansOf(tree, now), [tree, now]);
  if (!spans.length) return html`<div class="state"><p>${tree.error || (isGoing(tree) ? "Nothing has happened in this run yet." : "Nothing happened in this run.")}</p></div>`;
  return html`<${Spans} tree=${tree} spans=${spans} />`;
}

function Spans({ tree, spans }) {
  const [folded, setFolded] = useState(() => new Set());
  const [zoom, setZoom] = useState(1);
  const [current, setCurrent] = useState(null); // the id that has the focus
  const [pointed, setPointed] = useState(null); // the id under the pointer
  const [opened, setOpened] = useState(null); // the id of the span whose details are shown
  const scroll = useRef(null);
  const width = useWidth(scroll);
  const axis = useMemo(() => axisOf(spans), [spans]);
  const visible = useMemo(() => unfolded(spans, folded), [spans, folded]);
  const at = Math.max(0, visible.findIndex((span) => span.id === current));
  const shown = visible.find((span) => span.id === pointed) ?? visible[at];
  const detailed = spans.find((span) => span.id === opened);
  const open = (id) => {
    setCurrent(id);
    setOpened(id);
  };
  const fold = (span, shut) => setFolded((before) => {
    const next = new Set(before);
    if (shut) next.add(span.id);
    else next.delete(span.id);
    return next;
  });
  const zoomed = (next) => {
    const box = scroll.current;
    const middle = (box.scrollLeft + box.clientWidth / 2) / (width * zoom);
    setZoom(next);
    requestAnimationFrame(() => (box.scrollLeft = middle * width * next - box.clientWidth / 2));
  };
  return html`<section class="timeline" aria-label="Timeline">
    <div class="timeline-bar">
      <span class="timeline-sum">${sumOf(tree, spans, axis)}</span>
      <div class="segmented" role="group" aria-label="Zoom">
        <button type="button" aria-label="Zoom out" disabled=${zoom <= 1} onClick=${() => zoomed(zoom / 2)}>−</button>
        <button type="button" disabled=${zoom === 1} onClick=${() => zoomed(1)}>Fit</button>
        <button type="button" aria-label="Zoom in" disabled=${zoom >= MOST_ZOOM} onClick=${() => zoomed(zoom * 2)}>+</button>
      </div>
    </div>
    <div class="timeline-grid" onPointerLeave=${() => setPointed(null)}>
      <${Tree} visible=${visible} at=${at} folded=${folded} start=${axis.start} go=${setCurrent} open=${open} fold=${fold} point=${setPointed} />
      <div class="timeline-scroll" ref=${scroll}>
        <${Picture} visible=${visible} axis=${axis} width=${Math.max(1, width * zoom)} words=${pictureWords(tree, spans, axis)}
          marked=${visible.indexOf(shown)} point=${setPointed} choose=${open} />
      </div>
    </div>
    <p class="timeline-detail">${detailOf(shown, axis.start)}</p>
    ${tree.error && html`<p class="timeline-error"><span class="span-sign status-error" aria-hidden="true">${SIGNS.error}</span> ${tree.error}</p>`}
    <${Legend} spans=${spans} axis=${axis} />
    <${Sheet} open=${Boolean(detailed)} onClose=${() => setOpened(null)} label=${detailed?.label ?? "Details"} side="right">
      ${detailed && html`<${Details} key=${opened} span=${detailed} within=${callsOf(detailed, spans)} trace=${tree.trace_id} start=${axis.start} open=${open} />`}
    <//>
  </section>`;
}

/** The calls that a turn made, in the order in which they began. */
function callsOf(turn, spans) {
  return turn.kind === "turn" ? spans.filter((span) => turn.record.calls.includes(span.record)) : [];
}

/** The spans whose parents are all expanded. */
function unfolded(spans, folded) {
  const hidden = new Set();
  return spans.filter((span) => {
    const away = span.parent !== null && (hidden.has(span.parent) || folded.has(span.parent));
    if (away) hidden.add(span.id);
    return !away;
  });
}

export const SIGNS = {
  ok: "✓", error: "✕", denied: "⊘", cancelled: "–", "timed out": "◔", invalid: "!", conflict: "≠", waiting: "?", running: "…",
};

function Tree({ visible, at, folded, start, go, open, fold, point }) {
  const list = useRef(null);
  const moved = useRef(false);
  useLayoutEffect(() => {
    // Move the focus at once, because the next key may come before the next frame.
    if (moved.current) list.current.querySelector('[tabindex="0"]')?.focus();
    moved.current = false;
  });
  const walk = (event) => {
    const span = visible[at];
    const to = target(event.key, visible, at, folded);
    if (to === null) return;
    event.preventDefault();
    moved.current = true;
    if (to === "details") open(span.id);
    else if (to === "open" || to === "shut") fold(span, to === "shut");
    else go(visible[to].id);
  };
  return html`<ul class="timeline-tree" role="tree" aria-label="What happened" ref=${list} onKeyDown=${walk}>
    ${visible.map((span, place) => html`<li key=${span.id} role="treeitem" class=${`span-name is-${span.kind} ${place === at ? "is-current" : ""}`}
      aria-level=${span.depth + 1} aria-expanded=${span.children ? (folded.has(span.id) ? "false" : "true") : undefined}
      aria-selected=${place === at ? "true" : "false"} aria-label=${detailOf(span, start)} tabindex=${place === at ? "0" : "-1"}
      onFocus=${() => place !== at && go(span.id)} onPointerEnter=${() => point(span.id)}
      onClick=${() => {
        moved.current = true;
        open(span.id);
      }}>
      <span class=${`span-indent depth-${Math.min(span.depth, 8)}`}></span>
      ${span.children && html`<span class="span-fold" aria-hidden="true" onClick=${(event) => {
        event.stopPropagation();
        go(span.id);
        fold(span, !folded.has(span.id));
      }}><span class="chevron"></span></span>`}
      ${span.kind === "call" && html`<span class=${`span-sign status-${wordOf(span.status)}`} aria-hidden="true">${span.reversed.length ? "↶" : (SIGNS[span.status] ?? "•")}</span>`}
      ${span.failed?.length > 0 && html`<span class="span-sign status-error" aria-hidden="true">${SIGNS.error}</span>`}
      <span class="span-label">${span.label}${typeof span.leftOut === "number" ? " · compacted" : ""}</span>
    </li>`)}
  </ul>`;
}

/** What a key does: an index in the list, "open", "shut", "details", or null if it does nothing. */
function target(key, visible, at, folded) {
  const span = visible[at];
  const parent = visible.findIndex((one) => one.id === span.parent);
  switch (key) {
    case "ArrowDown": return Math.min(at + 1, visible.length - 1);
    case "ArrowUp": return Math.max(at - 1, 0);
    case "Home": return 0;
    case "End": return visible.length - 1;
    case "ArrowRight":
      if (!span.children) return at;
      return folded.has(span.id) ? "open" : Math.min(at + 1, visible.length - 1);
    case "ArrowLeft":
      if (span.children && !folded.has(span.id)) return "shut";
      return parent >= 0 ? parent : at;
    case "Enter": case " ": return "details";
    default: return null;
  }
}

export function wordOf(status) {
  return String(status).replace(/\W+/g, "-");
}

/** One span as a line of text: its name, outcome, duration and cost. */
export function detailOf(span, start) {
  const parts = [span.kind === "turn" && span.model ? `${span.label} (${span.model})` : span.label];
  if (span.kind === "run") parts.push("nested run");
  if (typeof span.leftOut === "number") parts.push(`compacted before: ${counted(span.leftOut, "message")} not sent`);
  const unanswered = span.kind === "turn" && span.status === "error";
  for (const { model, error } of span.failed ?? []) parts.push(`${model} failed${unanswered ? "" : " before"}: ${error}`);
  if (unanswered) parts.push("no answer");
  if (span.kind === "call") parts.push(span.status, ...span.reversed);
  parts.push(span.open ? `${lasting(span.end - span.start)} so far` : lasting(span.end - span.start));
  for (const wait of span.waits) {
    parts.push(`${wait.open ? "waiting" : "waited"} ${lasting(wait.end - wait.start)} for ${wait.name}`);
  }
  if (span.usage) {
    const cached = span.usage.cached ? ` (${count(span.usage.cached)} from the cache)` : "";
    parts.push(`${count(span.usage.input)} tokens in${cached}, ${count(span.usage.output)} out`);
  }
  if (span.cost !== null && span.cost !== undefined) parts.push(`$${span.cost}`);
  parts.push(span.start - start < 0.001 ? "from the start" : `after ${lasting(span.start - start)}`);
  return parts.join(" · ");
}

function count(number) {
  return (number ?? 0).toLocaleString("en");
}

function sumOf(tree, spans, axis) {
  const turns = spans.filter((span) => span.kind === "turn").length;
  const calls = spans.filter((span) => span.kind === "call").length;
  const parts = [lasting(axis.end - axis.start), counted(turns, "model turn"), counted(calls, "call")];
  if (tree.cost !== null && tree.cost !== undefined) parts.push(`$${tree.cost}`);
  return parts.join(" · ");
}

function counted(number, thing) {
  return `${count(number)} ${thing}${number === 1 ? "" : "s"}`;
}

function pictureWords(tree, spans, axis) {
  const slow = spans.filter((span) => span.kind === "call").sort((a, b) => b.end - b.start - (a.end - a.start))[0];
  const longest = slow ? ` The longest call is ${slow.label}, ${lasting(slow.end - slow.start)}.` : "";
  return `Spans of the run on a time axis: ${sumOf(tree, spans, axis)}.${longest}`;
}

/** The legend of the marks that occur. */
function Legend({ spans, axis }) {
  const marks = [
    ["turn", "model", spans.some((span) => span.kind === "turn")],
    ["call", "call", spans.some((span) => span.kind === "call")],
    ["bad", "failed (cross)", spans.some((span) => span.failed?.length || (span.kind !== "run" && !["ok", "running", "waiting"].includes(span.status)))],
    ["wait", "waiting for a person", spans.some((span) => span.waits.length)],
    ["break", "time omitted", axis.stretches.some((one) => one.broken)],
  ];
  return html`<ul class="timeline-legend" aria-label="Legend">
    ${marks.filter(([, , there]) => there).map(([mark, words]) => html`<li><span class=${`legend-mark is-${mark}`} aria-hidden="true"></span>${words}</li>`)}
  </ul>`;
}

/** The current time in seconds since 1970, updated while the run is active. */
function useNow(goes) {
  const [now, setNow] = useState(() => Date.now() / 1000);
  useEffect(() => {
    if (!goes) return undefined;
    const timer = setInterval(() => setNow(Date.now() / 1000), 1000);
    return () => clearInterval(timer);
  }, [goes]);
  return now;
}

function useWidth(ref) {
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    setWidth(ref.current.clientWidth); // before the first paint, so that nothing jumps
    const look = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    look.observe(ref.current);
    return () => look.disconnect();
  }, []);
  return width;
}

