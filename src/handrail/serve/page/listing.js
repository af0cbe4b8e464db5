// What is known of a list of threads, as its pages come in: `{threads, next}`, the newest first, `next` where older
// ones go on. No DOM.

/**
 * What is known once the newest page was read again. It stands for everything as new as its last thread; what is
 * older stays as it was, also a thread that was on this page before and has been pushed off it.
 */
export function refreshed(before, page) {
  const last = page.threads.at(-1);
  if (page.next === null || !last || before.threads === null) return { threads: page.threads, next: page.next };
  const there = new Set(page.threads.map((thread) => thread.id));
  const older = before.threads.filter((thread) => !there.has(thread.id) && Date.parse(thread.updated_at) <= Date.parse(last.updated_at));
  return { threads: [...page.threads, ...older], next: older.length ? before.next : page.next };
}

/** What is known once a page was read that comes after the last. */
export function extended(before, page) {
  const known = before.threads ?? [];
  const there = new Set(known.map((thread) => thread.id));
  return { threads: [...known, ...page.threads.filter((thread) => !there.has(thread.id))], next: page.next };
}
