// Renderers of questions. A question is shown by the renderer that is registered for its name (the first argument of
// `wait_for`, or the handoff's name). If there is none, it is shown as a form that is generated from its schema.
//
// An app's own renderers are in a module that is served as app/renderers.js:
//
//     import { html, register } from "../assets/renderers.js";
//     register("pick_colour", ({ question, submit }) => html`<button onClick=${() => submit("red")}>Red</button>`);

import { html, useErrorBoundary, useLayoutEffect, useRef, useState } from "./vendor/standalone.js";
import { SchemaForm } from "./form.js";
import { kindsOf, optionsOf } from "./form/schema.js";

export { html, useEffect, useMemo, useRef, useState } from "./vendor/standalone.js";
export { DiffView } from "./diff.js";
export { SchemaForm };

/**
 * @typedef {{
 *   question: object, submit: (value: any) => void, decline: (reason?: string) => void,
 *   errors: {path: string, message: string}[], draft: any, onDraft: (value: any) => void, busy?: boolean,
 * }} RendererProps
 *   `errors` are the server's errors for the last answer. `draft` is the last value that was passed to `onDraft`.
 */

const registered = new Map();
const guarded = new Map();

/** Registers the component that shows the questions with this name. It replaces an earlier one. */
export function register(kind, Component) {
  if (typeof kind !== "string" || !kind) throw new TypeError("register(kind, Component): `kind` must be the name that is passed to wait_for, such as \"pick_colour\"");
  if (typeof Component !== "function") throw new TypeError(`register("${kind}", Component): \`Component\` must be a function that takes {question, submit, …} and returns html\`…\``);
  registered.set(kind, Component);
  guarded.delete(kind);
}

/**
 * The component for questions with this name, or null for a form. It stays the same until another one is
 * registered, so that its input is kept.
 * @returns {((props: RendererProps) => any)|null}
 */
export function rendererFor(kind) {
  const Component = registered.get(kind);
  if (!Component) return null;
  if (!guarded.has(kind)) guarded.set(kind, guard(kind, Component));
  return guarded.get(kind);
}

/** Import an app's own renderers. Returns null, or the error message. */
export async function loadRenderers(address) {
  try {
    await import(address);
    return null;
  } catch (error) {
    console.error(error);
    return `The app's own renderers (${address}) could not be loaded: ${error.message}. Questions are shown as forms instead.`;
  }
}

/** Wraps a renderer. If it throws, the form is shown instead. */
function guard(kind, Component) {
  return function Guarded(props) {
    const [error] = useErrorBoundary((thrown) => console.error(`the renderer for "${kind}" failed:`, thrown));
    if (!error) return html`<${Component} ...${props} />`;
    return html`<div class="renderer-failed">
      <p class="renderer-note" role="status">The app's own renderer for this question failed (${String(error?.message ?? error)}), so the question is shown as a form.</p>
      <${QuestionForm} ...${props} />
    </div>`;
  };
}

/** The form for questions without a renderer. */
export function QuestionForm({ question, submit, decline, errors, draft, onDraft, busy }) {
  if (isYesOrNo(question.schema)) {
    return html`<div class="question-form choices">
      <button type="button" class="primary" disabled=${busy} onClick=${() => submit(true)}>Yes</button>
      <button type="button" disabled=${busy} onClick=${() => submit(false)}>No</button>
      ${decline && html`<span class="more-choices"><${Decline} decline=${decline} busy=${busy} /></span>`}
      ${(errors ?? []).map(({ message }) => html`<p class="field-error" role="alert">${message}</p>`)}
    </div>`;
  }
  return html`<div class="question-form">
    <${SchemaForm} schema=${question.schema ?? {}} value=${draft} errors=${errors ?? []} onSubmit=${submit} onChange=${onDraft}
      disabled=${busy} secondary=${decline && html`<${Decline} decline=${decline} busy=${busy} />`} />
  </div>`;
}

/** Whether the whole answer is yes or no. */
function isYesOrNo(schema) {
  const { kinds, nullable } = kindsOf(schema ?? {}, schema ?? {});
  return !nullable && kinds.length === 1 && kinds[0].type === "boolean" && !optionsOf(kinds[0]);
}

/** A button that declines a question, with an optional reason. */
export function Decline({ decline, busy }) {
  const [open, setOpen] = useState(false);
  const [reason, setReason] = useState("");
  const field = useRef(null);
  useLayoutEffect(() => field.current?.focus(), [open]); // at once, because a key may follow immediately
  if (!open) return html`<button type="button" class="quiet small" disabled=${busy} onClick=${() => setOpen(true)}>Decline…</button>`;
  const send = () => decline(reason.trim() || undefined);
  const key = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      setOpen(false);
    } else if (event.key === "Enter") {
      event.preventDefault(); // Enter would submit the form
      send();
    }
  };
  return html`<span class="decline" role="group" aria-label="Decline" onKeyDown=${key}>
    <input class="input" type="text" aria-label="Reason (optional)" placeholder="Reason (optional)" value=${reason}
      ref=${field} onInput=${(event) => setReason(event.target.value)} />
    <button type="button" class="small" disabled=${busy} onClick=${send}>Decline</button>
    <button type="button" class="quiet small" onClick=${() => setOpen(false)}>Back</button>
  </span>`;
}
