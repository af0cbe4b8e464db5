// Tests for timeline/spans.js and timeline/axis.js.

import assert from "node:assert/strict";
import { test } from "node:test";
import { axisOf, labelsOf, lasting } from "../../../src/handrail/serve/page/timeline/axis.js";
import { spansOf } from "../../../src/handrail/serve/page/timeline/spans.js";

const DAY = 86400;
const call = (tool, at, seconds, more = {}) => ({ tool, at, seconds, status: "ok", calls: [], runs: [], questions: [], ...more });
const turn = (number, at, seconds, calls = []) => ({ number, at, seconds, calls, usage: { input: 10, output: 2 } });

test("parents come before their children, which are one level deeper", () => {
  const inner = { name: "helper", turns: [turn(1, 3, 1, [call("fetch", 4, 1)])], calls: [] };
  const spans = spansOf({ status: "done", turns: [turn(1, 0, 1, [call("ask", 2, 5, { runs: [inner], calls: [call("log", 2, 0.5)] })])] }, 0);
  assert.deepEqual(spans.map((span) => [span.label, span.kind, span.depth]), [
    ["Turn 1", "turn", 0], ["ask", "call", 0], ["log", "call", 1], ["helper", "run", 1], ["Turn 1", "turn", 2], ["fetch", "call", 2],
  ]);
  assert.deepEqual([spans[3].start, spans[3].end], [3, 5]);
});

test("calls come in the order in which they began, with what is inside each", () => {
  const inner = { name: "helper", turns: [turn(1, 2, 0.1, [call("c", 2.1, 1)])], calls: [call("b", 1.5, 0.1)] };
  const outer = call("late", 1, 5, { runs: [inner], calls: [call("d", 4, 1), call("a", 1.2, 0.1)] });
  const spans = spansOf({ status: "done", turns: [turn(1, 0, 0.1, [outer, call("early", 0.5, 9)])] }, 0);
  assert.deepEqual(spans.map((span) => span.label), ["Turn 1", "early", "late", "a", "helper", "b", "Turn 1", "c", "d"]);
  assert.deepEqual(spans[1].record.tool, "early");
});

test("a turn has the failures that came before its answer", () => {
  const failed = [{ model: "a:1", error: "down" }];
  const spans = spansOf({ status: "done", turns: [{ ...turn(1, 0, 1), failed }, turn(2, 2, 1)] }, 0);
  assert.deepEqual(spans.map((span) => span.failed), [failed, []]);
});

test("a turn that nobody answered has failed", () => {
  const unanswered = { number: 2, at: 2, seconds: 3, answered: false, failed: [{ model: "a:1", error: "down" }], calls: [] };
  const spans = spansOf({ status: "failed", turns: [turn(1, 0, 1), unanswered] }, 0);
  assert.deepEqual(spans.map((span) => [span.status, span.start, span.end]), [["ok", 0, 1], ["error", 2, 5]]);
});

test("a call says how what it did was reversed", () => {
  const inner = [call("book", 2, 1, { compensated: true }), call("note", 2, 1, { rolled_back: true }), call("read", 2, 1)];
  const spans = spansOf({ status: "cancelled", turns: [turn(1, 0, 1, [call("trip", 2, 1, { status: "cancelled", calls: inner, undone: true })])] }, 0);
  assert.deepEqual(spans.slice(1).map((span) => span.reversed), [["undone"], ["compensated"], ["rolled back"], []]);
});

test("open spans end now while the run is active", () => {
  const tree = { status: "running", turns: [turn(1, 0, 1, [call("slow", 2, null, { status: "running" })])] };
  assert.deepEqual(spansOf(tree, 10).map((span) => [span.end, span.open]), [[1, false], [10, true]]);
  assert.deepEqual(spansOf({ ...tree, status: "cancelled" }, 10).map((span) => [span.end, span.open]), [[1, false], [2, false]]);
});

test("a wait ends with its answer, or when something else begins, or with the call", () => {
  const asked = { name: "approval", asked_at: 3, answered: true };
  const waits = (more) => spansOf({ status: "done", turns: [turn(1, 0, 1, [call("write", 2, 10, more)])] }, 0)[1].waits.map((wait) => [wait.start, wait.end, wait.open]);
  assert.deepEqual(waits({ questions: [{ ...asked, answered_at: 5 }] }), [[3, 5, false]]);
  assert.deepEqual(waits({ questions: [{ ...asked, asked_at: "1970-01-01T00:00:03Z" }] }), [[3, 12, false]]);
  assert.deepEqual(waits({ questions: [asked], calls: [call("log", 7, 1)] }), [[3, 7, false]]);
  assert.deepEqual(waits({ questions: [{ ...asked, answered: false }], calls: [call("log", 7, 1)] }), [[3, 12, true]]);
});

