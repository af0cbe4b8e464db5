// The arguments of a call as names and values, even while the model is writing them. rows.js shows what a person approves.

import { drawnFor } from "./hooks.js";
import { exactly, partial, visible } from "./partial.js";
import { html } from "./vendor/standalone.js";

export const Arguments = drawnFor(
  ({ text, writing }) => [text, writing],
  ({ text, writing }) => {
    const value = partial(text || "{}");
    if (value === undefined || value === null || typeof value !== "object" || Array.isArray(value)) {
      return text ? html`<pre class="raw">${visible(text)}</pre>` : null;
    }
    return html`<${Values} value=${value} writing=${writing} />`;
  },
);

/** An object as names and values. Long values scroll. */
function Values({ value, writing = false }) {
  const pairs = Object.entries(value);
  if (!pairs.length) return null;
  return html`<dl class=${`values${writing ? " writing" : ""}`}>
    ${pairs.map(
      ([name, each]) => html`<div key=${name}>
        <dt>${visible(name)}</dt>
        <dd class=${typeof each} tabindex=${isTall(each) ? 0 : undefined}>${visible(exactly(each))}</dd>
      </div>`,
    )}
  </dl>`;
}

const isTall = (value) => typeof value === "string" && value.length > 500;
