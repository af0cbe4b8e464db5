// The threads of a person, kept up to date while the page is seen.

import { extended, refreshed } from "./listing.js";
import * as server from "./server.js";
import { useCallback, useEffect, useRef, useState } from "./vendor/standalone.js";

const EVERY = 20_000; // milliseconds
const TYPED = 200; // after the last letter
const NOTHING = { threads: null, next: null, problem: null, busy: false };

/** The threads that begin with some words, or all; `find` null looks for nothing. */
function usePages(find, signedOut) {
  const [state, setState] = useState(NOTHING);
  const now = useRef(find);
  now.current = find;
  const read = useCallback(async (given, known) => {
    const asked = now.current;
    if (asked === null) return;
    let told;
    try {
      const page = await server.threads({ ...given, find: asked });
      told = (before) => ({ ...known(before, page), problem: null, busy: false });
    } catch (error) {
      if (error.status === 401) signedOut();
      told = (before) => ({ ...before, problem: error, busy: false });
    }
    if (now.current === asked) setState(told);
  }, []);
  const load = useCallback(() => read({}, refreshed), []);
  const older = async () => {
    setState((before) => ({ ...before, busy: true }));
    await read({ before: state.next }, extended);
  };
  const drop = (id) => setState((before) => ({ ...before, threads: before.threads?.filter((thread) => thread.id !== id) ?? null }));
  return { ...state, load, older, drop, empty: () => setState(NOTHING) };
}

/**
 * The threads of a person, asked for again when something happens and now and then while the page is seen; and what
 * of them is searched for, if something is.
 */
export function useThreads(signedOut) {
  const [words, setWords] = useState("");
  const find = words.trim();
  const all = usePages("", signedOut);
  const found = usePages(find || null, signedOut);
  const timer = useRef(null);
  const reload = useCallback(() => {
    clearTimeout(timer.current);
    timer.current = setTimeout(all.load, 120);
  }, []);
  useEffect(() => {
    all.load();
    const now = setInterval(() => document.hidden || all.load(), EVERY);
    return () => {
      clearInterval(now);
      clearTimeout(timer.current);
    };
  }, []);
  useEffect(() => {
    found.empty();
    if (!find) return undefined;
    const typed = setTimeout(found.load, TYPED);
    return () => clearTimeout(typed);
  }, [find]);
  const waiting = (all.threads ?? []).filter((thread) => thread.status === "waiting").length;
  const drop = (id) => (all.drop(id), found.drop(id));
  return { ...all, drop, waiting, reload, words, search: setWords, shown: find ? found : all };
}
