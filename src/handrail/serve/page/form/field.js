// One field of a form: finds out how its schema is filled in, and frames it with its words and errors.

import { html, useLayoutEffect } from "../vendor/standalone.js";
import { ArrayField, MapField, ObjectField, TupleField, UnionField } from "./groups.js";
import { BooleanInput, ChoiceInput, JsonInput, NumberInput, TextInput } from "./inputs.js";
import { DateTimeInput } from "./moments.js";
import { kindsOf, optionsOf, resolved, shapeOf, shown } from "./schema.js";

const MOST_DEEP = 12; // values in each other before a form asks for JSON instead

/**
 * @param {{form: object, schema: object, path: string, label: string, required: boolean, value: any,
 *   onChange: (value: any) => void, top?: boolean, without?: string}} props
 *   `top`: this is the whole form. `without`: a property not to be shown, since a chooser stands for it.
 */
export function Field({ form, schema, path, label, required, value, onChange, top, without }) {
  const found = resolved(schema, form.root);
  const { kinds, nullable, discriminator } = kindsOf(found, form.root);
  const change = (next) => edit(form, path, () => onChange(next));
  const given = Object.hasOwn(found, "default");
  const words = {
    form, path, label, value, top, without, nullable, discriminator,
    onChange: change,
    required,
    optional: nullable || !required,
    default: given ? found.default : undefined,
    // What the field holds when it is cleared: left out, unless null says more.
    empty: nullable && (required || given) ? null : undefined,
    id: idOf(form, path),
    errors: form.errorsAt(path),
  };
  if (kinds.length === 0) return html`<${Frame} ...${words}><p class="field-fixed" data-path=${path}>Nothing to fill in.</p><//>`;
  if (kinds.length > 1) return html`<${UnionField} ...${words} kinds=${kinds} hint=${found.description} />`;
  const kind = kinds[0];
  const Shape = shapeFor(kind, words);
  return html`<${Shape} ...${words} kind=${kind} hint=${found.description ?? kind.description} />`;
}

/** A change goes up through all that holds the field; the field itself is what was edited. */
function edit(form, path, change) {
  if (form.inner.changing) {
    change();
    return;
  }
  form.edited(path);
  form.inner.changing = true;
  try {
    change();
  } finally {
    form.inner.changing = false;
  }
}

function shapeFor(kind, { path, optional }) {
  const shape = shapeOf(kind);
  if (path.split("/").length > MOST_DEEP && ["object", "array", "map", "tuple"].includes(shape)) return JsonInput;
  if (shape === "const") return optional ? ChoiceInput : Fixed;
  if (shape === "string" && kind.format === "date-time") return DateTimeInput;
  return SHAPES[shape];
}

const SHAPES = {
  choice: ChoiceInput, string: TextInput, integer: NumberInput, number: NumberInput, boolean: BooleanInput,
  object: ObjectField, array: ArrayField, tuple: TupleField, map: MapField, json: JsonInput,
};

/** A value there is no choice about. */
function Fixed(props) {
  return html`<${Frame} ...${props}><p class="field-fixed" id=${props.id}>${shown(optionsOf(props.kind)[0])}</p><//>`;
}

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

/** The same around several inputs. */
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

/** What every input says of itself to those who do not see it. */
export function aria(props) {
  return {
    id: props.id,
    "aria-describedby": describedBy(props),
    "aria-invalid": props.errors.length ? "true" : undefined,
    "aria-required": props.optional ? undefined : "true",
  };
}

/**
 * Hold the form back while what is typed in this field stands for nothing.
 * @returns the errors to show, with this one where it is time to
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
