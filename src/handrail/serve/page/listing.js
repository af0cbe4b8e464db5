// A list of threads that is built from its pages: `{threads, next}`, newest first. `next` is the mark of the next page.
// No DOM.

/**
 * The list after its newest page was loaded again. If the page is empty or the last one, it is the whole list. Otherwise
 * it replaces every thread that is newer than its last one, and older threads are kept.
 */
export function refreshed(before, page) {
  const last = page.threads.at(-1);
  if (page.next === null || !last || before.threads === null) return { threads: page.threads, next: page.next };
  const there = new Set(page.threads.map((thread) => thread.id));
  const older = before.threads.filter((thread) => !there.has(thread.id) && Date.parse(thread.updated_at) <= Date.parse(last.updated_at));
  return { threads: [...page.threads, ...older], next: older.length ? before.next : page.next };
}

/** The list after the next page was loaded. */
export function extended(before, page) {
  const known = before.threads ?? [];
  const there = new Set(known.map((thread) => thread.id));
  return { threads: [...known, ...page.threads.filter((thread) => !there.has(thread.id))], next: page.next };
}
