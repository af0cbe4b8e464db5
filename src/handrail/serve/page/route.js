// Routes: #/t/THREAD, #/t/THREAD/files, #/t/THREAD/timeline.

import { useEffect, useState } from "./vendor/standalone.js";

export const TABS = ["chat", "files", "timeline"];

/** The thread and tab of an address; a new thread if it names none. */
export function read(hash) {
  const found = /^#\/t\/([^/]+)(?:\/(files|timeline))?$/.exec(hash);
  const id = found && decoded(found[1]);
  return id ? { id, tab: found[2] ?? "chat" } : { id: null, tab: "chat" };
}

/** The decoded part of an address; null if it is malformed, as in a link that a model wrote. */
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

/** The current route. If the address names no thread, it is a new one. */
export function useRoute() {
  const [route, setRoute] = useState(() => withId(read(location.hash)));
  useEffect(() => {
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

/** What the address gives to sign in with (#link=…). It is removed from there, so that it is not bookmarked or shown. */
export function takeLink() {
  const found = /[#&]link=([^&]+)/.exec(location.hash);
  if (!found) return null;
  history.replaceState(null, "", location.pathname + location.search);
  const link = decoded(found[1]);
  return link && { link };
}
