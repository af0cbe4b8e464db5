// A time axis that shortens long idle stretches, and durations in words. No DOM.

import { workOf } from "./spans.js";

const BREAK_OVER = 5; // an idle stretch is shortened if it is longer than this many seconds
const BREAK_TIMES = 2; // ... and longer than this many times the run's working time
const BREAK_SHARE = 0.07; // the maximum share of the width for a shortened stretch, unless all stretches are shortened

/**
 * @typedef {{start: number, end: number, x: number, width: number, broken: boolean}} Stretch  x and width in 0..1
 * @typedef {{start: number, end: number, stretches: Stretch[], at: (time: number) => number}} Axis
 * @returns {Axis}
 */
export function axisOf(spans) {
  const start = Math.min(...spans.map((span) => span.start));
  const end = Math.max(...spans.map((span) => span.end), start + 1e-3);
  const stretches = laidOut(cut(spans, start, end));
  return { start, end, stretches, at: (time) => placed(stretches, time) };
}

/** The run's time in stretches, with long idle ones marked. */
function cut(spans, start, end) {
  const work = workOf(spans);
  const worked = work.reduce((sum, [from, to]) => sum + to - from, 0);
  const least = Math.max(BREAK_OVER, BREAK_TIMES * worked);
  const stretches = [];
  let from = start;
  const quiet = (a, b) => {
    if (b - a <= least) return;
    if (a > from) stretches.push({ start: from, end: a, broken: false });
    stretches.push({ start: a, end: b, broken: true });
    from = b;
  };
  let last = start;
  for (const [a, b] of work) {
    quiet(last, a);
    last = Math.max(last, b);
  }
  quiet(last, end);
  if (end > from || !stretches.length) stretches.push({ start: from, end, broken: false });
  return stretches;
}

function laidOut(stretches) {
  const breaks = stretches.filter((one) => one.broken).length;
  const share = breaks ? Math.min(BREAK_SHARE, 0.5 / breaks) : 0;
  const whole = breaks === stretches.length; // if so, nothing else needs room
  const drawn = stretches.reduce((sum, one) => sum + (one.broken ? 0 : one.end - one.start), 0);
  let x = 0;
  return stretches.map((one) => {
    const plain = drawn ? ((one.end - one.start) / drawn) * (1 - share * breaks) : 0;
    const width = whole ? 1 / breaks : one.broken ? share : plain;
    const made = { ...one, x, width };
    x += width;
    return made;
  });
}

function placed(stretches, time) {
  for (const one of stretches) {
    if (time <= one.end) {
      const part = one.end > one.start ? (time - one.start) / (one.end - one.start) : 0;
      return one.x + one.width * Math.min(1, Math.max(0, part));
    }
  }
  return 1;
}

const STEPS = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200,
  86400, 172800, 604800, 2592000,
];

const TICK_EVERY = 76; // pixels
const LETTER = 8.25; // pixels: the letters of a label are no wider on average
const APART = 6; // pixels between two labels

/**
 * The labels above an axis that is `width` pixels wide: the durations of the breaks, and ticks in the other stretches. A
 * label is left out if it would be cut off or touch another one. A tick shows the time since the run started. After a
 * break it has a plus, and shows the time since the break.
 * @returns {{x: number, left: number, long: number, words: string, broken: boolean}[]}  in pixels; `x` is the place that is meant
 */
export function labelsOf(axis, width) {
  const labels = [];
  const add = (x, left, words, broken) => {
    const long = words.length * LETTER;
    const free = left >= 0 && left + long <= width && labels.every((one) => left >= one.left + one.long + APART || left + long + APART <= one.left);
    if (free) labels.push({ x, left, long, words, broken });
  };
  for (const one of axis.stretches.filter(({ broken }) => broken)) {
    const words = lasting(one.end - one.start);
    const middle = (one.x + one.width / 2) * width;
    const half = (words.length * LETTER) / 2;
    add(middle, Math.min(Math.max(0, middle - half), width - 2 * half), words, true);
  }
  for (const one of axis.stretches) {
    const lasted = one.end - one.start;
    if (one.broken || lasted <= 0) continue;
    const step = STEPS.find((size) => (size / lasted) * one.width * width >= TICK_EVERY) ?? Infinity;
    const sign = one.x > 0 ? "+" : "";
    for (let at = 0; at * step <= lasted || at === 0; at += 1) {
      const time = at ? at * step : 0;
      const x = (one.x + (time / lasted) * one.width) * width;
      add(x, x + 3, sign + tickWords(time, step), false);
    }
  }
  return labels;
}

/** A time on the axis, with the precision of its step. */
function tickWords(time, step) {
  if (time < 1e-9) return "0 s";
  if (step < 1) return time < 1 ? `${Math.round(time * 1000)} ms` : `${trim(time)} s`;
  return lasting(time);
}

function trim(number) {
  return String(Math.round(number * 1000) / 1000);
}

/** A duration in words: 84 ms, 2.5 s, 1 min 20 s, 3 h, 2 d 4 h. */
export function lasting(time) {
  if (time < 0.9995) return `${Math.round(time * 1000)} ms`;
  if (time < 9.95) return `${trim(Math.round(time * 10) / 10)} s`;
  if (time < 59.5) return `${Math.round(time)} s`;
  const units = [
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
    ["s", 1],
  ];
  const at = Math.max(0, units.findIndex(([, size]) => Math.round(time) >= size));
  const [name, size] = units[at];
  const [small, smallSize] = units[Math.min(at + 1, 3)];
  const whole = Math.floor(Math.round(time / smallSize) * smallSize / size);
  const rest = Math.round(time / smallSize) - (whole * size) / smallSize;
  return rest > 0 && smallSize < size ? `${whole} ${name} ${rest} ${small}` : `${whole} ${name}`;
}
