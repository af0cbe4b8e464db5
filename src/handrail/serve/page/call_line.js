// What tells a call apart from others of its tool, in a few words. No DOM.

import { exactly, partial, visible } from "./partial.js";

const LONGEST = 120;
const FEW = 20; // calls before it that are compared

/** The argument that tells a call apart from the same tool's calls before it in the log: the first one, unless an earlier call has it too. */
export function apart(view, id) {
  const own = scalars(view.calls[id]);
  const log = view.entries[view.calls[id].scope ?? ""] ?? [];
  const at = log.findIndex((entry) => entry.id === id);
  const before = log
    .slice(Math.max(0, at - FEW), Math.max(0, at))
    .map((entry) => view.calls[entry.id])
    .filter((call) => call?.name === view.calls[id].name)
    .map((call) => new Map(scalars(call)));
  const [, words = ""] = own.find(([name, words]) => before.every((other) => other.get(name) !== words)) ?? own[0] ?? [];
  return words.length > LONGEST ? `${words.slice(0, LONGEST - 1)}…` : words;
}

/** The arguments of a call that are text, a number, or yes or no, as names and visible text on one line. */
function scalars(call) {
  const value = partial(call.arguments || "{}");
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [];
  return Object.entries(value)
    .filter(([, each]) => each !== "" && ["string", "number", "boolean"].includes(typeof each))
    .map(([name, each]) => [name, visible(exactly(each)).replace(/\s+/g, " ")]);
}
