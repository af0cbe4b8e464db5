// JSON as a tree, whose lists and objects open and close.

import { exactly, partial, visible } from "./partial.js";
import { html, useState } from "./vendor/standalone.js";
import { many } from "./words.js";

const LONGEST = 200_000; // characters of a text that is parsed
const SHORT = 600; // a text with up to this many characters is shown with everything open
const STEP = 100; // entries that are shown at first, and with every click

/** The list or object that a text is, as JSON; null if it is anything else. Numbers that JavaScript would round keep their digits. */
export function treeOf(text) {
  if (text.length > LONGEST || !/^\s*[[{]/.test(text)) return null;
  try {
    JSON.parse(text);
    return partial(text) ?? null;
  } catch {
    return null;
  }
}

/** The entries of a list or an object. `short`: all of them begin open. */
export function Tree({ value, short }) {
  const [most, setMost] = useState(STEP);
  const entries = Object.entries(value);
  const isList = Array.isArray(value);
  return html`<ul class="tree">
    ${entries.slice(0, most).map(([name, each]) => html`<li key=${name}><${Branch} name=${visible(name)} isList=${isList} value=${each} short=${short} /></li>`)}
    ${entries.length > most && html`<li><button type="button" class="link" onClick=${() => setMost(most + STEP)}>${(entries.length - most).toLocaleString("en")} more</button></li>`}
    ${entries.length === 0 && html`<li class="soft">${isList ? "an empty list" : "an empty object"}</li>`}
  </ul>`;
}

function Branch({ name, isList, value, short }) {
  const [open, setOpen] = useState(short);
  const label = html`<span class=${isList ? "soft" : "tree-name"}>${name}</span>`;
  if (value === null || typeof value !== "object") return html`${label} <bdi class=${`tree-value ${value === null ? "null" : typeof value}`}>${visible(exactly(value))}</bdi>`;
  const size = Array.isArray(value) ? many(value.length, "item") : many(Object.keys(value).length, "field");
  return html`<details open=${open} onToggle=${(event) => event.target === event.currentTarget && setOpen(event.currentTarget.open)}>
    <summary>${label} <span class="soft">${size}</span></summary>
    ${open && html`<${Tree} value=${value} short=${short} />`}
  </details>`;
}

export const isShort = (text) => text.length <= SHORT;
