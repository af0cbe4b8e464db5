// The spans of a run: what happened when, and inside which other span. No DOM.

/**
 * @typedef {{
 *   id: string, kind: "turn"|"call"|"run", label: string, status: string, depth: number, parent: string|null,
 *   start: number, end: number, open: boolean, waits: {start: number, end: number, name: string, open: boolean}[],
 *   usage: {input: number, output: number, cached?: number}|null, cost: string|null, message: string, children: boolean,
 *   record: object, before?: object[], model?: string|null, leftOut?: number|null, failed?: {model: string, error: string}[], callId?: string, reversed?: string[],
 * }} Span  Times are seconds since 1970. `record` is the span's part of the tree, and `before` are the calls of the turn before a turn.
 */

/**
 * The spans of the tree that have a time, parents before children, and otherwise in the order in which they began.
 * @param {object} tree a run, as `GET /threads/{id}/runs/{run_id}` returns it
 * @param {number} now seconds since 1970: the end of open spans
 * @returns {Span[]}
 */
export function spansOf(tree, now) {
  const goes = isGoing(tree);
  const made = { spans: [], now: goes ? now : lastTime(tree), goes };
  turnsInto(made, tree?.turns ?? [], "t", 0, null);
  return inOrder(made.spans);
}

function inOrder(spans) {
  const inside = Map.groupBy(spans, (span) => span.parent);
  const below = (parent) => (inside.get(parent) ?? []).toSorted((a, b) => a.start - b.start).flatMap((span) => [span, ...below(span.id)]);
  return below(null);
}

/** Whether the run is active or waits for an answer. */
export function isGoing(tree) {
  return ["running", "waiting", "parked"].includes(tree?.status);
}

function turnsInto(made, turns, prefix, depth, parent) {
  turns.forEach((turn, at) => {
    const id = `${prefix}${turn.number ?? at + 1}`;
    const start = seconds(turn.at);
    if (start === null) return;
    const calls = turn.calls ?? [];
    // If a turn's time includes its calls, its bar shows only the model's part.
    const first = Math.min(...calls.map((call) => seconds(call.at) ?? Infinity));
    const end = Math.min(endOf(made, start, turn.seconds), Math.max(first, start));
    made.spans.push({
      id, parent, depth, kind: "turn", record: turn, before: turns[at - 1]?.calls ?? [], label: `Turn ${turn.number ?? at + 1}`, model: turn.model ?? null, status: turn.answered === false ? "error" : "ok", start, end,
      open: made.goes && isOpen(turn) && !calls.length, waits: [], usage: turn.usage ?? null, cost: turn.cost ?? null,
      message: turn.text ?? "", failed: turn.failed ?? [], children: false, leftOut: turn.left_out ?? null,
    });
    callsInto(made, calls, `${id}.`, depth, parent);
  });
}

function callsInto(made, calls, prefix, depth, parent) {
  calls.forEach((call, at) => {
    const id = `${prefix}c${at + 1}`;
    const start = seconds(call.at);
    if (start === null) return;
    const end = endOf(made, start, call.seconds);
    const inner = [...(call.calls ?? []), ...(call.runs ?? []).flatMap((run) => [...(run.turns ?? []), ...(run.calls ?? [])])];
    made.spans.push({
      id, parent, depth, kind: "call", record: call, label: call.tool, status: statusOf(made, call), start, end,
      open: made.goes && isOpen(call), waits: waitsOf(call, start, end, inner), usage: call.usage ?? null, cost: call.cost ?? null,
      message: call.message ?? "", callId: call.id, children: inner.length > 0, reversed: reversedBy(call),
    });
    callsInto(made, call.calls ?? [], `${id}.`, depth + 1, id);
    (call.runs ?? []).forEach((run, place) => runInto(made, run, `${id}.r${place + 1}`, depth + 1, id));
  });
}

/** The status of a call. While the run is active, an open call is either waiting for an answer or running. */
function statusOf(made, call) {
  const status = call.status ?? "open";
  if (status !== "open" || !made.goes) return status;
  return (call.questions ?? []).some((question) => !question.answered) ? "waiting" : "running";
}

/** The ways in which what a call did was reversed afterwards. */
function reversedBy(call) {
  return [[call.undone, "undone"], [call.compensated, "compensated"], [call.rolled_back, "rolled back"]].filter(([holds]) => holds).map(([, word]) => word);
}

