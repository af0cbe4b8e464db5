// The address of what is shown: #/t/THREAD, #/t/THREAD/files, #/t/THREAD/timeline.

import { useEffect, useState } from "./vendor/standalone.js";

export const TABS = ["chat", "files", "timeline"];

/** What an address names; a new thread where it names none. */
export function read(hash) {
  const found = /^#\/t\/([^/]+)(?:\/(files|timeline))?$/.exec(hash);
  const id = found && decoded(found[1]);
  return id ? { id, tab: found[2] ?? "chat" } : { id: null, tab: "chat" };
}

/** What was encoded for an address; null where it can't have been: a link that a model wrote, say. */
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

/** The route as it is now. Where the address names no thread, a new one is begun. */
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

/** An id nobody guesses. */
function fresh() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** A token given in the address (#token=…): taken out of it, so that it is not bookmarked or shown. */
export function takeToken() {
  const found = /[#&]token=([^&]+)/.exec(location.hash);
  if (!found) return null;
  history.replaceState(null, "", location.pathname + location.search);
  return decoded(found[1]);
}
