// What several components share of the browser: media, time, storage, scrolling, and when to draw again.

import { Component, h, useEffect, useLayoutEffect, useRef, useState } from "./vendor/standalone.js";

/** Whether a media query holds now. */
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

/** Seconds since 1970, going on while `running`. */
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

/** A value kept in this browser. Where there is no storage it lasts as long as the page. */
export function useKept(key, initial) {
  const [value, setValue] = useState(() => kept(key) ?? initial);
  const keep = (next) => {
    setValue(next);
    try {
      localStorage.setItem(key, JSON.stringify(next));
    } catch {
      // Storage is off: the choice lasts as long as the page.
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

/**
 * Keeps a scrolling element at its end while the reader is there, and leaves it alone when they have scrolled up.
 * Gives its ref, whether it is at the end, and a function that goes there.
 */
export function useStickyEnd() {
  const ref = useRef(null);
  const stuck = useRef(true);
  const [atEnd, setAtEnd] = useState(true);
  const settle = () => {
    if (stuck.current && ref.current) ref.current.scrollTop = ref.current.scrollHeight;
  };
  useLayoutEffect(settle);
  useEffect(() => {
    const element = ref.current;
    const looked = () => {
      stuck.current = element.scrollHeight - element.scrollTop - element.clientHeight < 48;
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
    settle();
  };
  return { ref, atEnd, toEnd };
}

/** `Drawn`, drawn again only when what `facts(props)` lists has changed. */
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
