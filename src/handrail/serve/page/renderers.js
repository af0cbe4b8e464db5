// Who shows a question: the renderer registered for its kind (the first argument of `wait_for`, or the
// handoff's name), else a form made from its schema.
//
// An app's own renderers are one module, served as /app/renderers.js:
//
//     import { html, register } from "/assets/renderers.js";
//     register("pick_colour", ({ question, submit }) => html`<button onClick=${() => submit("red")}>Red</button>`);

import { html, useErrorBoundary, useLayoutEffect, useRef, useState } from "./vendor/standalone.js";
import { SchemaForm } from "./form.js";

export { html, useEffect, useMemo, useRef, useState } from "./vendor/standalone.js";
export { DiffView } from "./diff.js";
export { SchemaForm };

/**
 * @typedef {{
 *   question: object, submit: (value: any) => void, decline: (reason?: string) => void,
 *   errors: {path: string, message: string}[], draft: any, onDraft: (value: any) => void, busy?: boolean,
 * }} RendererProps
 *   `errors` are what the server says of the last answer; `draft` is what `onDraft` was last given.
 */

const registered = new Map();
const guarded = new Map();

/** Have questions of this kind shown by this component. The last one registered counts. */
export function register(kind, Component) {
  if (typeof kind !== "string" || !kind) throw new TypeError("register(kind, Component): the kind is the name that wait_for gives, such as \"pick_colour\"");
  if (typeof Component !== "function") throw new TypeError(`register("${kind}", Component): a function that gets {question, submit, …} and returns html\`…\``);
  registered.set(kind, Component);
  guarded.delete(kind);
}

/**
 * The component that shows questions of this kind, or null where a form does. It is the same one as long as
 * nothing is registered anew, so that what is typed in it stays.
 * @returns {((props: RendererProps) => any)|null}
 */
export function rendererFor(kind) {
  const Component = registered.get(kind);
  if (!Component) return null;
  if (!guarded.has(kind)) guarded.set(kind, guard(kind, Component));
  return guarded.get(kind);
}

/** Import an app's own renderers. Gives null, or the words to show where that failed. */
export async function loadRenderers(address) {
  try {
    await import(address);
    return null;
  } catch (error) {
    console.error(error);
    return `The app's own renderers (${address}) did not load: ${error.message}. Questions are shown as forms.`;
  }
}

/** A renderer that throws does not take the question with it: the form stands in. */
function guard(kind, Component) {
  return function Guarded(props) {
    const [error] = useErrorBoundary((thrown) => console.error(`the renderer for "${kind}" failed:`, thrown));
    if (!error) return html`<${Component} ...${props} />`;
    return html`<div class="renderer-failed">
      <p class="renderer-note" role="status">The page's own view of this question failed (${String(error?.message ?? error)}), so here it is as a form.</p>
      <${QuestionForm} ...${props} />
    </div>`;
  };
}

/** The form that stands for every kind nobody registered. */
export function QuestionForm({ question, submit, decline, errors, draft, onDraft, busy }) {
  return html`<div class="question-form">
    <${SchemaForm} schema=${question.schema ?? {}} value=${draft} errors=${errors ?? []} onSubmit=${submit} onChange=${onDraft}
      disabled=${busy} secondary=${decline && html`<${Decline} decline=${decline} busy=${busy} />`} />
  </div>`;
}

/** Decline, and say why where one likes to. */
export function Decline({ decline, busy }) {
  const [open, setOpen] = useState(false);
  const [reason, setReason] = useState("");
  const field = useRef(null);
  useLayoutEffect(() => field.current?.focus(), [open]); // at once: a key may follow
  if (!open) return html`<button type="button" class="quiet small" disabled=${busy} onClick=${() => setOpen(true)}>Decline…</button>`;
  const send = () => decline(reason.trim() || undefined);
  const key = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      setOpen(false);
    } else if (event.key === "Enter") {
      event.preventDefault(); // it would send the form
      send();
    }
  };
  return html`<span class="decline" role="group" aria-label="Decline" onKeyDown=${key}>
    <input class="input" type="text" aria-label="Reason, if you like" placeholder="Reason, if you like" value=${reason}
      ref=${field} onInput=${(event) => setReason(event.target.value)} />
    <button type="button" class="small" disabled=${busy} onClick=${send}>Decline</button>
    <button type="button" class="quiet small" onClick=${() => setOpen(false)}>Back</button>
  </span>`;
}
