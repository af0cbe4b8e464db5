// Tests for the page's view of a thread, without a browser: node --test tests/serve/page/

import assert from "node:assert/strict";
import { test } from "node:test";

const PAGE = new URL("../../../src/handrail/serve/page/", import.meta.url);
const store = await import(new URL("store.js", PAGE));
const { partial } = await import(new URL("partial.js", PAGE));
const { patched } = await import(new URL("patch.js", PAGE));
const { message } = await import(new URL("server.js", PAGE));
const words = await import(new URL("words.js", PAGE));

const played = (events, view = store.blank("t")) => events.reduce(store.reduce, view);
const RUN = { type: "RUN_STARTED", runId: "leg", metadata: { handrail: { run_id: "r1" } } };
const CALL = [
  { type: "TOOL_CALL_START", toolCallId: "c1", toolCallName: "read_file" },
  { type: "TOOL_CALL_ARGS", toolCallId: "c1", delta: '{"path": "pl' },
  { type: "TOOL_CALL_ARGS", toolCallId: "c1", delta: 'an.md"}' },
  { type: "TOOL_CALL_END", toolCallId: "c1" },
];
const QUESTION = { id: "q1", kind: "approval", name: "approval", call_id: "c1", digest: "d", payload: {} };

test("text grows piece by piece until it ends", () => {
  const view = played([
    RUN,
    { type: "TEXT_MESSAGE_START", messageId: "m1", role: "assistant" },
    { type: "TEXT_MESSAGE_CONTENT", messageId: "m1", delta: "Hel" },
    { type: "TEXT_MESSAGE_CONTENT", messageId: "m1", delta: "lo" },
  ]);
  assert.deepEqual(view.entries[""], [{ kind: "text", id: "m1" }]);
  assert.deepEqual(view.messages.m1, { text: "Hello", open: true });
  assert.equal(played([{ type: "TEXT_MESSAGE_END", messageId: "m1" }], view).messages.m1.open, false);
  assert.equal(view.status, "running");
});

test("unchanged parts keep their identity", () => {
  const before = played([RUN, ...CALL, { type: "TEXT_MESSAGE_START", messageId: "m1", role: "assistant" }]);
  const after = played([{ type: "TEXT_MESSAGE_CONTENT", messageId: "m1", delta: "x" }], before);
  assert.equal(after.calls, before.calls);
  assert.equal(after.entries, before.entries);
  assert.notEqual(after.messages, before.messages);
  assert.equal(before.messages.m1.text, "");
});

test("a call's arguments grow while they are written, then its facts and its result are added", () => {
  const view = played([
    RUN,
    ...CALL,
    { type: "CUSTOM", name: "handrail.call", value: { call_id: "c1", status: "ok", seconds: 0.2 } },
    { type: "TOOL_CALL_RESULT", toolCallId: "c1", content: "the plan" },
  ]);
  assert.equal(view.calls.c1.arguments, '{"path": "plan.md"}');
  assert.equal(view.calls.c1.writing, false);
  assert.equal(view.calls.c1.result, "the plan");
  assert.equal(view.calls.c1.facts.seconds, 0.2);
  assert.equal(view.changes, 1);
});

test("a call is not shown twice after a resume", () => {
  const view = played([RUN, ...CALL, RUN, { type: "TOOL_CALL_RESULT", toolCallId: "c1", content: "x" }]);
  assert.equal(view.entries[""].length, 1);
  assert.equal(view.runs.length, 1);
});

test("a question is shown in its call, and once closed it does not come back", () => {
  const asked = played([RUN, ...CALL, { type: "CUSTOM", name: "handrail.question", value: QUESTION }]);
  assert.deepEqual(store.questionsOf(asked, "c1"), [QUESTION]);
  assert.equal(store.isAsked(asked, "c1"), true);
  assert.deepEqual(store.questionsOf(asked, null), []);
  const interrupt = { type: "RUN_FINISHED", outcome: { type: "interrupt", interrupts: [{ metadata: { handrail: QUESTION } }] } };
  const waiting = played([interrupt], asked);
  assert.equal(waiting.status, "waiting");
  assert.equal(Object.keys(waiting.questions).length, 1);
  const closing = { type: "CUSTOM", name: "handrail.question.closed", value: { question_id: "q1", outcome: "answered", by: "ann" } };
  const closed = played([closing, interrupt], waiting);
  assert.deepEqual(closed.questions, {});
  assert.equal(closed.closed.q1.by, "ann");
});

