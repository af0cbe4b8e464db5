// Hooks that several components share: media queries, time, storage, scrolling, and memoized drawing.

import { Component, h, useEffect, useLayoutEffect, useRef, useState } from "./vendor/standalone.js";

/** Whether a media query matches. */
export function useMedia(query) {
  const [matches, setMatches] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const list = matchMedia(query);
    const changed = () => setMatches(list.matches);
    changed();
    list.addEventListener("change", changed);
    return () => list.removeEventListener("change", changed);
  }, [query]);
  return matches;
}

/** The current time in seconds since 1970, updated while `running`. */
export function useNow(running) {
  const [now, setNow] = useState(() => Date.now() / 1000);
  useEffect(() => {
    if (!running) return undefined;
    setNow(Date.now() / 1000);
    const timer = setInterval(() => setNow(Date.now() / 1000), 250);
    return () => clearInterval(timer);
  }, [running]);
  return now;
}

/** A value that is stored in this browser. Without storage, it lasts as long as the page. */
export function useKept(key, initial) {
  const [value, setValue] = useState(() => kept(key) ?? initial);
  const keep = (next) => {
    setValue(next);
    try {
      localStorage.setItem(key, JSON.stringify(next));
    } catch {
      // Storage is not available, so the choice lasts as long as the page.
    }
  };
  return [value, keep];
}

function kept(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

/** The lowest scroll position at which the head of the first open question is still in view; the end if there is none. */
function restOf(element) {
  const end = element.scrollHeight - element.clientHeight;
  const question = element.querySelector("[data-question]");
  if (!question) return end;
  return Math.min(end, element.scrollTop + question.getBoundingClientRect().top - element.getBoundingClientRect().top - 16);
}

/**
 * Keeps a scrolling element at its end, or at the head of the first open question if that is higher, unless the reader has
 * scrolled elsewhere. A reader who has scrolled past that head stays there. Returns its ref, whether it is kept, and a
 * function that scrolls back.
 */
export function useStickyEnd() {
  const ref = useRef(null);
  const stuck = useRef(true);
  const headed = useRef(undefined); // the first open question, to whose head it has scrolled
  const [atEnd, setAtEnd] = useState(true);
  const settle = () => {
    const element = ref.current;
    if (!stuck.current || !element) return;
    const rest = restOf(element);
    const first = element.querySelector("[data-question]")?.dataset.question;
    if (element.scrollTop < rest || !first || first !== headed.current) element.scrollTop = rest;
    headed.current = first;
  };
  useLayoutEffect(settle);
  useEffect(() => {
    const element = ref.current;
    const looked = () => {
      stuck.current = element.scrollHeight - element.scrollTop - element.clientHeight < 48 || Math.abs(restOf(element) - element.scrollTop) < 48;
      setAtEnd(stuck.current);
    };
    element.addEventListener("scroll", looked, { passive: true });
    const sizes = new ResizeObserver(settle);
    sizes.observe(element);
    if (element.firstElementChild) sizes.observe(element.firstElementChild);
    return () => {
      element.removeEventListener("scroll", looked);
      sizes.disconnect();
    };
  }, []);
  const toEnd = () => {
    stuck.current = true;
    setAtEnd(true);
    headed.current = undefined;
    settle();
  };
  return { ref, atEnd, toEnd };
}

/** `Drawn`, redrawn only when one of the values in `facts(props)` has changed. */
export function drawnFor(facts, Drawn) {
  return class extends Component {
    shouldComponentUpdate(next) {
      const before = facts(this.props);
      const after = facts(next);
      return before.length !== after.length || after.some((fact, place) => fact !== before[place]);
    }

    render(props) {
      return h(Drawn, props);
    }
  };
}
