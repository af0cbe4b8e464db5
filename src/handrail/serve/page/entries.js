// The log of a conversation: messages, tool calls and nested agents, in order. A call's card contains the agents it
// started, and an agent contains a log of its own.

import { Arguments } from "./arguments.js";
import { Attachments } from "./attachments.js";
import { Begun, Ended } from "./background.js";
import { apart } from "./call_line.js";
import { Counted, UNAPPLIED, Undo } from "./changes.js";
import { Compacted } from "./compacted.js";
import { Copy } from "./copy.js";
import { DiffView } from "./diff.js";
import { drawnFor, useNow } from "./hooks.js";
import { Icon } from "./icons.js";
import { Markdown } from "./markdown.js";
import { Closed, Question } from "./question.js";
import { agentsOf, allInside, begunBy, closedOf, endOf, innerOf, isActive, isAsked, isOver, questionsOf } from "./store.js";
import { isShort, Tree, treeOf } from "./tree.js";
import { Component, html, useMemo, useRef, useState } from "./vendor/standalone.js";
import { count, dollars, duration, ENDED, many, STATUS } from "./words.js";

export function Entries({ scope, view, conversation }) {
  const failed = view.failing[scope];
  return html`${(view.entries[scope] ?? []).map(({ kind, id }) => html`<${Guarded} key=${id}><${Entry} kind=${kind} id=${id} view=${view} conversation=${conversation} /><//>`)}
    ${failed && html`<${Failing} key=${`failed-${failed.model}-${failed.attempt}`} failed=${failed} />`}`;
}

/** Says that a model failed, and what comes next, until it goes on. */
function Failing({ failed: { model, error, retry_in: wait, next_model: next } }) {
  const now = useNow(wait !== null);
  const began = useRef(now);
  const left = Math.ceil(wait - (now - began.current));
  return html`<p class="failing" role="status">
    <${Icon} name="error" /><span><bdi>${`${model}: ${error.replace(`model '${model}': `, "").replace(/\.$/, "")}.`}</bdi> ${next ? html`Asking <bdi>${next}</bdi> instead…` : html`Trying again${left > 0 && html`<span aria-hidden="true"> in ${duration(left)}</span>`}…`}</span>
  </p>`;
}

function Entry({ kind, id, view, conversation }) {
  if (kind === "call") {
    return html`<${Card} id=${id} view=${view} conversation=${conversation} />
      ${begunBy(view, id).map((content) => html`<${Begun} key=${content.background_id} content=${content} end=${endOf(view, content.background_id)} />`)}`;
  }
  if (kind === "agent") return html`<${Agent} agent=${view.agents[id]} view=${view} conversation=${conversation} />`;
  if (kind === "note") return html`<${Note} note=${view.notes[id]} retry=${retryOf(view, id, conversation)} />`;
  if (kind === "activity") {
    const activity = view.activities[id];
    if (activity.type === "handrail.compacted") return html`<${Compacted} content=${activity.content} view=${view} />`;
    if (activity.type === "handrail.background") return html`<${Ended} content=${activity.content} />`;
    return html`<${Activity} activity=${activity} thread=${view.id} />`;
  }
  return html`<${Message} kind=${kind} message=${view.messages[id]} thread=${view.id} />`;
}

/** Shows a note if an entry can't be drawn. Other entries, and the questions in them, are not affected. */
class Guarded extends Component {
  constructor() {
    super();
    this.state = { failed: false };
  }

  static getDerivedStateFromError() {
    return { failed: true };
  }

  render({ children }, { failed }) {
    return failed ? html`<p class="note failed" role="alert">This part can't be shown.</p>` : children;
  }
}

