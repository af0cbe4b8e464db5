// Routes: #/t/THREAD, #/t/THREAD/files, #/t/THREAD/timeline, and #/q/QUESTION, which leads to wherever that question is shown.

import { useLayoutEffect, useState } from "./vendor/standalone.js";

export const TABS = ["chat", "files", "timeline"];

/** The thread and tab, or the question, that an address names. The id is null if it names no thread. */
export function read(hash) {
  const asked = /^#\/q\/([^/]+)$/.exec(hash);
  if (asked) return { id: null, tab: "chat", question: decoded(asked[1]) };
  const found = /^#\/t\/([^/]+)(?:\/(files|timeline))?$/.exec(hash);
  const id = found && decoded(found[1]);
  return id ? { id, tab: found[2] ?? "chat" } : { id: null, tab: "chat" };
}

/** The decoded part of an address, or null if it is malformed, which is possible in a link that a model wrote. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return null;
  }
}

export function address(id, tab = "chat") {
  if (!id) return "#/";
  return `#/t/${encodeURIComponent(id)}${tab === "chat" ? "" : `/${tab}`}`;
}

/** The current route. If the address names no thread, the route is a new thread. */
export function useRoute() {
  const [route, setRoute] = useState(() => withId(read(location.hash)));
  // A layout effect, because an ordinary one would listen only after the next frame, and miss changes before that.
  useLayoutEffect(() => {
    const changed = () => setRoute(withId(read(location.hash)));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

const withId = (route) => (route.id ? route : { ...route, id: fresh(), unsaid: true });

/** An unguessable id. */
function fresh() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Takes the sign-in code from the address (#link=…), or returns null if there is none or it is malformed. The code is
 * removed from the address, so that it is neither bookmarked nor shown. The hash that was `kept` takes its place if it is a route.
 */
export function takeLink(kept) {
  const found = /[#&]link=([^&]+)/.exec(location.hash);
  if (!found) return null;
  const route = /^#\/[tq]\//.test(kept) ? kept : "";
  history.replaceState(null, "", location.pathname + location.search + route);
  const link = decoded(found[1]);
  return link && { link };
}
