// The message field. Enter sends, Shift+Enter starts a new line, Escape stops an active run. Unsent text is kept.

import { sizeOf } from "./attachments.js";
import { Icon } from "./icons.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/standalone.js";

// Unsent text, by thread.
const typed = new Map();

export function Composer({ id, status, loading, open, say, cancel }) {
  const [text, setText] = useState(typed.get(id) ?? "");
  const [files, setFiles] = useState([]);
  const [busy, setBusy] = useState(false);
  const [stopping, setStopping] = useState(false);
  const [problem, setProblem] = useState(null);
  const field = useRef(null);
  const running = status === "running" || status === "waiting";
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
    if ((!text.trim() && !files.length) || busy || running || loading) return;
    setBusy(true);
    setProblem(null);
    try {
      await say(text.trim(), files);
      setText("");
      setFiles([]);
    } catch (error) {
      setProblem(error.message);
    }
    setBusy(false);
  };
  const stop = async () => {
    setStopping(true);
    try {
      await cancel();
    } catch (error) {
      setProblem(error.message);
      setStopping(false);
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
  return html`<form class="composer" onSubmit=${send} onDragOver=${(event) => event.preventDefault()} onDrop=${(event) => attach(event, event.dataTransfer?.files)}>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${files.length > 0 &&
    html`<ul class="attached" aria-label="Files to send">
      ${files.map((file, at) => html`<li key=${at}>${file.name} (${sizeOf(file.size)}) <button type="button" class="link" aria-label=${`Remove ${file.name}`} onClick=${() => setFiles(files.filter((_, other) => other !== at))}>Remove</button></li>`)}
    </ul>`}
    <div class="field">
      <label class="attach" title="Attach files"><span class="unseen">Attach files</span><span aria-hidden="true">+</span>
        <input type="file" multiple onChange=${(event) => { attach(event, event.target.files); event.target.value = ""; }} />
      </label>
      <label class="unseen" for="composer">Message</label>
      <textarea
        id="composer"
        ref=${field}
        rows="1"
        value=${text}
        placeholder=${open ? "Answer the open question first" : running ? "Running; press Escape to stop" : "Write a message"}
        aria-describedby="composer-help"
        onInput=${(event) => setText(event.target.value)}
        onKeyDown=${pressed}
        onPaste=${(event) => attach(event, event.clipboardData?.files)}
      ></textarea>
      ${running
        ? html`<button type="button" class="send stop" disabled=${stopping} aria-label=${stopping ? "Stopping…" : "Stop"} title="Stop, and roll back unfinished calls" onClick=${stop}>
            ${stopping ? html`<span class="spinner"></span>` : html`<${Icon} name="stop" />`}
          </button>`
        : html`<button type="submit" class="send" disabled=${(!text.trim() && !files.length) || busy || loading} aria-label="Send" title="Send (Enter)"><${Icon} name="send" /></button>`}
    </div>
    <p id="composer-help" class="help">${help(running, open, text)}</p>
  </form>`;
}

function help(running, open, text) {
  if (!running || !text.trim()) return "Enter sends, Shift+Enter starts a new line";
  if (open) return "Your text is kept. Answer the open question, then send it";
  return "Your text is kept. Send it when the run has finished, or press Escape to stop the run";
}
