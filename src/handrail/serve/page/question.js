// An open question, shown where it was asked. Each is answered separately.

import { Approval } from "./approval.js";
import { Markdown } from "./markdown.js";
import { visible } from "./partial.js";
import { QuestionForm, rendererFor } from "./renderers.js";
import { Rows } from "./rows.js";
import { html, useEffect, useRef, useState } from "./vendor/standalone.js";
import { ORDER, OUTCOME } from "./words.js";

// Unsent input, by question. It outlives the component, so that answering one question keeps the input of the others.
const drafts = new Map();

// Milliseconds after which the buttons of a new approval work, and after which a focused question takes shortcuts.
const PAUSE = 400;

/** Scroll to the next open question and focus it. */
export function toQuestion() {
  const all = [...document.querySelectorAll("[data-question]")];
  const place = all.findIndex((each) => each.contains(document.activeElement));
  const next = all[(place + 1) % all.length];
  show(next);
}

function show(question) {
  question?.scrollIntoView({ block: question.offsetHeight > question.closest(".log, .sheet")?.clientHeight ? "start" : "center" });
  question?.focus({ preventScroll: true });
}

/** Calls `changed` when the head and the end of a question have been on screen, at once or one after the other. */
function useSeen(group, changed) {
  useEffect(() => {
    const parts = ["h3", ".choices"].map((part) => group.current.querySelector(part)).filter(Boolean);
    const left = new Set(parts);
    const look = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) if (isIntersecting && left.delete(target) && !left.size) changed();
    });
    parts.forEach((part) => look.observe(part));
    return () => look.disconnect();
  }, []);
}

/** Scrolls to the question with this id and focuses it, as soon as it is shown. */
export function showQuestion(id) {
  const focus = () => {
    const found = [...document.querySelectorAll("[data-question]")].find((each) => each.dataset.question === id);
    show(found);
    return Boolean(found) && document.activeElement === found; // nothing in a closed sheet gets the focus
  };
  if (focus()) return;
  const observer = new MutationObserver(() => focus() && observer.disconnect());
  observer.observe(document.body, { childList: true, subtree: true, attributeFilter: ["open"] });
  setTimeout(() => observer.disconnect(), 30_000);
}

/** Moves the focus out of a question that was answered: to the first other question, or to the message field. */
function goOn(gone) {
  const now = document.activeElement;
  if (now !== document.body && !gone?.contains(now)) return;
  const others = [...document.querySelectorAll("[data-question]")].filter((each) => each !== gone);
  (others[0] ?? document.getElementById("composer"))?.focus({ preventScroll: others.length === 0 });
}

export function Question({ question, conversation }) {
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState(null);
  const group = useRef(null);
  const keys = useRef(null); // Keyboard shortcuts, active while the focus is inside the question.
  // A key that is held or pressed just when the question gets the focus, or the second half of a double click, was meant for
  // something else.
  const [focused, setFocused] = useState(0);
  const since = useRef(0);
  const shown = usePause(0);
  const ready = usePause(focused);
  useSeen(group, () => conversation.saw?.(question));
  const give = (given) => act(() => conversation.answer(question, given));
  const act = async (ask) => {
    const here = group.current.contains(document.activeElement);
    setBusy(true);
    setProblem(null);
    try {
      await ask();
      drafts.delete(question.id);
      if (here) goOn(group.current);
    } catch (error) {
      setProblem(error);
      setBusy(false);
    }
  };
  const draft = {
    value: drafts.get(question.id),
    keep: (value) => drafts.set(question.id, value),
  };
  const askers = (question.asked_by ?? []).filter((name) => !name.includes(".")); // without the acts of handoffs
  const Body = { approval: Approval, pause: Paused }[question.kind] ?? Asked;
  const label = question.kind === "approval" ? `Approval of ${question.payload?.tool ?? question.name}` : question.kind === "pause" ? "The run is paused" : `Question: ${question.message || question.name}`;
  return html`<section
    class=${`question ${question.kind}${busy ? " busy" : ""}${ready ? " ready" : ""}`}
    role="group"
    aria-label=${label}
    aria-busy=${busy ? "true" : undefined}
    tabindex="-1"
    data-question=${question.id}
    ref=${group}
    onfocusin=${(event) => group.current.contains(event.relatedTarget) || setFocused((since.current = performance.now()))}
    onKeyDown=${(event) => {
      if (event.repeat) return event.target.closest("button") && event.preventDefault();
      return ready && performance.now() - since.current >= PAUSE && keys.current?.(event);
    }}
  >
    <p class="unseen" role="alert">${label}</p>
    <${Body} question=${question} give=${give} busy=${busy || conversation.mayAnswer === false || (question.kind === "approval" && !shown)} draft=${draft} order=${(order) => act(() => conversation.order(order))} fields=${problem?.fields ?? []} keys=${keys}>
      <${Expiry} at=${question.expires_at} />
      <details class="fine-print">
        <summary>Details</summary>
        ${askers.length > 1 && html`<p>asked by ${askers.join(" › ")}</p>`}
        <p class="digest">digest <code>${question.digest.slice(0, 16)}</code></p>
      </details>
    <//>
    ${problem && html`<p class="problem" role="alert">${problem.message}</p>`}
    ${conversation.mayAnswer === false && html`<p class="others" role="status">Your role lets you read this, but not answer it. The server’s operator can give you the role “user”.</p>`}
  </section>`;
}

