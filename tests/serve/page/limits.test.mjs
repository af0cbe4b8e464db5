// Tests for the limits on Markdown. Text that would overflow the parser's stack or take seconds is not parsed.

import assert from "node:assert/strict";
import { test } from "node:test";
import { lexed } from "../../../src/handrail/serve/page/limits.js";
import { Marked } from "../../../src/handrail/serve/page/vendor/marked.js";

const MARKED = new Marked({ gfm: true });

const HEAVY = {
  "quotes in quotes": ">".repeat(3000),
  "quotes with spaces": "> ".repeat(100),
  "lists in lists on a line": "- ".repeat(100),
  "quotes and lists in turn": "> - 1. ".repeat(20),
  "a list far to the right": `${" ".repeat(200)}- a`,
  "marks of emphasis": "_a__b".repeat(15_000),
  "marks over many lines": "_a__b\n".repeat(15_000),
  "brackets": "[".repeat(20_000),
  "too many items": "- a\n".repeat(10_000),
  "marks after what only looks like a fence": "``` a`b\n" + "_a__b\n".repeat(15_000),
  "marks after a fence that is closed": "```\n```\n" + "_a__b\n".repeat(15_000),
  "many heavy paragraphs": `${"_a__b".repeat(600)}\n\n`.repeat(90),
  "a very long text": "word ".repeat(100_000),
  "marks after a fence in a comment": `<!--\n\`\`\`\n-->\n\n${"_a__b".repeat(15_000)}`,
  "marks after a fence that ends with its item": `- a\n  \`\`\`\n\nx\n${"_a__b".repeat(15_000)}`,
  "quotes in quotes after a fence in a comment": `<!--\n\`\`\`\n-->\n\n${">".repeat(100_000)}`,
  "a table with many columns": `|${"a|".repeat(1000)}\n|${"-|".repeat(1000)}\n${"|\n".repeat(1000)}`,
  "a table in a quote": `> |${"a|".repeat(1000)}\n> |${"-|".repeat(1000)}\n${"> |\n".repeat(1000)}`,
  "a table with columns but few bars": `a|${"a|".repeat(1000)}\n-${"|-".repeat(1000)}\n${"a\n".repeat(1000)}`,
  "too many items in a carriage": "- a\r".repeat(10_000),
};

const LIGHT = {
  "prose": "A word and *two* words with `code`, and a [link](https://example.org/a).\n\n".repeat(800),
  "a list": "- an item with **bold** and `code`\n".repeat(1000),
  "a table": `| a | b |\n| - | - |\n${"| x | `y` |\n".repeat(400)}`,
  "code with a diff": `\`\`\`\n${"- if (a[i] * b_c) { x |= y; }\n".repeat(5000)}\`\`\`\n`,
  "code": `\`\`\`\n${"if (a[i] * b_c) { x |= y; }\n".repeat(800)}\`\`\`\n`,
  "nested as people nest": "> - one\n>   - two\n>     1. three\n",
};

for (const [name, text] of Object.entries(HEAVY)) test(`too much: ${name}`, () => assert.equal(lexed(MARKED, text), null));
for (const [name, text] of Object.entries(LIGHT)) test(`rendered: ${name}`, () => assert.equal(lexed(MARKED, text) !== null, true));