const Message = drawnFor(
  ({ message }) => [message],
  ({ kind, message, thread }) => {
    if (!message) return null;
    if (kind === "user") {
      return html`<div class="message user">
        <p class="unseen">You:</p>${message.text && html`<p class="said">${message.text}</p>`}<${Attachments} files=${message.files} thread=${thread} />
      </div>`;
    }
    if (kind === "reasoning") {
      return html`<details class="reasoning"><summary>${message.open ? "Thinking…" : "Thought"}</summary><${Markdown} text=${message.text} /></details>`;
    }
    if (!message.text && !message.open) return null; // the answer begins with a file
    return html`<div class=${`message assistant${message.open ? " open" : ""}`} aria-busy=${message.open ? "true" : undefined}>
      <${Markdown} text=${message.text} />
      ${!message.open && message.text && html`<p class="message-acts"><${Copy} text=${message.text} what="the answer" /></p>`}
    </div>`;
  },
);

/** Sends the person's last message again, if the thread has ended with this note; null if it goes on below it, or if the message has files. */
function retryOf(view, id, conversation) {
  const log = view.entries[""];
  const said = log.findLast(({ kind }) => kind === "user");
  const message = said && view.messages[said.id];
  if (log.at(-1).id !== id || !message?.text || message.files?.length || isActive(view) || !conversation.mayAnswer) return null;
  return () => conversation.say(message.text);
}

const Note = drawnFor(
  ({ note, retry }) => [note, retry === null],
  ({ note, retry }) =>
    note.status in ENDED
      ? html`<p class="note cancelled"><${Icon} name="cancelled" /> ${ENDED[note.status]}</p>`
      : html`<div class="note failed" role="alert"><${Icon} name="error" /><div><strong>The run failed.</strong><p>${note.text}</p>${retry && html`<${Retry} retry=${retry} />`}</div></div>`,
);

/** A button that sends the last message again. */
function Retry({ retry }) {
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const again = async () => {
    setBusy(true);
    await retry().catch((error) => setProblem(error.message));
    setBusy(false);
  };
  return html`<button type="button" class="small" disabled=${busy} onClick=${again}>Try again</button>${problem && html`<span class="problem" role="alert">${problem}</span>`}`;
}

/** An activity other than a call's progress: a file that the model made, or else its type, and its message or content. */
const Activity = drawnFor(
  ({ activity }) => [activity],
  ({ activity, thread }) =>
    activity.type === "handrail.attachment"
      ? html`<${Attachments} files=${[activity.content]} thread=${thread} />`
      : html`<div class="activity"><span class="soft">${activity.type}</span> ${activity.content?.message ?? JSON.stringify(activity.content)}</div>`,
);

// -- tool calls -----------------------------------------------------------------------------------------

const FOLDED = ["ok", "cancelled"]; // how a call ended that is folded into its line, until the reader opens it

