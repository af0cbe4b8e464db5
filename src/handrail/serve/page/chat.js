// The conversation: the log, the open questions, and the message field.

import { Composer } from "./composer.js";
import { Entries } from "./entries.js";
import { useStickyEnd } from "./hooks.js";
import { Icon } from "./icons.js";
import { Question, toQuestion, usePause } from "./question.js";
import { Broken, Loading } from "./states.js";
import { questionsOf } from "./store.js";
import { Tray } from "./tray.js";
import { html, useState } from "./vendor/standalone.js";
import { many } from "./words.js";

export function ChatPane({ about, conversation, say }) {
  const { view, phase } = conversation;
  const { ref, atEnd, toEnd } = useStickyEnd();
  const mine = Object.values(view.questions).filter((question) => !question.quorums?.length).length;
  const said = async (text, files) => {
    await say(text, files);
    toEnd();
  };
  return html`<div class="chat">
    <div class="log" ref=${ref} role="log" aria-live="polite" aria-label="Conversation" tabindex="0">
      <div class="column">
        ${phase === "loading" && html`<${Loading} words="Opening the thread…" />`}
        ${phase === "broken" && html`<${Broken} problem=${conversation.problem} again=${() => conversation.open()} />`}
        ${phase === "new" && html`<${Welcome} about=${about} say=${said} />`}
        <${Entries} scope="" view=${view} conversation=${conversation} />
        ${questionsOf(view, null).map((question) => html`<${Question} key=${`${question.id} ${question.digest}`} question=${question} conversation=${conversation} />`)}
        <${Thinking} view=${view} />
      </div>
    </div>
    <div class="foot">
      ${!atEnd && html`<button type="button" class="newest" onClick=${toEnd}><${Icon} name="down" /> Newest</button>`}
      ${mine > 0 &&
      html`<p class="waiting-bar" role="status">
        <span>${many(mine, "question is", "questions are")} waiting for you.</span>
        <${AllowAll} conversation=${conversation} />
        <button type="button" class="small" aria-keyshortcuts="Alt+Q" onClick=${toQuestion}>Go to it <kbd>Alt Q</kbd></button>
      </p>`}
      ${!about.actions.includes("run") && html`<p class="waiting-bar" role="status">You can read this thread, but your role does not allow you to send messages.</p>`}
      <${Tray} conversation=${conversation} mayChange=${about.actions.includes("run")} />
      <${Composer} conversation=${conversation} loading=${phase === "loading"} say=${said} />
    </div>
  </div>`;
}

/** Allows all approvals that one turn waits for. Those that others decide, or that can't be remembered, such as files that run later, are left out. */
function AllowAll({ conversation }) {
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const asked = Object.values(conversation.view.questions).filter(({ kind, payload, quorums }) => kind === "approval" && payload?.scopes && !quorums?.length);
  const key = (question) => `${question.id} ${question.digest}`;
  const isReady = usePause(asked.map(key).join());
  const unseen = asked.filter((question) => !conversation.seen.has(key(question))).length;
  if (asked.length < 2 || !conversation.mayAnswer) return problem && html`<span class="problem" role="alert">${problem}</span>`;
  const allow = async () => {
    setBusy(true);
    const errors = await conversation.allow(asked);
    setProblem(errors[0]?.message ?? "");
    setBusy(false);
  };
  return html`${problem && html`<span class="problem" role="alert">${problem}</span>`}
    ${unseen > 0 && html`<span class="soft">Look at ${unseen === asked.length ? "them" : `${unseen} more`} to allow all at once.</span>`}
    <button type="button" class="small" disabled=${busy || !isReady || unseen > 0} onKeyDown=${(event) => event.repeat && event.preventDefault()} onClick=${allow}>Allow these ${asked.length} once</button>`;
}

function Welcome({ about, say }) {
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const start = async (text) => {
    setBusy(true);
    setProblem(null);
    try {
      await say(text, []);
    } catch (error) {
      setProblem(error.message);
      setBusy(false);
    }
  };
  return html`<div class="welcome">
    <h2>${about.description || about.name}</h2>
    <p class="soft">${about.files ? "It can read and change files. Its changes are listed under Files and can be undone." : !about.starters.length && "Write a message to start."}</p>
    ${about.starters.length > 0 &&
    about.actions.includes("run") &&
    html`<ul class="starters" aria-label="Suggestions">${about.starters.map((text) => html`<li><button type="button" disabled=${busy} onClick=${() => start(text)}>${text}</button></li>`)}</ul>`}
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
  </div>`;
}

/** Shows that a run is active while no message or call is in progress. Its space is always reserved, so that nothing moves. */
function Thinking({ view }) {
  const last = view.entries[""].at(-1);
  const quiet = view.status === "running" && !busy(view, last);
  return html`<p class="thinking" role="status">${quiet && html`<span class="dots" aria-hidden="true"><i></i><i></i><i></i></span><span class="unseen">Thinking</span>`}</p>`;
}

function busy(view, entry) {
  if (!entry) return false;
  if (entry.kind === "call") return ["running", "waiting"].includes(view.calls[entry.id]?.facts?.status) || view.calls[entry.id]?.writing;
  return Boolean(view.messages[entry.id]?.open);
}
