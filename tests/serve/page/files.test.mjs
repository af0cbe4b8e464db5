// Tests for files/tree.js.

import assert from "node:assert/strict";
import { test } from "node:test";
import { filesOf, treeOf } from "../../../src/handrail/serve/page/files/tree.js";

const head = (from, to = from) => `diff --git a/${from} b/${to}\n`;
const added = (path) => `${head(path)}new file\n--- /dev/null\n+++ b/${path}\n@@ -0,0 +1 @@\n+x\n`;
const removed = (path) => `${head(path)}deleted file\n--- a/${path}\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n`;
const changed = (path) => `${head(path)}--- a/${path}\n+++ b/${path}\n@@ -1 +1 @@\n-x\n+y\n`;
const moved = (from, to) => `${head(from, to)}rename from ${from}\nrename to ${to}\n`;

let calls = 0;
const change = (...diffs) => ({ call_id: `c${(calls += 1)}`, tool: "t", paths: [], diff: diffs.join("") });
const outcomes = (...changes) => filesOf(changes).map(({ path, outcome, origin, steps }) => [path, outcome, origin, steps.length]);

test("a file's changes by several calls have one outcome", () => {
  assert.deepEqual(outcomes(change(added("a"), changed("b"), removed("c"), moved("d", "e"))), [
    ["a", "added", null, 1], ["b", "changed", "b", 1], ["c", "removed", "c", 1], ["e", "moved", "d", 1],
  ]);
  assert.deepEqual(outcomes(change(added("a")), change(changed("a")), change(moved("a", "b"))), [["b", "added", null, 3]]);
  assert.deepEqual(outcomes(change(moved("a", "b")), change(changed("b")), change(moved("b", "c"))), [["c", "moved", "a", 3]]);
  assert.deepEqual(outcomes(change(moved("a", "b")), change(removed("b"))), [["a", "removed", "a", 2]]);
});

test("what was taken back is not listed, and what was put back is changed", () => {
  assert.deepEqual(outcomes(change(added("a")), change(removed("a"))), []);
  assert.deepEqual(outcomes(change(removed("a")), change(added("a"))), [["a", "changed", "a", 2]]);
  assert.deepEqual(outcomes(change(moved("a", "b")), change(moved("b", "a"))), [["a", "changed", "a", 2]]);
  assert.deepEqual(outcomes(change(moved("a", "b")), change(added("a")), change(removed("b"))), [["a", "changed", "a", 3]]);
  assert.deepEqual(outcomes({ ...change(added("a")), undone: true }, { ...change(removed("b")), unapplied: true }), []);
});

test("files change places, and a moved file leaves room for a new one", () => {
  assert.deepEqual(outcomes(change(moved("a", "b"), moved("b", "a"))), [["a", "moved", "b", 1], ["b", "moved", "a", 1]]);
  assert.deepEqual(outcomes(change(moved("a", "b")), change(added("a"))), [["a", "added", null, 1], ["b", "moved", "a", 1]]);
});

test("a path without a diff is changed", () => {
  assert.deepEqual(outcomes({ ...change(changed("a")), paths: ["a", "big"] }), [["a", "changed", "a", 1], ["big", "changed", "big", 1]]);
});

test("folders hold their files, and a chain of folders is one", () => {
  const shape = ({ name, file, children }) => (children.length ? [name, children.map(shape)] : file && name);
  const files = filesOf([change(added("src/app/main/a.py"), added("src/app/main/b.py"), changed("readme"), changed("src/x"), added("only/one.md"))]);
  assert.deepEqual(treeOf(files).map(shape), [["only", ["one.md"]], "readme", ["src", [["app/main", ["a.py", "b.py"]], "x"]]]);
});