/** A tool call on one line. Below it, until it is done or when the reader opens it: its arguments, progress, questions and result. */
const Card = drawnFor(
  ({ id, view }) => {
    const agents = agentsOf(view, id);
    // A call with agents is drawn again after every change of the view, and any other call only if one of the other values changes.
    return [view.calls[id], view.activities[`progress-${id}`], agents.length ? view : null, ...allInside(view, id), ...questionsOf(view, id), ...closedOf(view, id)];
  },
  ({ id, view, conversation }) => {
    const [chosen, choose] = useState(null);
    const call = view.calls[id];
    const facts = call.facts ?? {};
    const agents = agentsOf(view, id);
    const questions = questionsOf(view, id);
    const status = statusOf(call, questions);
    const isShown = questions.some((question) => question.kind === "approval" && question.call_id === id); // the approval shows the name and the arguments
    const isFolded = !isAsked(view, id) && !(chosen ?? !FOLDED.includes(status));
    const hasChanged = isOver(facts.status) && (facts.diff || facts.paths?.length > 0);
    return html`<section class=${`card ${status.replace(" ", "-")}${isFolded ? " folded" : ""}`} role="group" aria-label=${`${call.name}, ${STATUS[status] ?? status}`}>
      ${!isShown &&
      html`<div class="call-line">
        <button type="button" class="call-name" aria-expanded=${String(!isFolded)} onClick=${() => choose(isFolded)}>
          <${Icon} name=${status} /><code class="tool">${call.name}</code>
          ${isFolded && html`<bdi class="call-about">${apart(view, id)}</bdi>`}
          <${Status} status=${status} />
        </button>
        ${isFolded && html`<${Newest} event=${newestEvent(view, agents.flatMap((agent) => view.entries[agent.id] ?? []))} />`}
        ${isFolded && allInside(view, id).some(hasFailed) && html`<span class="status error">a call inside failed</span>`}
        ${facts.unapplied && html`<span class="unapplied">not applied</span>`}
        ${hasChanged && html`<${Counted} diff=${facts.diff} />`}
        ${facts.undone && html`<span class="undone"><${Icon} name="undo" /> undone</span>`}
        ${hasChanged && status === "ok" && !facts.undone && !facts.unapplied && html`<${Undo} tool=${call.name} paths=${facts.paths ?? []} undo=${() => conversation.undo(id)} />`}
        <${Facts} facts=${facts} status=${status} />
      </div>`}
      <div class="call-body" hidden=${isFolded ? "until-found" : undefined} onbeforematch=${() => choose(true)}>
        ${!isShown && html`<${Arguments} text=${call.arguments ?? ""} writing=${Boolean(call.writing)} />`}
        <${Progress} activity=${isOver(facts.status) ? null : view.activities[`progress-${id}`]} tool=${call.name} />
        <${Emitted} call=${call} />
        <${Inner} id=${id} view=${view} />
        ${agents.length > 0 &&
        html`<div class="agents" role="group" aria-label=${`Agents of ${call.name}`}>
          ${agents.map((agent) => html`<${Agent} key=${agent.id} agent=${agent} outer=${agents.length === 1 ? call.name : null} view=${view} conversation=${conversation} />`)}
        </div>`}
        ${questions.map((question) => html`<${Question} key=${`${question.id} ${question.digest}`} question=${question} conversation=${conversation} />`)}
        ${closedOf(view, id).map((closed) => html`<${Closed} key=${closed.question.id} closed=${closed} />`)}
        ${call.result !== undefined && !isSaid(view, agents, call.result) && html`<${Result} text=${call.result} status=${status} />`}
        ${facts.rolled_back && html`<${RolledBack} told=${facts.rolled_back} />`}
        ${isUndoneAlone(view, id, agents) && html`<p class="soft"><${Icon} name="undo" /> Its changes to files and state were rolled back.</p>`}
        ${facts.unapplied && html`<p class="soft">${UNAPPLIED}</p>`}
        ${hasChanged && !isFolded && html`<${DiffView} diff=${facts.diff ?? ""} />`}
      </div>
      <${Attachments} files=${facts.attachments} thread=${view.id} />
    </section>`;
  },
);

/** A status in words. Where the icon says enough, the words are for screen readers only. */
function Status({ status }) {
  return html`<span class=${FOLDED[0] === status ? "unseen" : `status ${status.replace(" ", "-")}`}>${STATUS[status] ?? status}</span>`;
}

const hasFailed = ({ facts = {} }) => isOver(facts.status) && facts.status !== "ok" && !facts.tool?.includes("."); // a handoff reports the failure of its acts itself

/** Whether a call failed by itself, so that none of its changes is left. What it was told while it ran is not in a snapshot. */
function isUndoneAlone(view, id, agents) {
  const { status, rolled_back: told } = view.calls[id].facts ?? {};
  return !told && status !== "cancelled" && ROLLED_BACK.includes(status) && !agents.length && !innerOf(view, id).length;
}

/** Whether the only agent of a call has said a text as its last one. */
function isSaid(view, agents, text) {
  if (agents.length !== 1) return false;
  const last = (view.entries[agents[0].id] ?? []).at(-1);
  return last?.kind === "text" && view.messages[last.id]?.text.trim() === text.trim();
}

function statusOf(call, questions) {
  if (questions.length) return "waiting";
  if (call.facts?.status) return call.facts.status;
  if (call.writing) return "writing";
  return call.result === undefined ? "running" : "ok";
}