test("a waiting call is drawn as waiting until now, even while its run is parked", () => {
  const asked = { name: "approval", asked_at: 2, answered: false, answered_at: null };
  const tree = { turns: [turn(1, 0, 1, [call("write", 2, null, { status: "open", questions: [asked] })])] };
  for (const status of ["running", "parked"]) {
    const [, span] = spansOf({ ...tree, status }, DAY);
    assert.deepEqual([span.status, span.end, span.open, span.waits[0].end], ["waiting", DAY, true, DAY]);
  }
  const working = call("write", 2, null, { status: "open", questions: [{ ...asked, answered: true, answered_at: 3 }] });
  const [, span] = spansOf({ status: "running", turns: [turn(1, 0, 1, [working])] }, 9);
  assert.deepEqual([span.status, span.waits.map((wait) => [wait.start, wait.end, wait.open])], ["running", [[2, 3, false]]]);
});

test("days of waiting are shortened, seconds of work stay readable, and the order is kept", () => {
  const wait = { name: "approval", asked_at: 3, answered: true, answered_at: 3 + 2 * DAY };
  const spans = spansOf({ status: "done", turns: [turn(1, 0, 1, [call("write", 2, 2 * DAY + 2, { questions: [wait] })]), turn(2, 2 * DAY + 4, 1)] }, 0);
  const axis = axisOf(spans);
  assert.deepEqual(axis.stretches.map((one) => one.broken), [false, true, false]);
  assert.ok(axis.at(1) - axis.at(0) > 0.1, "a second of the model's work is visible");
  const times = [0, 1, 2, 3, DAY, 3 + 2 * DAY, 4 + 2 * DAY, 5 + 2 * DAY];
  const places = times.map(axis.at);
  assert.deepEqual(places, [...places].sort((a, b) => a - b));
  assert.equal(places[0], 0);
  assert.ok(Math.abs(places.at(-1) - 1) < 1e-9);
});

test("the axis is not shortened while a call works during another's wait", () => {
  const wait = { name: "approval", asked_at: 1, answered: true, answered_at: 1000 };
  const spans = spansOf({ status: "done", turns: [turn(1, 0, 1, [call("write", 1, 999, { questions: [wait] }), call("build", 1, 999)])] }, 0);
  assert.deepEqual(axisOf(spans).stretches.map((one) => one.broken), [false]);
});

test("an axis with one span works, even if the span has no length", () => {
  for (const length of [0, 1e-6, 3 * DAY]) {
    const axis = axisOf(spansOf({ status: "done", turns: [turn(1, 100, length)] }, 0));
    assert.equal(axis.at(100), 0);
    assert.ok(labelsOf(axis, 760).length >= 1);
    assert.ok(labelsOf(axis, 760).length <= 11);
  }
});

test("ticks keep their distance and have distinct, readable labels", () => {
  for (const length of [0.004, 0.3, 7, 95, 4000, 90_000, 40 * DAY]) {
    const marks = labelsOf(axisOf(spansOf({ status: "done", turns: [turn(1, 0, length)] }, 0)), 760);
    for (let at = 1; at < marks.length; at += 1) assert.ok(marks[at].x - marks[at - 1].x >= 76 - 1e-9);
    assert.ok(marks.length >= 3, `${length}: ${marks.map((mark) => mark.words)}`);
    assert.equal(new Set(marks.map((mark) => mark.words)).size, marks.length, marks.map((mark) => mark.words).join());
  }
});

test("no label touches another one or is cut off, however short the stretches between the breaks are", () => {
  for (const lasts of [[0.05, 2], [2, 0.05], [0.01, 0.01, 3, 0.01], [1, 1, 1], [0.1, 0.1]]) {
    for (const apart of [15, 86_399, 2 * DAY + 50_000]) {
      const turns = lasts.map((seconds, place) => turn(place + 1, apart * place, seconds));
      const axis = axisOf(spansOf({ status: "done", turns }, 0));
      for (const width of [90, 220, 760]) {
        const labels = labelsOf(axis, width).sort((a, b) => a.left - b.left);
        assert.ok(labels.some((label) => label.broken), `${apart} ${width}`);
        for (const [place, { left, long, words }] of labels.entries()) {
          assert.ok(long >= 7.5 * words.length && left >= 0 && left + long <= width, `${words} is cut off`);
          if (place) assert.ok(left > labels[place - 1].left + labels[place - 1].long, `${words} touches ${labels[place - 1].words}`);
        }
      }
    }
  }
});

test("durations read as a person would write them", () => {
  const table = { 0.0844: "84 ms", 0.9999: "1 s", 2.54: "2.5 s", 42.4: "42 s", 59.7: "1 min", 80: "1 min 20 s", 3599.8: "1 h", 7320: "2 h 2 min", 187_300: "2 d 4 h" };
  for (const [time, words] of Object.entries(table)) assert.equal(lasting(Number(time)), words);
});
