// A line for a reason.

import { html, useEffect, useRef, useState } from "./vendor/standalone.js";

/** A line for a reason, sent with Enter and left with Escape. */
export function Reason({ label, action, give, back, busy }) {
  const [text, setText] = useState("");
  const field = useRef(null);
  useEffect(() => field.current?.focus(), []);
  return html`<form
    class="reason"
    onSubmit=${(event) => (event.preventDefault(), give(text.trim()))}
    onKeyDown=${(event) => event.key === "Escape" && (event.stopPropagation(), back())}
  >
    <label>${label}<input ref=${field} value=${text} onInput=${(event) => setText(event.target.value)} /></label>
    <button type="submit" class="danger" disabled=${busy}>${action}</button>
    <button type="button" class="quiet" onClick=${back}>Back</button>
  </form>`;
}