test("a model that failed is told until its run goes on or is over", () => {
  const failed = { type: "CUSTOM", name: "handrail.model_failed", value: { model: "a:1", error: "Overloaded", attempt: 1, retry_in: 3, next_model: "" } };
  const view = played([RUN, failed, { ...failed, subagentRunId: "a1" }]);
  assert.equal(view.failing[""].retry_in, 3);
  const inner = played([{ type: "TEXT_MESSAGE_START", messageId: "m1", role: "assistant", subagentRunId: "a1" }], view);
  assert.deepEqual(Object.keys(inner.failing), [""]);
  for (const type of ["REASONING_MESSAGE_START", "TOOL_CALL_START", "RUN_FINISHED", "RUN_ERROR"]) {
    assert.equal(played([{ type, messageId: "m2", toolCallId: "c2" }], view).failing[""], undefined);
  }
});

test("a message to the run waits until it is told or withdrawn, and older news about it changes nothing", () => {
  const queued = (more) => ({ type: "CUSTOM", name: "handrail.queued", value: { id: "m1", run_id: "r1", text: "a", at: "2026-01-01T00:00:00Z", state: "waiting", ...more } });
  const edited = { text: "b", at: "2026-01-01T00:00:00.5Z", edited: true };
  const view = played([RUN, queued({}), queued(edited), queued({})]);
  assert.deepEqual(store.waitingIn(view).map((message) => message.text), ["b"]);
  const told = played([queued({ ...edited, state: "told" }), queued(edited)], view);
  assert.deepEqual(store.waitingIn(told), []);
  const over = played([{ type: "RUN_FINISHED" }, queued(edited), queued({ ...edited, id: "m2" })], view);
  assert.deepEqual(store.waitingIn(over), []);
  const snapshot = { id: "t", status: "waiting", queued: [queued({}).value] };
  assert.equal(store.waitingIn(store.fromSnapshot(snapshot)).length, 1);
});

test("a message that is not accepted leaves the view, and what came meanwhile stays", () => {
  const before = { ...store.blank("t"), status: "idle" };
  const said = { ...store.withSaid(before, "said-1", "hi"), status: "running" };
  const view = store.withoutSaid(played([{ type: "CUSTOM", name: "handrail.message", value: { id: "u1", role: "user", content: "theirs" } }], said), "said-1", "idle");
  assert.deepEqual(view.entries[""], [{ kind: "user", id: "u1" }]);
  assert.deepEqual(store.withoutSaid(said, "said-1", "idle").entries[""], []);
  assert.equal(store.withoutSaid(said, "said-1", "idle").status, "idle");
});

test("a question whose call is not shown belongs to the thread", () => {
  const view = played([RUN, { type: "CUSTOM", name: "handrail.question", value: QUESTION }]);
  assert.deepEqual(store.questionsOf(view, null), [QUESTION]);
});

test("nested agents have their own entries, and the outer call knows of their questions", () => {
  const view = played([
    RUN,
    ...CALL,
    { type: "SUBAGENT_STARTED", subagentRunId: "a1", name: "reader", parentToolCallId: "c1" },
    { type: "TEXT_MESSAGE_START", messageId: "m2", role: "assistant", subagentRunId: "a1" },
    { type: "TEXT_MESSAGE_CONTENT", messageId: "m2", delta: "I read", subagentRunId: "a1" },
    { type: "TOOL_CALL_START", toolCallId: "c2", toolCallName: "pay", subagentRunId: "a1" },
    { type: "CUSTOM", name: "handrail.question", value: { ...QUESTION, call_id: "c2" } },
    { type: "SUBAGENT_FINISHED", subagentRunId: "a1", outcome: { type: "suspended" } },
  ]);
  assert.deepEqual(view.entries[""].map((entry) => entry.id), ["c1"]);
  assert.deepEqual(view.entries.a1.map((entry) => entry.id), ["m2", "c2"]);
  assert.equal(view.agents.a1.status, "waiting");
  assert.equal(store.isAsked(view, "c1"), true);
  const again = played([{ type: "SUBAGENT_STARTED", subagentRunId: "a1", name: "reader", parentToolCallId: "c1" }], view);
  assert.deepEqual(again.entries.a1, view.entries.a1);
  assert.equal(again.agents.a1.status, "running");
});

