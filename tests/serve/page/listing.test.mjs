// Tests for listing.js, which builds the list of threads page by page.

import assert from "node:assert/strict";
import { test } from "node:test";
import { extended, refreshed } from "../../../src/handrail/serve/page/listing.js";

const NONE = { threads: null, next: null };
const thread = (id, at) => ({ id, updated_at: new Date(at * 1000).toISOString() });
const page = (next, ...threads) => ({ threads: threads.map(([id, at]) => thread(id, at)), next });
const ids = (known) => known.threads.map((each) => each.id).join("");

/** A server with these threads, sorted by the time of their last change, that returns two at a time. */
function served(times) {
  const all = Object.entries(times).sort((a, b) => b[1] - a[1]);
  return (before = null) => {
    const from = before === null ? 0 : all.findIndex(([, at]) => at < before);
    const found = from < 0 ? [] : all.slice(from, from + 2);
    return page(from >= 0 && all.length > from + 2 ? found.at(-1)[1] : null, ...found);
  };
}

test("pages are appended until the last one", () => {
  const server = served({ a: 1, b: 2, c: 3, d: 4, e: 5 });
  let known = refreshed(NONE, server());
  const seen = [ids(known)];
  while (known.next !== null) seen.push(ids((known = extended(known, server(known.next)))));
  assert.deepEqual(seen, ["ed", "edcb", "edcba"]);
});

test("older threads stay when the newest page is loaded again", () => {
  const server = served({ a: 1, b: 2, c: 3, d: 4, e: 5 });
  let known = refreshed(NONE, server());
  known = extended(known, server(known.next));
  known = refreshed(known, served({ a: 1, b: 2, c: 3, d: 4, e: 5, f: 6 })());
  assert.equal(ids(known), "fedcb");
  known = extended(known, served({ a: 1, b: 2, c: 3, d: 4, e: 5, f: 6 })(known.next));
  assert.equal(ids(known), "fedcba");
});

test("an older thread that has changed moves to the top and is listed once", () => {
  const server = served({ a: 1, b: 2, c: 3, d: 4 });
  let known = refreshed(NONE, server());
  known = extended(known, server(known.next));
  assert.equal(ids(refreshed(known, served({ a: 9, b: 2, c: 3, d: 4 })())), "adcb");
});

test("a thread missing from the newest page is removed, and a single page replaces the whole list", () => {
  const server = served({ a: 1, b: 2, c: 3, d: 4 });
  let known = refreshed(NONE, server());
  known = extended(known, server(known.next));
  assert.equal(ids(refreshed(known, served({ a: 1, b: 2, c: 3 })())), "cba");
  assert.deepEqual(refreshed(known, served({ a: 1 })()), { threads: [thread("a", 1)], next: null });
  assert.deepEqual(refreshed(known, served({})()), { threads: [], next: null });
});
