// Tests of the words that tell a call apart from others of its tool.

import assert from "node:assert/strict";
import { test } from "node:test";
import { apart } from "../../../src/handrail/serve/page/call_line.js";

/** A view whose log has one call for each of these arguments. */
function view(...given) {
  const calls = Object.fromEntries(given.map(([name, value], at) => [`c${at}`, { id: `c${at}`, name, arguments: typeof value === "string" ? value : JSON.stringify(value), scope: "" }]));
  return { calls, entries: { "": Object.keys(calls).map((id) => ({ kind: "call", id })) } };
}

test("it is the first argument that no earlier call of the tool has", () => {
  const calls = view(["edit", { path: "a.md", old: "one" }], ["read", { path: "b.md" }], ["edit", { path: "a.md", old: "two" }], ["edit", { path: "b.md", old: "two" }]);
  assert.deepEqual(["c0", "c1", "c2", "c3"].map((id) => apart(calls, id)), ["a.md", "b.md", "two", "b.md"]);
});

test("arguments that are the same, missing, lists or being written", () => {
  const calls = view(["pay", { to: ["Ann"], amount: 9007199254740993n.toString() }], ["pay", { to: ["Ann"], amount: "9007199254740993" }], ["look", {}], ["look", '{"path": "a‮b\\nc'], ["look", { text: "x".repeat(500) }]);
  assert.equal(apart(calls, "c1"), "9007199254740993"); // nothing tells them apart
  assert.equal(apart(calls, "c2"), "");
  assert.equal(apart(calls, "c3"), "a\\u202eb c");
  assert.equal(apart(calls, "c4").length, 120);
});
