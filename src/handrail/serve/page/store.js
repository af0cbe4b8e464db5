// The view of one thread: a snapshot, with every later AG-UI event applied to it.
// Pure functions without DOM: the same snapshot and events always give the same view (store.test.mjs).
// Unchanged parts keep their identity, so that components can skip drawing them.

import { filesIn } from "./attachments.js";
import { patched } from "./patch.js";
import { ENDED } from "./words.js";

/**
 * @typedef {{kind: "user"|"text"|"reasoning"|"call"|"agent"|"activity"|"note", id: string}} Entry
 * `entries[""]` is the conversation, `entries[AGENT_ID]` the log of a nested agent, both in order.
 */

/** The view of a thread before its snapshot is loaded. */
export function blank(id) {
  return {
    id,
    title: "",
    status: "idle",
    runId: null,
    entries: { "": [] },
    messages: {},
    calls: {},
    agents: {},
    activities: {},
    notes: {},
    questions: {},
    closed: {},
    queued: {},
    failing: {},
    runs: [],
    state: null,
    lastEventId: null,
    changes: 0,
  };
}

/** Builds the view from a snapshot, as `GET /threads/{id}` returns it. */
export function fromSnapshot(snapshot) {
  let view = {
    ...blank(snapshot.id),
    title: snapshot.title ?? "",
    status: snapshot.status,
    state: snapshot.state ?? null,
    runs: snapshot.runs ?? [],
    failing: snapshot.failing ?? {},
    lastEventId: snapshot.last_event_id ?? null,
  };
  const running = view.runs.filter((run) => ["running", "waiting", "parked"].includes(run.status));
  view.runId = (running.at(-1) ?? view.runs.at(-1))?.id ?? null;
  for (const agent of snapshot.subagents ?? []) {
    view = withAgent(view, agent.id, {
      name: agent.name,
      callId: agent.parent_call_id ?? null,
      parent: agent.parent_subagent_id ?? "",
      status: agent.status,
    });
  }
  view = withMessages(view, snapshot.messages ?? []);
  for (const [id, facts] of Object.entries(snapshot.calls ?? {})) view = withFacts(view, id, facts);
  for (const [id, emitted] of Object.entries(snapshot.emitted ?? {})) view = withCall(view, id, { emitted });
  for (const closed of snapshot.closed ?? []) view = { ...view, closed: { ...view.closed, [closed.question.id]: closed } };
  for (const question of snapshot.questions ?? []) view = withQuestion(view, question);
  for (const message of snapshot.queued ?? []) view = withQueued(view, message);
  const last = view.runs.at(-1);
  if (last && running.includes(last) && view.status === "failed") {
    // The run is unfinished, but the server could not resume it.
    return withNote(ended(view, "failed"), `end-${last.id}`, "failed", snapshot.problem ?? "It could not be resumed. The server's log says why.");
  }
  if (last && (last.status === "failed" || last.status === "cancelled")) {
    view = withNote(view, `end-${last.id}`, last.status, last.error?.message ?? last.error ?? "");
  }
  return last?.stop_reason in ENDED ? withNote(view, `end-${last.id}`, last.stop_reason, "") : view;
}

/** Returns the view after one event. Unknown events change nothing. */
export function reduce(view, event) {
  const change = CHANGES[event.type];
  return change ? change(GOES_ON.has(event.type) ? withoutFailing(view, scopeOf(event)) : view, event) : view;
}

/** The events after which a model that failed, or the next one, has answered, or its run is over. */
const GOES_ON = new Set(["TEXT_MESSAGE_START", "REASONING_MESSAGE_START", "TOOL_CALL_START", "SUBAGENT_FINISHED", "SUBAGENT_ERROR", "RUN_FINISHED", "RUN_ERROR"]);

function withoutFailing(view, scope) {
  if (!view.failing[scope]) return view;
  const { [scope]: over, ...failing } = view.failing;
  return { ...view, failing };
}

