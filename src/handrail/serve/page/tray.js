// The tray above the message field: what was said to the run and its model was not told yet. It can be edited and withdrawn.

import { Icon } from "./icons.js";
import { waitingIn } from "./store.js";
import { html, useEffect, useRef, useState } from "./vendor/standalone.js";
import { many, ORDER, WHEN } from "./words.js";

/** The messages that wait. A message that is being edited stays, with the typed text, even if it is told meanwhile. */
export function Tray({ conversation, mayChange }) {
  const { view } = conversation;
  const [edited, setEdited] = useState(null);
  const [problem, setProblem] = useState(null);
  const waits = waitingIn(view);
  const isLate = edited && !waits.some((message) => message.id === edited.id);
  const rows = isLate ? [edited, ...waits] : waits;
  useEffect(() => setProblem(null), [waits.length === 0]);
  if (!rows.length) return null;
  const withdraw = async (message) => {
    setProblem(null);
    toComposer();
    try {
      await conversation.withdraw(message);
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`<section class="tray" aria-label="Messages that wait">
    <p class="tray-head soft" role="status">${waits.length > 0 && `${many(waits.length, "message waits", "messages wait")} to be told${view.status === "waiting" ? " after your answer" : ""}`}</p>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <ul>
      ${rows.map((message) =>
        message.id === edited?.id
          ? html`<${Editor} key=${message.id} message=${edited} late=${isLate ? (view.queued[edited.id]?.state ?? "told") : ""} conversation=${conversation} close=${() => setEdited(null)} />`
          : html`<${Row} key=${message.id} message=${message} mayChange=${mayChange} edit=${edited ? null : () => setEdited(message)} withdraw=${() => withdraw(message)} />`,
      )}
    </ul>
  </section>`;
}

function Row({ message, mayChange, edit, withdraw }) {
  const [short, long] = WHEN[message.when];
  const words = [ORDER[message.order], message.text].filter(Boolean).join(": ");
  return html`<li class="queued">
    <span class="queued-when" title=${long}><${Icon} name=${message.order ?? message.when} /><span>${short}</span></span>
    <p class="said"><bdi>${words}</bdi>${message.edited && html` <span class="soft">(edited)</span>`}</p>
    ${mayChange &&
    !message.child &&
    html`<span class="queued-acts">
      ${!message.order && html`<button type="button" class="quiet small" id=${`edit-${message.id}`} disabled=${!edit} aria-label=${`Edit: ${words}`} onClick=${edit}>Edit</button>`}
      <button type="button" class="quiet small" aria-label=${`Withdraw: ${words}`} onClick=${withdraw}>Withdraw</button>
    </span>`}
  </li>`;
}

/** A message that is being edited. Enter saves, Escape discards the changes. If it is too late, the text can be sent as a new message. */
function Editor({ message, late, conversation, close }) {
  const [text, setText] = useState(message.text);
  const [when, setWhen] = useState(message.when);
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState(null);
  const field = useRef(null);
  useEffect(() => {
    field.current.focus();
    field.current.setSelectionRange(text.length, text.length);
  }, []);
  const leave = () => {
    close();
    requestAnimationFrame(() => (document.getElementById(`edit-${message.id}`) ?? document.getElementById("composer"))?.focus());
  };
  const save = async (event) => {
    event?.preventDefault();
    if (!text.trim() || busy) return;
    setBusy(true);
    setProblem(null);
    try {
      await (late ? conversation.send(text.trim(), when) : conversation.edit(message, text.trim(), when));
      leave();
    } catch (error) {
      setProblem(error.message);
      setBusy(false);
    }
  };
  const pressed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) save(event);
    else if (event.key === "Escape") leave();
  };
  return html`<li class="queued">
    <form class="queued-editor" onSubmit=${save}>
      <textarea ref=${field} aria-label="Edit the message" rows=${Math.min(6, text.split("\n").length)} value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${pressed}></textarea>
      <${WhenField} when=${when} choose=${setWhen} />
      <button type="submit" class="small primary" disabled=${!text.trim() || busy}>${late ? "Send as new" : "Save"}</button>
      <button type="button" class="quiet small" onClick=${leave}>${late ? "Discard" : "Back"}</button>
    </form>
    ${late
      ? html`<p class="problem" role="alert">${late === "told" ? "The model was told before you saved." : "It was withdrawn in another window."} Your text is still here.</p>`
      : problem && html`<p class="problem" role="alert">${problem}</p>`}
  </li>`;
}

/** The choice of when a message is told. */
export function WhenField({ when, choose }) {
  return html`<label class="when" title=${WHEN[when][1]}>
    <span class="unseen">When the model is told</span><${Icon} name=${when} />
    <select value=${when} onChange=${(event) => choose(event.target.value)}>
      ${Object.entries(WHEN).map(([name, [short]]) => html`<option value=${name} selected=${name === when}>${short}</option>`)}
    </select>
  </label>`;
}

function toComposer() {
  document.getElementById("composer")?.focus();
}