test("when a run is over, its calls and questions are closed", () => {
  const going = played([RUN, ...CALL.slice(0, 2), { type: "CUSTOM", name: "handrail.question", value: QUESTION }]);
  const failed = played([{ type: "RUN_ERROR", message: "no more" }], going);
  assert.equal(failed.status, "failed");
  assert.equal(failed.calls.c1.writing, false);
  assert.equal(failed.calls.c1.facts.status, "cancelled");
  assert.deepEqual(failed.questions, {});
  assert.equal(failed.notes["end-r1"].text, "no more");
  const cancelled = played([{ type: "RUN_FINISHED", outcome: { type: "cancelled" } }], going);
  assert.equal(cancelled.status, "cancelled");
});

test("a message that was sent here is shown once, even after the server reports it", () => {
  const said = store.withSaid(store.blank("t"), "said-1", "hello");
  const told = { type: "CUSTOM", name: "handrail.message", value: { id: "u1", role: "user", content: "hello" } };
  const view = played([RUN, told], said);
  assert.deepEqual(view.entries[""], [{ kind: "user", id: "u1" }]);
  assert.deepEqual(played([RUN, told]).messages.u1, { text: "hello", open: false });
});

test("a snapshot gives the same view as its events", () => {
  const facts = { status: "ok", seconds: 1 };
  const live = played([
    RUN,
    { type: "TEXT_MESSAGE_START", messageId: "u", role: "user" },
    { type: "TEXT_MESSAGE_CONTENT", messageId: "u", delta: "go" },
    { type: "TEXT_MESSAGE_END", messageId: "u" },
    ...CALL,
    { type: "CUSTOM", name: "handrail.call", value: { call_id: "c1", ...facts } },
    { type: "TOOL_CALL_RESULT", toolCallId: "c1", content: "the plan" },
    { type: "CUSTOM", name: "handrail.usage", value: { usage: { input: 3, output: 2 }, cost: "0.1" } },
    { type: "RUN_FINISHED", outcome: { type: "success" } },
  ]);
  const shown = store.fromSnapshot({
    id: "t",
    title: "go",
    status: "idle",
    messages: [
      { id: "u", role: "user", content: "go" },
      { id: "a", role: "assistant", content: "", toolCalls: [{ id: "c1", type: "function", function: { name: "read_file", arguments: '{"path": "plan.md"}' } }] },
      { id: "x", role: "tool", toolCallId: "c1", content: "the plan" },
    ],
    calls: { c1: facts },
    runs: [{ id: "r1", status: "done", usage: { input: 3, output: 2 }, cost: "0.1" }],
    last_event_id: "b-9",
  });
  for (const part of ["entries", "messages", "calls", "status", "agents"]) assert.deepEqual(shown[part], live[part], part);
  assert.deepEqual(store.spent(shown), { input: 3, output: 2, cost: 0.1 });
  assert.deepEqual(store.spent(live), store.spent(shown));
});

test("progress belongs to its call, and deltas update it", () => {
  const view = played([
    RUN,
    ...CALL,
    { type: "ACTIVITY_SNAPSHOT", messageId: "progress-c1", activityType: "progress", content: { done: 1, total: 4 } },
    { type: "ACTIVITY_DELTA", messageId: "progress-c1", patch: [{ op: "replace", path: "/done", value: 3 }] },
  ]);
  assert.deepEqual(view.activities["progress-c1"].content, { done: 3, total: 4 });
  assert.equal(view.entries[""].length, 1);
});

const BEGUN = { state: "begun", background_id: "b1", agent: "researcher", call_id: "c1", message: "Which trains run?" };
const BACKGROUND = { type: "ACTIVITY_SNAPSHOT", messageId: "b1/begun", activityType: "handrail.background", content: BEGUN };