const CHANGES = {
  RUN_STARTED(view, event) {
    const runId = event.metadata?.handrail?.run_id ?? event.runId;
    return { ...withRun(view, runId), status: "running", runId };
  },
  RUN_FINISHED(view, event) {
    const outcome = event.outcome?.type ?? "success";
    if (outcome === "interrupt") {
      let next = { ...view, status: "waiting" };
      for (const interrupt of event.outcome.interrupts ?? []) {
        const question = interrupt.metadata?.handrail;
        if (question) next = withQuestion(next, question);
      }
      return next;
    }
    const cancelled = outcome === "cancelled";
    const next = ended(view, cancelled ? "cancelled" : "idle");
    const how = cancelled ? "cancelled" : event.metadata?.handrail?.stop_reason;
    return how in ENDED ? withNote(next, `end-${view.runId}`, how, "") : next;
  },
  RUN_ERROR(view, event) {
    return withNote(ended(view, "failed"), `end-${view.runId}`, "failed", event.message ?? "");
  },

  TEXT_MESSAGE_START: (view, event) =>
    withMessage(view, scopeOf(event), event.messageId, event.role === "user" ? "user" : "text", { text: "", open: true }),
  TEXT_MESSAGE_CONTENT: (view, event) => withText(view, event, "text"),
  TEXT_MESSAGE_END: (view, event) => closed(view, event.messageId),
  REASONING_MESSAGE_START: (view, event) =>
    withMessage(view, scopeOf(event), event.messageId, "reasoning", { text: "", open: true }),
  REASONING_MESSAGE_CONTENT: (view, event) => withText(view, event, "reasoning"),
  REASONING_MESSAGE_END: (view, event) => closed(view, event.messageId),

  TOOL_CALL_START(view, event) {
    const scope = scopeOf(event);
    const call = { ...(view.calls[event.toolCallId] ?? {}), name: event.toolCallName, arguments: "", writing: true, scope };
    return withEntry(withCall(view, event.toolCallId, call), scope, "call", event.toolCallId);
  },
  TOOL_CALL_ARGS(view, event) {
    const call = view.calls[event.toolCallId];
    return call ? withCall(view, event.toolCallId, { arguments: (call.arguments ?? "") + event.delta }) : view;
  },
  TOOL_CALL_END: (view, event) =>
    view.calls[event.toolCallId] ? withCall(view, event.toolCallId, { writing: false }) : view,
  TOOL_CALL_RESULT: (view, event) =>
    view.calls[event.toolCallId]
      ? withCall(view, event.toolCallId, { result: textOf(event.content), writing: false })
      : view,

  ACTIVITY_SNAPSHOT(view, event) {
    const next = { ...view, activities: { ...view.activities, [event.messageId]: { type: event.activityType, content: event.content } } };
    return shownInCall(next, event.messageId) ? next : withEntry(next, scopeOf(event), "activity", event.messageId);
  },
  ACTIVITY_DELTA(view, event) {
    const activity = view.activities[event.messageId];
    if (!activity) return view;
    const content = patched(activity.content, event.patch);
    return { ...view, activities: { ...view.activities, [event.messageId]: { ...activity, content } } };
  },

  STATE_SNAPSHOT: (view, event) => ({ ...view, state: event.snapshot }),
  STATE_DELTA: (view, event) => ({ ...view, state: patched(view.state ?? {}, event.delta) }),
  MESSAGES_SNAPSHOT: (view, event) =>
    withMessages({ ...view, entries: { "": [] }, messages: {} }, event.messages ?? []),

  SUBAGENT_STARTED: (view, event) =>
    withAgent(view, event.subagentRunId, {
      name: event.name ?? event.subagentName ?? "agent",
      callId: event.parentToolCallId ?? null,
      parent: event.parentSubagentRunId ?? "",
      status: "running",
    }),
  SUBAGENT_FINISHED: (view, event) =>
    agentEnded(view, event.subagentRunId, event.outcome?.type === "suspended" ? "waiting" : "ok"),
  SUBAGENT_ERROR: (view, event) => agentEnded(view, event.subagentRunId, "error"),

  CUSTOM: (view, event) =>
    Object.hasOwn(CUSTOM, event.name) ? CUSTOM[event.name](view, event.value ?? {}, event) : withEmitted(view, event.name, event.value),
};