/** A nested run: a span over its contents, then the contents. */
function runInto(made, run, id, depth, parent) {
  const at = made.spans.length;
  made.spans.push(null);
  turnsInto(made, run.turns ?? [], `${id}.t`, depth + 1, id);
  callsInto(made, run.calls ?? [], `${id}.`, depth + 1, id);
  const inner = made.spans.slice(at + 1);
  if (!inner.length) {
    made.spans.pop();
    return;
  }
  made.spans[at] = {
    id, parent, depth, kind: "run", record: run, label: run.name ?? "run", status: inner.some((span) => span.open) ? "running" : "ok",
    start: Math.min(...inner.map((span) => span.start)), end: Math.max(...inner.map((span) => span.end)),
    open: inner.some((span) => span.open), waits: [], usage: sum(run.turns ?? []), cost: run.cost ?? null, message: "", children: true,
  };
}

function sum(turns) {
  const used = turns.map((turn) => turn.usage).filter(Boolean);
  if (!used.length) return null;
  const all = (name) => used.reduce((total, one) => total + (one[name] ?? 0), 0);
  return { input: all("input"), output: all("output"), cached: all("cached") };
}

/**
 * When a call waited for a person. If the record lacks the time of the answer, the wait is assumed to last until the
 * next thing started in the call, or until its end.
 */
function waitsOf(call, start, end, inner) {
  const asked = (call.questions ?? []).map((question) => ({ ...question, from: seconds(question.asked_at) ?? start })).sort((a, b) => a.from - b.from);
  const begun = [...inner.map((one) => seconds(one.at)), ...asked.map((one) => one.from)].filter((time) => time !== null);
  return asked.map((question) => {
    const next = Math.min(end, ...begun.filter((time) => time > question.from));
    const until = question.answered ? (seconds(question.answered_at) ?? next) : end;
    const from = Math.max(start, Math.min(question.from, end));
    return { start: from, end: Math.max(from, Math.min(until, end)), name: question.name ?? question.kind ?? "question", open: !question.answered };
  });
}

function endOf(made, start, lasted) {
  return typeof lasted === "number" ? start + Math.max(0, lasted) : Math.max(start, made.now);
}

function isOpen(one) {
  return typeof one.seconds !== "number";
}

function lastTime(tree) {
  let last = 0;
  const see = (one) => {
    const start = seconds(one.at);
    if (start !== null) last = Math.max(last, start + (one.seconds ?? 0));
    // A run's own line has the number of questions, and a call has the questions themselves.
    for (const question of Array.isArray(one.questions) ? one.questions : []) {
      last = Math.max(last, seconds(question.asked_at) ?? 0, seconds(question.answered_at) ?? 0);
    }
    for (const inner of [...(one.turns ?? []), ...(one.calls ?? []), ...(one.runs ?? [])]) see(inner);
  };
  see(tree ?? {});
  return last;
}

/** A time, given as a number or ISO 8601 text, in seconds since 1970; null if it is neither. */
export function seconds(time) {
  if (typeof time === "number" && Number.isFinite(time)) return time;
  const parsed = typeof time === "string" ? Date.parse(time) / 1000 : NaN;
  return Number.isFinite(parsed) ? parsed : null;
}

/** The intervals in which a model or code was working, without the time spent only waiting for a person. */
export function workOf(spans) {
  const inside = Map.groupBy(spans, (span) => span.parent);
  const found = [];
  for (const span of spans) {
    if (span.kind === "run") continue;
    const apart = [...span.waits, ...(inside.get(span.id) ?? [])];
    found.push(...without([span.start, span.end], apart.map((one) => [one.start, one.end])));
  }
  return merged(found);
}

/** Returns the parts of an interval that the other intervals do not cover. */
function without([start, end], others) {
  const left = [];
  let from = start;
  for (const [a, b] of merged(others)) {
    if (a > from) left.push([from, Math.min(a, end)]);
    from = Math.max(from, b);
    if (from >= end) return left.filter(([x, y]) => y >= x);
  }
  left.push([from, end]);
  return left;
}

function merged(intervals) {
  const all = [];
  for (const [start, end] of [...intervals].sort((a, b) => a[0] - b[0])) {
    const last = all.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else all.push([start, end]);
  }
  return all;
}