/** The events that a call's tool emitted, in order. */
function Emitted({ call }) {
  if (!call.emitted?.length) return null;
  return html`<ul class="emitted" aria-label=${`Events of ${call.name ?? call.facts?.tool}`}>
    ${call.emitted.map((each) => html`<li><span class="soft">${each.type}</span> ${shortJson(each.event)}</li>`)}
  </ul>`;
}

function shortJson(value) {
  if (value === null || typeof value !== "object") return String(value ?? "");
  const parts = Object.entries(value).map(([key, each]) => `${key}: ${typeof each === "string" ? each : JSON.stringify(each)}`);
  const text = parts.join(", ");
  return text.length > 200 ? `${text.slice(0, 199)}…` : text;
}

const ROLLED_BACK = ["error", "timed out", "cancelled", "conflict"];

/** The calls that a tool made itself: those that emitted events, and those that did not succeed, with the reason. */
function Inner({ id, view }) {
  return innerOf(view, id).map((call) => {
    const { tool = "", status, reason, rolled_back: rolledBack } = call.facts ?? {};
    const failed = hasFailed(call);
    if (!failed && !call.emitted?.length) return html`<${Inner} key=${call.id} id=${call.id} view=${view} />`;
    return html`<div key=${call.id} class="inner" role="group" aria-label=${`${tool}, ${STATUS[status] ?? status}`}>
      <p class="inner-head">
        <span class=${`status ${(status ?? "running").replace(" ", "-")}`}><${Icon} name=${status ?? "running"} /><span>${STATUS[status] ?? status}</span></span>
        <code class="tool">${tool}</code>
      </p>
      <${Emitted} call=${call} />
      ${failed && reason && html`<p class="reason"><bdi>${reason}</bdi></p>`}
      ${failed && rolledBack?.not_undone?.length > 0 && html`<${RolledBack} told=${rolledBack} />`}
      ${failed && ROLLED_BACK.includes(status) && !rolledBack?.not_undone?.length && html`<p class="soft"><${Icon} name="undo" /> Rolled back.</p>`}
      <${Inner} id=${call.id} view=${view} />
    </div>`;
  });
}

/** The tokens and cost of the runs nested in a call, and the call's duration. */
function Facts({ facts, status }) {
  const running = status === "running" && Boolean(facts.began_at);
  const now = useNow(running);
  // While the call runs, its duration is shown only after a second, because racing digits are hard to read.
  const gone = running ? now - Date.parse(facts.began_at) / 1000 : 0;
  const seconds = running ? (gone >= 1 ? gone : null) : isOver(facts.status) ? facts.seconds : null;
  const tokens = (facts.usage?.input ?? 0) + (facts.usage?.output ?? 0);
  return html`<span class="facts">
    ${tokens > 0 && html`<span title="tokens used by this call’s agents">${count(tokens)} tokens</span>`}
    ${facts.cost && html`<span>${dollars(facts.cost)}</span>`}
    ${seconds !== null && seconds !== undefined && html`<time>${duration(Math.max(0, seconds))}</time>`}
  </span>`;
}

function Progress({ activity, tool }) {
  if (!activity) return null;
  const { message, done, total } = activity.content ?? {};
  const known = typeof done === "number" && typeof total === "number" && total > 0;
  return html`<div class="progress">
    <progress aria-label=${`Progress of ${tool}`} value=${known ? done : undefined} max=${known ? total : undefined}></progress>
    <p role="status">
      ${message && html`<span>${message}</span>`}
      ${known ? html`<span class="soft">${done} of ${total}</span>` : typeof done === "number" && html`<span class="soft">${done}</span>`}
    </p>
  </div>`;
}

const LONG = 420;