const CUSTOM = {
  "handrail.call": (view, { call_id: id, ...facts }) => {
    const next = withFacts(view, id, facts);
    return isOver(facts.status) ? { ...next, changes: next.changes + 1 } : next;
  },
  // A user message, for the windows that did not send it.
  "handrail.message": (view, { id, role, content }) =>
    role === "user" ? withMessage(view, "", id, "user", { text: textOf(content), ...withFiles(filesIn(content)), open: false }) : view,
  "handrail.queued": (view, message) => withQueued(view, message),
  "handrail.question": (view, question) => withQuestion(view, question),
  "handrail.votes": (view, { question_id: id, votes }) => {
    const question = view.questions[id];
    return question ? { ...view, questions: { ...view.questions, [id]: { ...question, votes } } } : view;
  },
  "handrail.question.closed": (view, { question_id: id, outcome, by }) => {
    const { [id]: question, ...questions } = view.questions;
    if (!question) return view;
    return { ...view, questions, closed: { ...view.closed, [id]: { question, outcome, by } } };
  },
  "handrail.usage": (view, { usage, cost }) => ({
    ...view,
    runs: view.runs.map((run) => (run.id === view.runId ? { ...run, usage, cost } : run)),
  }),
  "handrail.model_failed": (view, failed, event) => ({ ...view, failing: { ...view.failing, [scopeOf(event)]: failed } }),
  "handrail.undone": (view, { call_id: id }) => ({ ...withFacts(view, id, { undone: true }), changes: view.changes + 1 }),
};

/** Whether this status of a call is final, apart from undo. */
export function isOver(status) {
  return status !== undefined && status !== "running" && status !== "waiting";
}

/** The nested agents of a call. */
export function agentsOf(view, callId) {
  return Object.values(view.agents).filter((agent) => agent.callId === callId);
}

const insides = new WeakMap();

/** The calls that the tool of a call made itself, which have no card of their own. */
export function innerOf(view, callId) {
  let inside = insides.get(view.calls);
  if (!inside) {
    inside = new Map();
    for (const call of Object.values(view.calls)) {
      const outer = call.facts?.parent_call_id;
      if (outer && !call.name) inside.set(outer, [...(inside.get(outer) ?? []), call]);
    }
    insides.set(view.calls, inside);
  }
  return inside.get(callId) ?? [];
}

/** The calls in a call at any depth that have no card of their own. */
export function allInside(view, callId) {
  return innerOf(view, callId).flatMap((call) => [call, ...allInside(view, call.id)]);
}

/** The closed questions of a call and of its inner calls without a card of their own. Their ids begin with the call's id. */
export function closedOf(view, callId) {
  return Object.values(view.closed).filter(({ question: { call_id: id = "" } }) => id === callId || (id.startsWith(`${callId}.`) && !view.calls[id]?.name));
}

/** The background runs that a call and its inner calls without a card of their own have begun. */
export function begunBy(view, callId) {
  return Object.values(view.activities)
    .filter(isBegun)
    .map(({ content }) => content)
    .filter(({ call_id: id }) => id === callId || (id.startsWith(`${callId}.`) && !view.calls[id]?.name));
}

/** How a background run has ended; undefined before its end was told. */
export function endOf(view, backgroundId) {
  return view.activities[`${backgroundId}/ended`]?.content.end;
}

/** The open questions of a call. With null, those that belong to no visible call. */
export function questionsOf(view, callId) {
  const all = Object.values(view.questions);
  return callId === null
    ? all.filter((question) => !view.calls[question.call_id]?.name)
    : all.filter((question) => question.call_id === callId);
}

