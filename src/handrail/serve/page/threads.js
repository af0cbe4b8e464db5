// The list of a person's threads: searching, loading more, starting a new one and deleting one.

import { drawnFor } from "./hooks.js";
import { Icon } from "./icons.js";
import { extended, refreshed } from "./listing.js";
import { address } from "./route.js";
import * as server from "./server.js";
import { html, useCallback, useEffect, useRef, useState } from "./vendor/standalone.js";
import { ago, many, THREAD_STATUS } from "./words.js";

const FEW = 8; // a list of up to this many threads has no search field

export const ThreadList = drawnFor(
  ({ list, current, live }) => [
    list.threads, list.words, list.shown.threads, list.shown.next, list.shown.problem, list.shown.busy, current, live.status, live.questions,
  ],
  Threads,
);

function Threads({ list, current, live, onForgotten }) {
  const walk = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const links = [...event.currentTarget.querySelectorAll("a")];
    const place = links.indexOf(document.activeElement);
    if (place < 0) return;
    event.preventDefault();
    links[Math.min(links.length - 1, Math.max(0, place + step))].focus();
  };
  const all = useRef(null);
  const older = async () => {
    const before = list.shown.threads.length;
    await list.shown.older();
    // Focus the first new thread, because the button may be gone, and the focus with it.
    requestAnimationFrame(() => all.current?.children[before]?.querySelector("a")?.focus());
  };
  const { threads, next, problem, busy, load } = list.shown;
  const searching = list.words.trim() !== "";
  return html`<div class="threads">
    <a class="new" href="#/" onClick=${begun}><${Icon} name="plus" /> New thread</a>
    ${(list.words || list.next || list.threads?.length > FEW) &&
    html`<input type="search" aria-label="Search threads" placeholder="Search threads" value=${list.words} maxlength="200"
      onInput=${(event) => list.search(event.target.value)} />`}
    ${problem && html`<p class="problem" role="alert">${problem.message} <button type="button" class="link" onClick=${load}>Try again</button></p>`}
    ${threads === null && !problem && html`<p class="soft" role="status">${searching ? "Searching…" : "Loading…"}</p>`}
    ${threads?.length === 0 && html`<p class="soft" role="status">${searching ? nothing(next) : "Your threads are listed here."}</p>`}
    <ul onKeyDown=${walk} ref=${all}>
      ${(threads ?? []).map(
        (thread) => html`<${Thread}
          key=${thread.id}
          thread=${thread.id === current && live.runs.length ? { ...thread, status: live.status, questions: Object.keys(live.questions).length } : thread}
          chosen=${thread.id === current}
          forgotten=${() => (list.drop(thread.id), list.load(), onForgotten(thread.id))}
        />`,
      )}
    </ul>
    ${threads && next && html`<button type="button" class="quiet small older" disabled=${busy} onClick=${older}>${busy ? "Loading…" : "Older threads"}</button>`}
  </div>`;
}

function nothing(next) {
  return next ? "Not found in the newest threads. Older ones have not been searched yet." : "Nothing with these words was said in your threads.";
}

/** Starts a new thread, even if the address already belongs to a new thread. */
function begun(event) {
  event.preventDefault();
  if (location.hash === "#/") dispatchEvent(new HashChangeEvent("hashchange"));
  else location.hash = "#/";
  setTimeout(() => document.getElementById("composer")?.focus());
}

function Thread({ thread, chosen, forgotten }) {
  const [asked, setAsked] = useState(false);
  const [problem, setProblem] = useState(null);
  const forget = async () => {
    try {
      await server.forget(thread.id);
      forgotten();
    } catch (error) {
      setProblem(error.message);
      setAsked(false);
    }
  };
  const title = thread.title || "Untitled";
  const status = THREAD_STATUS[thread.status] ?? thread.status;
  return html`<li class=${chosen ? "chosen" : ""}>
    <a href=${address(thread.id)} aria-current=${chosen ? "page" : undefined}>
      <span class="title">${title}</span>
      <span class="about">
        ${status && html`<span class=${`dot ${thread.status}`}>${thread.status === "waiting" ? many(thread.questions || 1, "question") : status}</span>`}
        <time datetime=${thread.updated_at}>${ago(thread.updated_at)}</time>
      </span>
    </a>
    ${asked
      ? html`<span class="confirm" role="group" aria-label=${`Delete ${title}?`} onKeyDown=${(event) => event.key === "Escape" && setAsked(false)}>
          <button type="button" class="danger small" ref=${(button) => button?.focus()} onClick=${forget}>Delete</button>
          <button type="button" class="quiet small" onClick=${() => setAsked(false)}>Keep</button>
        </span>`
      : html`<button type="button" class="quiet icon-button forget" aria-label=${`Delete ${title}`} onClick=${() => setAsked(true)}><${Icon} name="bin" /></button>`}
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
  </li>`;
}

// -- loading --------------------------------------------------------------------------------------------

const REFRESH = 20_000; // milliseconds
const TYPING = 200; // milliseconds after the last key
const NOTHING = { threads: null, next: null, problem: null, busy: false };

/** The threads in which the words of `find` were said, page by page. With "" these are all threads; null loads none. */
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
 * A person's threads and the result of their search. The threads are reloaded after events, and regularly while the
 * page is visible. The search is repeated when its words change.
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
    const now = setInterval(() => document.hidden || all.load(), REFRESH);
    return () => {
      clearInterval(now);
      clearTimeout(timer.current);
    };
  }, []);
  useEffect(() => {
    found.empty();
    if (!find) return undefined;
    const typed = setTimeout(found.load, TYPING);
    return () => clearTimeout(typed);
  }, [find]);
  const waiting = (all.threads ?? []).filter((thread) => thread.status === "waiting").length;
  const drop = (id) => (all.drop(id), found.drop(id));
  return { ...all, drop, waiting, reload, words, search: setWords, shown: find ? found : all };
}
