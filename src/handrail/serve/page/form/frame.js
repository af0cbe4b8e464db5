// The parts around every input: label, hint, errors, and attributes for assistive technology.

import { html, useLayoutEffect } from "../vendor/standalone.js";

/** Label, hint and errors around a single input. */
export function Frame({ path, id, label, hint, optional, errors, children, foot }) {
  return html`<div class=${`field ${errors.length ? "is-bad" : ""}`} data-path=${path}>
    <label class="field-label" for=${id}>${label}${optional && html` <${Optional} />`}</label>
    ${hint && html`<p class="field-hint" id=${`${id}-hint`}>${hint}</p>`}
    ${children}
    <${Errors} id=${id} errors=${errors} />
    ${foot}
  </div>`;
}

/** Label, hint and errors around a group of inputs. */
export function GroupFrame({ path, id, label, hint, optional, errors, children, className = "", role, tools }) {
  return html`<fieldset class=${`field-group ${className} ${errors.length ? "is-bad" : ""}`} role=${role} data-path=${path} id=${id}
      aria-invalid=${errors.length ? "true" : undefined} aria-describedby=${describedBy({ id, hint, errors })}>
    ${label && html`<legend class="field-label">${label}${optional && html` <${Optional} />`}</legend>`}
    ${tools}
    ${hint && html`<p class="field-hint" id=${`${id}-hint`}>${hint}</p>`}
    ${children}
    <${Errors} id=${id} errors=${errors} />
  </fieldset>`;
}

function Optional() {
  return html`<span class="field-optional">optional</span>`;
}

export function Errors({ id, errors }) {
  return html`<div id=${`${id}-error`} class="field-errors">
    ${[...new Set(errors)].map((message) => html`<p class="field-error"><span aria-hidden="true">▲ </span>${sentence(message)}</p>`)}
  </div>`;
}

function sentence(words) {
  return words.charAt(0).toUpperCase() + words.slice(1);
}

export function describedBy({ id, hint, errors }) {
  return [hint && `${id}-hint`, errors.length && `${id}-error`].filter(Boolean).join(" ") || undefined;
}

/** The id and the ARIA attributes of an input. */
export function aria(props) {
  return {
    id: props.id,
    "aria-describedby": describedBy(props),
    "aria-invalid": props.errors.length ? "true" : undefined,
    "aria-required": props.optional ? undefined : "true",
  };
}

/**
 * Blocks submitting while this field's input is invalid.
 * @returns the errors to show
 */
export function useBlock({ form, path, errors }, message) {
  useLayoutEffect(() => {
    if (message) form.blocks.set(path, message);
    else form.blocks.delete(path);
    return () => form.blocks.delete(path);
  }, [path, message]);
  return message && form.showing(path) ? [message] : errors;
}

export function idOf(form, path) {
  return `${form.uid}${path.replace(/[^A-Za-z0-9]/g, (found) => (found === "/" ? "-" : `_${found.codePointAt(0)}`))}`;
}