/** Whether a call or one of its agents has an open question. */
export function isAsked(view, callId, seen = new Set()) {
  if (seen.has(callId)) return false;
  seen.add(callId);
  if (questionsOf(view, callId).length) return true;
  return agentsOf(view, callId).some((agent) =>
    (view.entries[agent.id] ?? []).some((entry) => entry.kind === "call" && isAsked(view, entry.id, seen)),
  );
}

/** Whether the thread's run works or waits. */
export function isActive(view) {
  return view.status === "running" || view.status === "waiting";
}

/** The messages to the run that its model was not told yet. */
export function waitingIn(view) {
  return Object.values(view.queued).filter((message) => message.state === "waiting");
}

/** The tokens and cost of the thread, summed over its runs. The cost is null if that of one of them is unknown. */
export function spent(view) {
  let input = 0;
  let output = 0;
  let cost = 0;
  for (const run of view.runs) {
    input += run.usage?.input ?? 0;
    output += run.usage?.output ?? 0;
    cost = cost === null || run.cost === null ? null : cost + Number(run.cost ?? 0); // undefined until the run's first answer
  }
  return { input, output, cost };
}

/** Returns the view with a run that has just started, unless the run is already in it. */
export function withRun(view, id) {
  if (view.runs.some((run) => run.id === id)) return view;
  return { ...view, runId: id, runs: [...view.runs, { id, status: "running" }] };
}

/** Returns the view with a message to its run. Older news about the message, or news about a run that is over, change nothing. */
export function withQueued(view, message) {
  const known = view.queued[message.id];
  if (known ? known.state !== "waiting" || Date.parse(known.at) > Date.parse(message.at) : !isActive(view)) return view;
  return { ...view, queued: { ...view.queued, [message.id]: message } };
}

/** Returns the view without a message that was not accepted, in the status that it had before. */
export function withoutSaid(view, id, status) {
  const { [id]: said, ...messages } = view.messages;
  if (!said) return view;
  const entries = { ...view.entries, "": view.entries[""].filter((entry) => entry.id !== id) };
  return { ...view, entries, messages, status };
}

/** Returns the view with a message that was just sent, before the server confirms it. */
export function withSaid(view, id, text, files = []) {
  return withMessage(view, "", id, "user", { text, ...withFiles(files), open: false, local: true });
}

// -- the parts ------------------------------------------------------------------------------------------

const scopeOf = (event) => event.subagentRunId ?? "";

const shownInCall = (view, activityId) => activityId.startsWith("progress-") || isBegun(view.activities[activityId]);

const isBegun = ({ type, content }) => type === "handrail.background" && content?.state === "begun";

const withFiles = (files) => (files.length ? { files } : {});

function textOf(content) {
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map((part) => part.text ?? "").join("");
  return content === undefined || content === null ? "" : JSON.stringify(content);
}

function withEntry(view, scope, kind, id) {
  const entries = view.entries[scope] ?? [];
  if (entries.some((entry) => entry.id === id && entry.kind === kind)) return view;
  return { ...view, entries: { ...view.entries, [scope]: [...entries, { kind, id }] } };
}

function withMessage(view, scope, id, kind, message) {
  let entries = view.entries;
  if (kind === "user" && !message.local) {
    // The server's version of the message replaces ours.
    const mine = (entries[scope] ?? []).filter((entry) => view.messages[entry.id]?.local);
    if (mine.length) {
      entries = { ...entries, [scope]: entries[scope].filter((entry) => !mine.includes(entry)) };
    }
  }
  const next = { ...view, entries, messages: { ...view.messages, [id]: message } };
  return withEntry(next, scope, kind, id);
}

function withText(view, event, kind) {
  const message = view.messages[event.messageId];
  if (!message) return withMessage(view, scopeOf(event), event.messageId, kind, { text: event.delta, open: true });
  return { ...view, messages: { ...view.messages, [event.messageId]: { ...message, text: message.text + event.delta, open: true } } };
}

function closed(view, id) {
  const message = view.messages[id];
  return message?.open ? { ...view, messages: { ...view.messages, [id]: { ...message, open: false } } } : view;
}

