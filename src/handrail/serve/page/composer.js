// The message field. Enter sends, Shift+Enter starts a new line, Escape stops an active run. Unsent text is kept.
// While a run works, what is sent is told to its model, and the choice beside the field says when.

import { Thumbnail } from "./attachments.js";
import { Icon } from "./icons.js";
import { Orders } from "./orders.js";
import { isActive } from "./store.js";
import { WhenField } from "./tray.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/standalone.js";
import { WHEN } from "./words.js";

// Unsent text, by thread.
const typed = new Map();

export function Composer({ conversation, loading, say }) {
  const { id, status } = conversation.view;
  const [text, setText] = useState(typed.get(id) ?? "");
  const [files, setFiles] = useState([]);
  const [busy, setBusy] = useState(false);
  const [stopping, setStopping] = useState(false);
  const [problem, setProblem] = useState(null);
  const [when, setWhen] = useState("next step");
  const field = useRef(null);
  const sending = useRef(null); // The id of the message that is being sent. Sending it again is harmless.
  const running = isActive(conversation.view);
  const isPaused = Object.values(conversation.view.questions).some((question) => question.kind === "pause");
  typed.set(id, text);

  useEffect(() => {
    if (!matchMedia("(pointer: coarse)").matches) field.current?.focus({ preventScroll: true });
  }, []);
  useEffect(() => {
    if (!running) setStopping(false);
  }, [running]);
  useLayoutEffect(() => {
    // The field grows with its content, up to a third of the window.
    field.current.style.height = "auto";
    field.current.style.height = `${Math.min(field.current.scrollHeight, innerHeight / 3)}px`;
  }, [text]);

  const send = async (event) => {
    event?.preventDefault();
    if ((!text.trim() && !files.length) || busy || loading) return;
    if (running && files.length) return setProblem("Files can be sent when the run has finished. Remove them, or wait.");
    setBusy(true);
    setProblem(null);
    setText(""); // what is typed from here on is another message
    try {
      if (running) await conversation.send(text.trim(), when, (sending.current ??= newId()));
      else await say(text.trim(), files);
      sending.current = null;
      setFiles([]);
      setWhen("next step");
    } catch (error) {
      setProblem(error.message);
      setText((now) => [text, now].filter(Boolean).join("\n"));
    }
    setBusy(false);
  };
  const stop = async () => {
    setStopping(true);
    try {
      await conversation.cancel();
    } catch (error) {
      setProblem(error.message);
      setStopping(false);
    }
  };
  const order = async (given) => {
    setProblem(null);
    try {
      await conversation.order(given);
    } catch (error) {
      setProblem(error.message);
    }
  };
  const attach = (event, list) => {
    if (!list?.length) return;
    event.preventDefault();
    setFiles([...files, ...list]);
  };
  const pressed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    else if (event.key === "Escape" && status === "running" && !stopping) stop();
  };
  return html`<form class=${`composer${running ? " running" : ""}`} onSubmit=${send} onDragOver=${(event) => event.preventDefault()} onDrop=${(event) => attach(event, event.dataTransfer?.files)}>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <div class="field">
      ${files.length > 0 &&
      html`<ul class="attached" aria-label="Files to send">
        ${files.map((file, at) => html`<li key=${`${at} ${file.name}`}><${Thumbnail} file=${file} /><button type="button" class="quiet icon-button" aria-label=${`Remove ${file.name}`} onClick=${() => setFiles(files.filter((_, other) => other !== at))}><${Icon} name="close" /></button></li>`)}
      </ul>`}
      <label class="attach" title="Attach files"><span class="unseen">Attach files</span><${Icon} name="plus" />
        <input type="file" multiple onChange=${(event) => { attach(event, event.target.files); event.target.value = ""; }} />
      </label>
      <label class="unseen" for="composer">Message</label>
      <textarea
        id="composer"
        ref=${field}
        rows="1"
        value=${text}
        placeholder=${running ? "Say something" : "Write a message"}
        aria-describedby="composer-help"
        onInput=${(event) => (setText(event.target.value), (sending.current = null))}
        onKeyDown=${pressed}
        onPaste=${(event) => attach(event, event.clipboardData?.files)}
      ></textarea>
      ${running &&
      html`<${WhenField} when=${when} choose=${setWhen} />
        <button type="button" class="send stop" disabled=${stopping} aria-label=${stopping ? "Stopping…" : "Stop"} title="Stop, and roll back unfinished calls" onClick=${stop}>
          ${stopping ? html`<span class="spinner"></span>` : html`<${Icon} name="stop" />`}
        </button>
        <${Orders} isPaused=${isPaused} give=${order} />`}
      <button type="submit" class="send" disabled=${(!text.trim() && !files.length) || busy || loading} aria-label=${running ? "Say it" : "Send"} title=${running ? WHEN[when][1] : "Send (Enter)"}><${Icon} name="send" /></button>
    </div>
    <p id="composer-help" class="help">${help(status, running, when)}</p>
  </form>`;
}

function help(status, running, when) {
  if (!running) return "Enter sends, Shift+Enter starts a new line";
  const told = status === "waiting" ? "The model is told after the open question is answered." : WHEN[when][1];
  return `Enter sends. ${told} Escape stops the run`;
}

function newId() {
  return [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(16)).join("-");
}
