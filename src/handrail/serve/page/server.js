// The client for the server: JSON requests, errors with the server's message, and event streams.

/** An error response; `status` 0 means that the server could not be reached. */
export class ServerError extends Error {
  constructor(status, kind, message, fields = []) {
    super(message.charAt(0).toUpperCase() + message.slice(1));
    this.status = status;
    this.kind = kind;
    this.fields = fields;
  }
}

// An origin may have several apps, each below a prefix of its own.
const prefix = (globalThis.location?.pathname ?? "").replace(/^\/$/, "");
// The key of this page's session. All ports of a host share cookies, but storage belongs to this origin alone.
const KEY = `handrail.key${prefix}`;
// The secret of the sign-in that this tab has begun with a provider. No other origin can write it, so nobody can plant a sign-in.
const SECRET = `handrail.secret${prefix}`;
// The hash of the address that this tab showed before it left to sign in with a provider.
const ROUTE = `handrail.route${prefix}`;

async function called(path, options) {
  let response;
  const key = localStorage.getItem(KEY);
  const headers = key ? { ...options?.headers, "Handrail-Key": key } : options?.headers;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "Unreachable", "The server is not responding. It may have been stopped, or the network is down.");
  }
  if (response.ok) return response;
  let told = null;
  try {
    told = (await response.json()).error;
  } catch {
    // The response is not JSON, for example because a proxy answered.
  }
  throw new ServerError(
    response.status,
    told?.kind ?? "Refused",
    told?.message ?? `The server refused this (${response.status} ${response.statusText}).`,
    told?.fields ?? [],
  );
}

async function json(path, options) {
  const response = await called(path, options);
  return response.status === 204 ? {} : response.json();
}

const sent = (method, value) => ({
  method,
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify(value ?? {}),
});

const thread = (id) => `threads/${encodeURIComponent(id)}`;

export const about = () => json("about");
/** Begins a session with `{link}`, `{token}`, or `{name, password}`. */
export const login = async (given) => {
  const secret = given.link && sessionStorage.getItem(SECRET);
  const { key } = await json("login", sent("POST", secret ? { ...given, secret } : given));
  sessionStorage.removeItem(SECRET);
  localStorage.setItem(KEY, key);
};
/** How people sign in: the relative address for a provider, or null, and "password", "token" or "link", or null for an app that signs people in itself. */
export const signInWays = () => json("health").then((told) => ({ provider: told.sign_in ?? null, secret: told.secret ?? null }), () => ({ provider: null, secret: "link" }));
/** Begins a sign-in with the provider, which sends the browser back here with a link. */
export const leaveToSignIn = async (path) => {
  const { address, secret } = await json(path, sent("POST"));
  sessionStorage.setItem(SECRET, secret);
  sessionStorage.setItem(ROUTE, location.hash);
  location.assign(address);
};
/** Takes the hash that this tab showed before it left to sign in, or "". */
export const takeRoute = () => {
  const kept = sessionStorage.getItem(ROUTE) ?? "";
  sessionStorage.removeItem(ROUTE);
  return kept;
};
/** Calls `changed` when another tab signs in or out, and returns a function that stops it. */
export const onSession = (changed) => {
  const heard = (event) => event.key === KEY && changed();
  addEventListener("storage", heard);
  return () => removeEventListener("storage", heard);
};
export const logout = async () => {
  await json("logout", sent("POST"));
  localStorage.removeItem(KEY);
};
/** Where this person can answer a question: `{thread}`, which is null for the inbox. */
export const placeOf = (question) => json(`questions/${encodeURIComponent(question)}`);
export const inbox = async () => (await json("inbox")).questions;
export const vote = (given) => json("inbox/answers", sent("POST", given));
export const threads = ({ before, find }) => {
  const query = new URLSearchParams({ limit: "100", ...(before && { before }), ...(find && { find }) });
  return json(`threads?${query}`);
};
/** What runs used, divided by `by`: this person's, or everybody's. */
export const usage = async (by, days, zone, everybody) =>
  (await json(`usage?${new URLSearchParams({ by, days: String(days), zone, ...(everybody && { everybody: "1" }) })}`)).lines;
export const snapshot = (id) => json(thread(id));
/** The bytes of an attachment, by its address relative to the thread's. */
export const attachment = async (id, url) => (await called(`${thread(id)}/${url}`)).blob();
export const say = (id, text, attachments = []) => json(`${thread(id)}/messages`, sent("POST", { text, attachments }));
const queue = (id, run) => `${thread(id)}/runs/${encodeURIComponent(run)}/messages`;
/** Sends, edits or withdraws a message to a run while it works, and returns the message. */
export const send = async (id, run, given) => (await json(queue(id, run), sent("POST", given))).message;
export const edit = async (id, { run_id: run, id: message }, given) =>
  (await json(`${queue(id, run)}/${encodeURIComponent(message)}`, sent("POST", given))).message;
export const withdraw = async (id, { run_id: run, id: message }) =>
  (await json(`${queue(id, run)}/${encodeURIComponent(message)}`, sent("DELETE"))).message;
/** Orders a run to pause, wrap up or stop before its next step, or continues it. Returns the order as a message, if it is one. */
export const order = async (id, run, given) => (await json(`${thread(id)}/runs/${encodeURIComponent(run)}/orders`, sent("POST", { order: given }))).message;
export const answer = (id, given) => json(`${thread(id)}/answers`, sent("POST", given));
export const cancel = (id) => json(`${thread(id)}/cancel`, sent("POST"));
export const runTree = (id, run) => json(`${thread(id)}/runs/${encodeURIComponent(run)}`);
export const files = async (id) => (await json(`${thread(id)}/files`)).changes;
export const undo = (id, call) => json(`${thread(id)}/calls/${encodeURIComponent(call)}/undo`, sent("POST"));
export const approvals = async (id) => (await json(`${thread(id)}/approvals`)).approvals;
export const revoke = (id, approval) => json(`${thread(id)}/approvals/${encodeURIComponent(approval)}`, sent("DELETE"));
export const forget = (id) => json(thread(id), sent("DELETE"));

/**
 * The events of a thread after the id `after`, as they arrive: `{id, event}`. Yields `{}` when the stream opens, and for
 * data that is not an event. Ends when the server ends the stream.
 */
export async function* events(id, after, signal) {
  const headers = { Accept: "text/event-stream" };
  if (after) headers["Last-Event-ID"] = after;
  const response = await called(`${thread(id)}/events?follow=1`, { headers, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  yield {};
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) yield message(block);
  }
}

/** Parses one block of an event stream. Lines other than `id:` and `data:` are ignored. Without data, returns `{}`. */
export function message(block) {
  let id;
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("id:")) id = line.slice(3).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  return data.length ? { id, event: JSON.parse(data.join("\n")) } : {};
}
