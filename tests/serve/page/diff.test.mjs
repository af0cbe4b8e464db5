// Tests for diff/parse.js and diff/words.js.

import assert from "node:assert/strict";
import { test } from "node:test";
import { parseDiff } from "../../../src/handrail/serve/page/diff/parse.js";
import { rowsOf, wordDiff } from "../../../src/handrail/serve/page/diff/words.js";

test("a file's content is never taken for another file", () => {
  const held = ["--- a/evil", "+++ b/evil", "@@ -1 +1 @@", "diff --git a/evil b/evil", "state: Evil {}", "\\ No newline at end of file"];
  const diff = ["diff --git a/x b/x", "--- a/x", "+++ b/x", `@@ -1,${held.length} +1,${held.length} @@`, ...held.map((line) => `-${line}`), ...held.map((line) => `+${line}`), "state: Note {}"];
  const { files, remarks } = parseDiff(`${diff.join("\n")}\n`);
  assert.equal(files.length, 1);
  assert.equal(files[0].path, "x");
  assert.deepEqual(files[0].hunks[0].lines.filter((line) => line.type === "removed").map((line) => line.text), held);
  assert.deepEqual(files[0].hunks[0].lines.filter((line) => line.type === "added").map((line) => line.text), held);
  assert.deepEqual(remarks, ["state: Note {}"]);
});

test("names may contain blanks, and renames are recognised", () => {
  const { files } = parseDiff('diff --git a/my notes b/x.md b/my notes b/x.md\nold mode 644\nnew mode 755\ndiff --git a/a.txt b/b/c.txt\nrename from a.txt\nrename to b/c.txt\ncontent: 2 bytes (SHA-256 abc)\n');
  assert.deepEqual(files.map((file) => [file.path, file.from, file.change, file.notes]), [
    ["my notes b/x.md", null, "changed", ["old mode 644", "new mode 755"]],
    ["b/c.txt", "a.txt", "renamed", ["content: 2 bytes (SHA-256 abc)"]],
  ]);
});

test("files that run later are marked, and no other is", () => {
  const { files, remarks } = parseDiff("diff --git a/.envrc b/.envrc\nruns later: by direnv or mise, automatically and outside the sandbox\nnew file\n--- /dev/null\n+++ b/.envrc\n@@ -0,0 +1 @@\n+runs later: by nobody\ndiff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+runs later: by git\n");
  assert.deepEqual(files.map((file) => [file.path, file.runsLater]), [[".envrc", true], ["x", false]]);
  assert.equal(files[0].notes[0], "runs later: by direnv or mise, automatically and outside the sandbox");
  assert.deepEqual(remarks, []);
});

test("a file that was written again without changes says so", () => {
  const { files, remarks } = parseDiff("diff --git a/poem.txt b/poem.txt\nno change\n");
  assert.deepEqual(files.map((file) => [file.path, file.change, file.notes]), [["poem.txt", "changed", ["no change"]]]);
  assert.deepEqual(remarks, []);
});

test("words add up to the lines that they came from", () => {
  const [before, after] = wordDiff("Call it with a path.", "Call it with a relative path!");
  assert.equal(before.map((piece) => piece.text).join(""), "Call it with a path.");
  assert.equal(after.map((piece) => piece.text).join(""), "Call it with a relative path!");
  assert.deepEqual(after.filter((piece) => piece.changed).map((piece) => piece.text.trim()), ["relative", "!"]);
  assert.equal(wordDiff("something", "other words here"), null);
});

test("long lines are compared by their ends, and word by word only where few words differ", (t) => {
  const tables = []; // the size of each table of comparisons
  const Table = globalThis.Uint16Array;
  t.after(() => { globalThis.Uint16Array = Table; });
  globalThis.Uint16Array = class extends Table {
    constructor(size) {
      super(size);
      tables.push(size);
    }
  };
  const long = "word, ".repeat(20_000);
  const changed = (a, b) => wordDiff(`${long} ${a} ${long}`, `${long} ${b} ${long}`).map((pieces) => pieces.filter((piece) => piece.changed).map((piece) => piece.text));
  assert.deepEqual(changed("a", "b"), [["a"], ["b"]]);
  assert.deepEqual(tables, [4]);
  const [many, others] = [Array(500).fill("a").join(" "), Array(500).fill("b").join(" ")];
  assert.deepEqual(changed(many, others), [[many], [others]]);
  assert.deepEqual(tables, [4]);
});

test("removed lines are paired with the added lines that follow them", () => {
  const line = (type, text) => ({ type, text, old: 1, new: 1, bare: false });
  const rows = rowsOf([line("removed", "a"), line("removed", "b"), line("added", "c"), line("same", "d"), line("added", "e")]);
  assert.deepEqual(rows.map((row) => [row.left?.text, row.right?.text]), [["a", "c"], ["b", undefined], ["d", "d"], [undefined, "e"]]);
});
