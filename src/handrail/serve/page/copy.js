// A button that copies a text.

import { html, useState } from "./vendor/standalone.js";

/** A button that copies a text. `what` names it for screen readers, if it is not the code beside the button. */
export function Copy({ text, what = "" }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard?.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`<button type="button" class="quiet small" aria-label=${what && `Copy ${what}`} onClick=${copy}>${copied ? "Copied" : "Copy"}</button>`;
}