function withCall(view, id, part) {
  return { ...view, calls: { ...view.calls, [id]: { ...(view.calls[id] ?? { id }), id, ...part } } };
}

const MOST_EMITTED = 100;

/** Returns the view with an event that a tool emitted. Only the newest events of a call are kept. */
function withEmitted(view, tool, value) {
  const id = value?.call_id;
  if (!id || !value.type) return view;
  const emitted = [...(view.calls[id]?.emitted ?? []), { tool, type: value.type, event: value.event }];
  return withCall(view, id, { emitted: emitted.slice(-MOST_EMITTED) });
}

function withFacts(view, id, facts) {
  const call = view.calls[id] ?? { id };
  return withCall(view, id, { facts: { ...(call.facts ?? {}), ...facts } });
}

function withQuestion(view, question) {
  if (view.closed[question.id]) return view;
  const before = askedBefore(view, question);
  return { ...view, questions: { ...view.questions, [question.id]: before ? { ...question, before } : question } };
}

/** The approval that was asked before about the same call, if its text was different; undefined if there is none. */
function askedBefore(view, question) {
  if (question.kind !== "approval") return undefined;
  const open = view.questions[question.id];
  if (open) return open.digest === question.digest ? open.before : open;
  return Object.values(view.closed).findLast(({ question: { kind, call_id: id, name } }) => kind === "approval" && id === question.call_id && name === question.name)?.question;
}

function withNote(view, id, status, text) {
  return withEntry({ ...view, notes: { ...view.notes, [id]: { status, text } } }, "", "note", id);
}

function withAgent(view, id, part) {
  const agents = { ...view.agents, [id]: { ...(view.agents[id] ?? { id }), ...part } };
  const next = { ...view, agents, entries: { [id]: [], ...view.entries } };
  return part.callId ? next : withEntry(next, part.parent ?? "", "agent", id);
}

function agentEnded(view, id, status) {
  return view.agents[id] ? { ...view, agents: { ...view.agents, [id]: { ...view.agents[id], status } } } : view;
}

/** Closes calls and agents that the server left open, because the run is over. */
function ended(view, status) {
  const halted = status === "idle" ? "ok" : "cancelled";
  const calls = {};
  for (const [id, call] of Object.entries(view.calls)) {
    const going = call.writing || call.facts?.status === "running" || call.facts?.status === "waiting";
    calls[id] = going ? { ...call, writing: false, facts: { ...call.facts, status: halted } } : call;
  }
  const agents = {};
  for (const [id, agent] of Object.entries(view.agents)) {
    agents[id] = agent.status === "running" || agent.status === "waiting" ? { ...agent, status: halted } : agent;
  }
  const runs = view.runs.map((run) => (run.id === view.runId ? { ...run, status: status === "idle" ? "done" : status } : run));
  const queued = Object.fromEntries(Object.values(view.queued).map((message) => [message.id, { ...message, state: "told" }]));
  return { ...view, status, calls, agents, runs, queued, failing: {}, questions: {}, changes: view.changes + 1 };
}

function withMessages(view, messages) {
  let next = view;
  for (const message of messages) {
    const scope = message.subagentRunId ?? "";
    if (message.role === "tool") {
      if (next.calls[message.toolCallId]) {
        next = withCall(next, message.toolCallId, { result: textOf(message.content) });
      }
    } else if (message.role === "activity") {
      next = CHANGES.ACTIVITY_SNAPSHOT(next, { ...message, messageId: message.id });
    } else if (message.role === "user" || message.role === "assistant" || message.role === "reasoning") {
      const kind = { user: "user", assistant: "text", reasoning: "reasoning" }[message.role];
      const text = textOf(message.content);
      const files = filesIn(message.content);
      if (text || files.length) next = withMessage(next, scope, message.id, kind, { text, ...withFiles(files), open: false });
      for (const call of message.toolCalls ?? []) {
        next = withCall(next, call.id, { name: call.function.name, arguments: call.function.arguments, writing: false, scope });
        next = withEntry(next, scope, "call", call.id);
      }
    }
  }
  return next;
}
