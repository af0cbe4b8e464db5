// The arguments of a call as names and values, also while they are being written.

import { drawnFor } from "./hooks.js";
import { partial } from "./partial.js";
import { html } from "./vendor/standalone.js";

export const Arguments = drawnFor(
  ({ text, writing }) => [text, writing],
  ({ text, writing }) => {
    const value = partial(text || "{}");
    if (value === undefined || value === null || typeof value !== "object" || Array.isArray(value)) {
      return text ? html`<pre class="raw">${text}</pre>` : null;
    }
    return html`<${Values} value=${value} writing=${writing} />`;
  },
);

/** An object as names and values. Long values scroll. */
export function Values({ value, writing = false }) {
  const pairs = Object.entries(value);
  if (!pairs.length) return null;
  return html`<dl class=${`values${writing ? " writing" : ""}`}>
    ${pairs.map(
      ([name, each]) => html`<div key=${name}>
        <dt>${name}</dt>
        <dd class=${typeof each}>${said(each)}</dd>
      </div>`,
    )}
  </dl>`;
}

function said(value) {
  if (typeof value === "string") return value;
  const flat = JSON.stringify(value);
  return flat.length > 60 && typeof value === "object" ? JSON.stringify(value, null, 2) : flat;
}