test("a background run belongs to the call that began it, also after a snapshot without it", () => {
  const begun = played([RUN, ...CALL, BACKGROUND, BACKGROUND]);
  assert.deepEqual(begun.entries[""], [{ kind: "call", id: "c1" }]);
  const toolCalls = [{ id: "c1", function: { name: "look_up", arguments: "{}" } }];
  const snapshot = { type: "MESSAGES_SNAPSHOT", messages: [{ id: "m1", role: "assistant", content: "", toolCalls }] };
  for (const view of [begun, played([snapshot], begun)]) {
    assert.deepEqual(store.begunBy(view, "c1"), [BEGUN]);
    assert.deepEqual(store.begunBy(view, "c2"), []);
    assert.equal(store.endOf(view, "b1"), undefined);
  }
});

test("an inner call's background run belongs to the call that has a card", () => {
  const inner = { ...BACKGROUND, content: { ...BEGUN, call_id: "c1.1" } };
  const view = played([RUN, ...CALL, inner]);
  assert.equal(store.begunBy(view, "c1").length, 1);
  const shown = played([{ type: "TOOL_CALL_START", toolCallId: "c1.1", toolCallName: "look_up" }], view);
  assert.equal(store.begunBy(shown, "c1").length, 0);
  assert.equal(store.begunBy(shown, "c1.1").length, 1);
});

test("the end of a background run is a row of its own, and the state of its beginning", () => {
  const content = { state: "ended", background_id: "b1", agent: "researcher", end: "failed", text: "no answer" };
  const view = played([RUN, ...CALL, BACKGROUND, { ...BACKGROUND, messageId: "b1/ended", content }]);
  assert.deepEqual(view.entries[""].at(-1), { kind: "activity", id: "b1/ended" });
  assert.equal(store.endOf(view, "b1"), "failed");
});

test("patches follow RFC 6902 and do not change the old value", () => {
  const value = { a: [1, 2], "b/c": { d: 1 } };
  const patch = [
    { op: "add", path: "/a/-", value: 3 },
    { op: "add", path: "/a/0", value: 0 },
    { op: "replace", path: "/b~1c/d", value: 2 },
    { op: "remove", path: "/a/1" },
    { op: "move", from: "/b~1c", path: "/e" },
    { op: "copy", from: "/a/0", path: "/f" },
  ];
  assert.deepEqual(patched(value, patch), { a: [0, 2, 3], e: { d: 2 }, f: 0 });
  assert.deepEqual(value, { a: [1, 2], "b/c": { d: 1 } });
});

test("every prefix of a JSON text can be parsed, and adds nothing that is not in the text", () => {
  const value = { path: "a \"q\" \\ \u00e9\n", lines: [1, 20, { deep: [true, null, "x,y{"] }], last: -1.5e3 };
  const text = JSON.stringify(value);
  for (let end = 1; end <= text.length; end++) {
    const read = partial(text.slice(0, end));
    assert.equal(typeof read, "object", text.slice(0, end));
    for (const key of Object.keys(read)) assert.ok(key in value, text.slice(0, end));
    if (read.path !== undefined) assert.ok(value.path.startsWith(read.path));
  }
  assert.deepEqual(partial(text), value);
  assert.equal(partial("no json"), undefined);
});

test("a block of an event stream is parsed with its id, and a ping is ignored", () => {
  assert.deepEqual(message('id: b-3\ndata: {"type":\ndata: "X"}'), { id: "b-3", event: { type: "X" } });
  assert.deepEqual(message(": ping"), {});
});

test("times, counts and prices have a short form", () => {
  assert.deepEqual([0.0123, 3.14159, 42.9, 192, 7500].map(words.duration), ["12 ms", "3.1 s", "42 s", "3 min 12 s", "2 h 5 min"]);
  assert.deepEqual([999, 1000, 12_345, 2_500_000].map(words.count), ["999", "1k", "12.3k", "2.5M"]);
  assert.deepEqual(["0", "0.00001", "0.0042", "3.456"].map(words.dollars), ["$0", "<$0.0001", "$0.0042", "$3.46"]);
  const now = Date.parse("2026-05-31T12:00:00Z");
  assert.deepEqual(["11:59:50", "11:30:00", "09:00:00"].map((time) => words.ago(`2026-05-31T${time}Z`, now)), ["now", "30 min", "3 h"]);
});