/** The result of a call: a tree if it is JSON. Long results are folded. */
function Result({ text, status }) {
  const [open, setOpen] = useState(false);
  const [plain, setPlain] = useState(false);
  const value = useMemo(() => treeOf(text), [text]);
  const isTree = value !== null && !plain;
  const long = !isTree && (text.length > LONG || text.split("\n").length > 8);
  if (!text) return null;
  return html`<div class=${`result ${status === "ok" ? "" : "not-ok"}`}>
    ${isTree ? html`<${Tree} value=${value} short=${isShort(text)} />` : html`<pre class=${long && !open ? "folded" : ""} tabindex=${long && open ? 0 : undefined}>${text}</pre>`}
    ${long && html`<button type="button" class="link" aria-expanded=${String(open)} onClick=${() => setOpen(!open)}>${open ? "Show less" : `Show all (${text.split("\n").length} lines)`}</button>`}
    ${value !== null && html`<button type="button" class="link" onClick=${() => setPlain(!plain)}>${plain ? "As a tree" : "As text"}</button>`}
  </div>`;
}

function RolledBack({ told }) {
  return html`<div class="rolled-back">
    <p><${Icon} name="undo" /> Rolled back: ${told.reason}</p>
    ${told.not_undone?.length > 0 &&
    html`<p>These effects could not be undone:</p>
      <ul>
        ${told.not_undone.map((what) => html`<li>${typeof what === "string" ? what : JSON.stringify(what)}</li>`)}
      </ul>`}
  </div>`;
}

// -- nested agents --------------------------------------------------------------------------------------

/** A nested agent: a branch inside the card of the call that started it. The only agent of a call is folded with it; `outer` is the call's name. */
function Agent({ agent, outer, view, conversation }) {
  const entries = view.entries[agent.id] ?? [];
  const asked = entries.some((entry) => entry.kind === "call" && isAsked(view, entry.id));
  // The branch opens when the agent first runs, and stays open until the reader closes it, so that nothing jumps. While the agent asks, it is always open.
  const [chosen, setChosen] = useState(null);
  const [worked, setWorked] = useState(false);
  if ((agent.status === "running" || asked) && !worked) setWorked(true);
  const open = asked || (chosen ?? worked) || outer != null;
  const calls = entries.filter((entry) => entry.kind === "call").length;
  const status = asked ? "waiting" : (agent.status ?? "ok");
  const branch = html`<div class="branch" role="group" aria-label=${`Activity of ${agent.name}`}>
    ${open && html`<${Entries} scope=${agent.id} view=${view} conversation=${conversation} />`}
    ${entries.length === 0 && html`<p class="soft">No messages yet.</p>`}
  </div>`;
  if (outer != null) {
    return html`<div class="agent">
      ${(agent.name !== outer || status === "error") && html`<p class="agent-head"><${Icon} name="agent" /> <span class="agent-name">${agent.name}</span> ${status === "error" && html`<${Status} status=${status} />`}</p>`}
      ${branch}
    </div>`;
  }
  return html`<details
    class="agent"
    open=${open}
    onToggle=${(event) => event.target === event.currentTarget && event.currentTarget.open !== open && setChosen(event.currentTarget.open)}
  >
    <summary aria-label=${`Agent ${agent.name}, ${STATUS[status] ?? status}`}>
      <${Icon} name="agent" />
      <span class="agent-name">${agent.name}</span>
      <${Icon} name=${status} /><${Status} status=${status} />
      ${calls > 0 && html`<span class="soft">${many(calls, "call")}</span>`}
      ${!open && html`<${Newest} event=${newestEvent(view, entries)} />`}
    </summary>
    ${branch}
  </details>`;
}

function Newest({ event }) {
  return event && html`<span class="newest-event"><span class="soft">${event.type}</span> ${shortJson(event.event)}</span>`;
}

/** The last event of the last call in an agent's log that emitted any. A closed branch shows it in its summary. */
function newestEvent(view, entries) {
  const calls = entries.filter((entry) => entry.kind === "call").flatMap(({ id }) => [view.calls[id], ...allInside(view, id)]);
  return calls.findLast((call) => call?.emitted?.length)?.emitted.at(-1);
}