/** Whether `PAUSE` milliseconds have passed since the last change. */
export function usePause(change) {
  const [over, setOver] = useState(null);
  useEffect(() => {
    const timer = setTimeout(() => setOver(change), PAUSE);
    return () => clearTimeout(timer);
  }, [change]);
  return over === change;
}

function Expiry({ at }) {
  if (!at) return null;
  const when = new Date(at);
  return html`<p class="soft expiry">Open until <time datetime=${at}>${when.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" })}</time></p>`;
}

/** A paused run: it goes on, has one last turn, or ends. */
function Paused({ give, order, busy }) {
  return html`<div class="asked">
    <h3>The run is paused.</h3>
    <div class="choices">
      <button type="button" class="primary" disabled=${busy} onClick=${() => give({ outcome: "answered", value: "continue" })}>Continue</button>
      <button type="button" disabled=${busy} onClick=${() => order("wrap up")}>${ORDER["wrap up"]}</button>
      <button type="button" disabled=${busy} onClick=${() => order("stop")}>Stop here</button>
    </div>
  </div>`;
}

/** A question for input, shown by the app's own renderer or by a form. */
function Asked({ question, give, busy, draft, fields, children }) {
  const own = rendererFor(question.name);
  const Renderer = own ?? QuestionForm;
  return html`<div class="asked">
    ${question.title && html`<h3><bdi>${question.title}</bdi></h3>`}
    <p class="why"><bdi>${question.message || question.name}</bdi></p>
    ${!own && html`<${Drawn} question=${question} />`}
    ${children}
    <${Renderer}
      question=${question}
      submit=${(value) => give({ outcome: "answered", value })}
      decline=${(reason) => give({ outcome: "declined", ...(reason ? { reason } : {}) })}
      errors=${fields}
      draft=${draft.value}
      onDraft=${draft.keep}
      busy=${busy}
    />
  </div>`;
}

/** A question's payload: the fields that the app declares as Markdown are drawn, and all others are rows. Opened, everything is rows. */
function Drawn({ question: { rows, payload, markdown } }) {
  const drawn = (rows ?? []).filter(({ name }) => markdown?.includes(name) && typeof payload?.[name] === "string" && payload[name]);
  if (!drawn.length) return html`<${Rows} rows=${rows} />`;
  return html`<${Rows} rows=${rows.filter((row) => !drawn.includes(row))} />
    ${drawn.map(({ name }) => html`<${Markdown} key=${name} text=${visible(payload[name])} />`)}
    <details class="fine-print"><summary>As text</summary><${Rows} rows=${drawn} /></details>`;
}

/** A closed question: one line, with who answered it. */
export function Closed({ closed }) {
  const answer = closed.answer === undefined || closed.answer === null ? "" : typeof closed.answer === "string" ? closed.answer : JSON.stringify(closed.answer);
  return html`<p class="closed soft">${OUTCOME[closed.outcome] ?? closed.outcome}${closed.by ? ` by ${closed.by}` : ""}: ${closed.question.message || closed.question.name}${answer && html` <bdi class="answer">${answer}</bdi>`}</p>`;
}