const told = (name, value) => ({ type: "CUSTOM", name, value });
const inner = (id, parent, status, facts = {}) =>
  told("handrail.call", { call_id: id, tool: id, status, parent_call_id: parent, ...facts });

test("calls that a tool made itself are found under its card, at any depth", () => {
  const view = played([RUN, ...CALL, inner("c1.1", "c1", "denied", { reason: "Not today." }), inner("c1.1.1", "c1.1", "error")]);
  assert.deepEqual(store.innerOf(view, "c1").map((call) => call.facts.reason), ["Not today."]);
  assert.deepEqual(store.allInside(view, "c1").map((call) => call.id), ["c1.1", "c1.1.1"]);
  assert.deepEqual(store.innerOf(view, "c2"), []);
  assert.deepEqual(view.entries[""], [{ kind: "call", id: "c1" }]);
});

test("events that two tools emit at once are kept with their calls", () => {
  const emitted = (tool, id, what) => told(tool, { call_id: id, type: "Found", event: { what }, run_id: "r1" });
  const view = played([RUN, ...CALL, emitted("search", "c1", "tea"), emitted("constructor", "c2", "rum"), emitted("search", "c1", "gin")]);
  assert.deepEqual(view.calls.c1.emitted.map((each) => each.event.what), ["tea", "gin"]);
  assert.deepEqual(view.calls.c2.emitted, [{ tool: "constructor", type: "Found", event: { what: "rum" } }]);
  const many = played(Array.from({ length: 150 }, (_, index) => emitted("search", "c1", index)), view);
  assert.equal(many.calls.c1.emitted.length, 100);
  assert.equal(many.calls.c1.emitted.at(-1).event.what, 149);
  assert.equal(played([told("other", { text: "of somebody else" }), told("other", undefined)], view), view);
});

test("answers stay after a reload, with the card around the act that asked", () => {
  const question = { ...QUESTION, kind: "handoff", call_id: "c1.2", message: "When shall we come?" };
  const closed = { question, outcome: "answered", by: "ada", answer: { day: "Monday" } };
  const view = store.fromSnapshot({
    id: "t",
    status: "idle",
    messages: [{ id: "m", role: "assistant", toolCalls: [{ id: "c1", function: { name: "book", arguments: "{}" } }] }],
    calls: { c1: { status: "ok" }, "c1.2": { tool: "book.client", status: "ok", parent_call_id: "c1" } },
    closed: [closed],
  });
  assert.deepEqual(store.closedOf(view, "c1"), [closed]);
  assert.deepEqual(store.closedOf(view, "c2"), []);
});

test("an unfinished run that could not be resumed is shown as failed, with the reason and nothing running", () => {
  const snapshot = {
    id: "t",
    status: "failed",
    messages: [{ id: "m", role: "assistant", toolCalls: [{ id: "c1", function: { name: "book", arguments: "{}" } }] }],
    calls: { c1: { status: "running", began_at: "2026-01-01T00:00:00Z" } },
    runs: [{ id: "r1", status: "parked" }],
  };
  const view = store.fromSnapshot({ ...snapshot, problem: "The code has changed." });
  assert.equal(view.notes["end-r1"].text, "The code has changed.");
  assert.equal(view.calls.c1.facts.status, "cancelled");
  assert.equal(view.runs[0].status, "failed");
  assert.match(store.fromSnapshot(snapshot).notes["end-r1"].text, /The server's log says why/);
});

test("the cost of a thread is unknown if that of one of its runs is", () => {
  const view = { ...store.blank("t"), runs: [{ id: "a", cost: "0.5" }, { id: "b", cost: "0.25" }] };
  assert.equal(store.spent(view).cost, 0.75);
  assert.equal(store.spent(store.withRun(view, "c")).cost, 0.75);
  const played_on = played([{ type: "CUSTOM", name: "handrail.usage", value: { usage: {}, cost: null, run_id: "c" } }], store.withRun(view, "c"));
  assert.equal(store.spent(played_on).cost, null);
});
