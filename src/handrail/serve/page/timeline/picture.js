// The SVG of a timeline: a row for each span. Status is shown by colour and mark, never by colour alone.

import { html, useMemo, useState } from "../vendor/standalone.js";
import { labelsOf, lasting } from "./axis.js";

export const ROW = 26; // pixels; widgets.css uses the same height
export const TOP = 28;
const BAR = 14;
const SIDE = 8; // padding before the axis
const END = 18; // and after it, for the mark behind the last bar

let pictures = 0;

export function Picture({ visible, axis, width, words, marked, point, choose }) {
  const [hatch] = useState(() => `hatch${(pictures += 1)}`);
  const height = TOP + visible.length * ROW + 6;
  const inner = Math.max(1, width - SIDE - END);
  const x = (time) => SIDE + axis.at(time) * inner;
  const drawn = useMemo(
    () => html`<g>
      ${axis.stretches.filter((one) => one.broken).map((one) => gap(one, inner, height))}
      ${labelsOf(axis, inner).map((label) => above(label, height))}
      ${visible.map((span, at) => bar(span, TOP + at * ROW, x, width, hatch))}
    </g>`,
    [visible, axis, width],
  );
  const spanAt = (event) => {
    const y = event.clientY - event.currentTarget.getBoundingClientRect().top - TOP;
    return visible[Math.floor(y / ROW)]?.id ?? null;
  };
  return html`<svg class="timeline-picture" role="img" aria-label=${words} width=${width} height=${height}
      onPointerMove=${(event) => point(spanAt(event))} onClick=${(event) => spanAt(event) && choose(spanAt(event))}>
    <defs>
      <pattern id=${hatch} width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
        <rect class="hatch-ground" width="6" height="6" /><rect class="hatch-line" width="2" height="6" />
      </pattern>
    </defs>
    ${marked >= 0 && html`<rect class="row-mark" x="0" y=${TOP + marked * ROW} width=${width} height=${ROW} />`}
    ${drawn}
  </svg>`;
}

/** A label above the axis, with a line down from it if it is a tick. */
function above({ x, left, words, broken }, height) {
  const at = Math.round(SIDE + x) + 0.5;
  const text = html`<text x=${SIDE + left} y=${TOP - 12}>${words}</text>`;
  if (broken) return html`<g class="break">${text}</g>`;
  return html`<g class="tick"><line x1=${at} y1=${TOP - 6} x2=${at} y2=${height} />${text}</g>`;
}

/** A shortened stretch, with two torn edges. */
function gap({ x, width }, inner, height) {
  const left = SIDE + x * inner;
  const wide = width * inner;
  const edge = (at) => {
    let path = `M${at} ${TOP - 4}`;
    for (let y = TOP - 4, side = 3; y < height - 6; y += 6, side = -side) path += `l${side} 6`;
    return path;
  };
  return html`<g class="break">
    <rect x=${left} y=${TOP - 4} width=${wide} height=${height - TOP} />
    <path d=${edge(left + 1)} /><path d=${edge(left + wide - 4)} />
  </g>`;
}

const FINE = ["ok", "running", "waiting"];

function bar(span, top, x, width, hatch) {
  const left = x(span.start);
  const wide = Math.max(3, x(span.end) - left);
  const y = top + (ROW - BAR) / 2;
  const bad = span.kind !== "run" && !FINE.includes(span.status);
  const kind = `bar is-${span.kind} ${bad ? "is-bad" : ""} ${span.open ? "is-open" : ""}`;
  if (span.kind === "run") {
    // A nested run is a bracket over its contents.
    return html`<g class=${kind} key=${span.id}><path d=${`M${left + 0.5} ${y + BAR - 1}v-5h${Math.max(2, wide - 1)}v5`} />${duration(span, left, wide, y, width)}</g>`;
  }
  return html`<g class=${kind} key=${span.id}>
    <rect class="body" x=${left} y=${y} width=${wide} height=${BAR} rx=${span.kind === "turn" ? BAR / 2 : 2} />
    ${span.waits.map((wait) => html`<rect class="wait" x=${x(wait.start)} y=${y} width=${Math.max(3, x(wait.end) - x(wait.start))} height=${BAR} fill=${`url(#${hatch})`} />`)}
    ${span.open && html`<path class="going" d=${`M${left + wide} ${y - 2}l5 ${BAR / 2 + 2}l-5 ${BAR / 2 + 2}`} />`}
    ${bad && html`<path class="cross" d=${cross(left + wide + 9, y + BAR / 2)} />`}
    ${duration(span, left, wide, y, width, bad || span.open ? 16 : 0)}
  </g>`;
}

function cross(x, y) {
  return `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`;
}

/** The duration of a span: after its bar, or before or inside it if there is no room. A nested run without room has none. */
function duration(span, left, wide, y, width, room = 0) {
  const words = lasting(span.end - span.start);
  const long = words.length * 7.5 + 10;
  const base = y + BAR - 2.5;
  if (left + wide + room + long < width) return html`<text class="lasted" x=${left + wide + room + 5} y=${base}>${words}</text>`;
  if (left > long) return html`<text class="lasted" x=${left - 5} y=${base} text-anchor="end">${words}</text>`;
  if (span.kind === "run") return null;
  // On the stripes of a wait, the label has its own background, so that it stays readable.
  return html`<text class=${span.waits.length ? "lasted is-on-stripes" : "lasted is-inside"} x=${left + 6} y=${base}>${words}</text>`;
}
