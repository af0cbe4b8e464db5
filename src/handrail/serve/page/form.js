// A form for a JSON Schema that pydantic generated.
//
// Input is kept as the JSON value that it represents. Text that is not a number yet stays text, so that nothing is
// lost and validation can report it.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/standalone.js";
import { Field } from "./form/field.js";
import { initial, isObject, kindsOf, resolved, shapeOf } from "./form/schema.js";
import { validate } from "./validate.js";

const MISSING = "a value is required";
let forms = 0;

/**
 * @param {{
 *   schema: object, value?: any, errors?: {path: string, message: string}[],
 *   onSubmit: (value: any) => void, onChange?: (value: any) => void,
 *   submitLabel?: string, secondary?: any, label?: string, disabled?: boolean,
 * }} props
 *   `value` is the initial value, such as a draft. `errors` are the server's: they are shown beside
 *   their fields until those are edited. `secondary` is shown beside the submit button.
 *   `label` names a form that is a single field.
 */
export function SchemaForm({ schema, value, errors = [], onSubmit, onChange, submitLabel = "Send", secondary, label, disabled }) {
  const root = useRef(null);
  const [uid] = useState(() => `form${(forms += 1)}`);
  const [held, setHeld] = useState(() => (value === undefined ? initial(schema, schema) : value));
  const [submitted, setSubmitted] = useState(false);
  const [touched, setTouched] = useState(() => new Set());
  const blocks = useRef(new Map()).current;
  const server = useServerErrors(errors);
  const toFocus = useRef(false);
  const inner = useRef({ changing: false }).current;

  const problems = submitted || touched.size ? validate(schema, held) : [];
  const form = {
    root: schema,
    uid,
    blocks,
    showing: (path) => submitted || touched.has(path),
    touch: (path) => touched.has(path) || setTouched(new Set(touched).add(path)),
    edited: server.edited,
    inner,
    errorsAt: (path) => {
      const own = form.showing(path) ? problems.filter((one) => one.path === path && (submitted || one.message !== MISSING)) : [];
      return [...own, ...server.open.filter((one) => one.path === path)].map((one) => one.message);
    },
  };
  const change = (next) => {
    setHeld(() => next);
    onChange?.(next);
  };
  const submit = (event) => {
    event.preventDefault();
    if (disabled) return;
    const sent = held === undefined ? undefined : JSON.parse(JSON.stringify(held));
    if (validate(schema, held).length || blocks.size) {
      toFocus.current = !submitted; // on the first submission, the focus moves after the errors are rendered
      setSubmitted(true);
      if (submitted) focusFirst(root.current);
    } else {
      server.forget();
      onSubmit(sent);
    }
  };
  useEffect(() => {
    if (toFocus.current || server.arrived()) focusFirst(root.current);
    toFocus.current = false;
  });
  const stray = useStray(root, server.open);
  const wrong = submitted ? new Set([...problems.map((one) => one.path), ...blocks.keys()]).size : 0;
  return html`<form class="schema-form" ref=${root} onSubmit=${submit} novalidate>
    <div role="alert" class="form-alerts">
      ${wrong > 0 && html`<p class="form-alert">${wrong === 1 ? "One field needs to be corrected." : `${wrong} fields need to be corrected.`}</p>`}
      ${stray.map((one) => html`<p class="form-alert">${one.path && html`<span class="form-where">${inWords(one.path)}: </span>`}${one.message}</p>`)}
    </div>
    <${Field} form=${form} schema=${schema} path="" label=${label ?? topLabel(schema)} required=${true} value=${held} onChange=${change} top=${true} />
    <div class="form-actions">
      <button type="submit" class="primary" disabled=${disabled}>${submitLabel}</button>
      ${secondary}
    </div>
  </form>`;
}

/**
 * The server's errors. Each is kept until its field, or a parent or child of the field, is edited. An error of the whole
 * value is kept even if a field in it is edited.
 */
function useServerErrors(errors) {
  const key = JSON.stringify(errors);
  const seen = useRef({ key: "[]", edited: new Set(), focused: "[]" }).current;
  if (seen.key !== key) {
    seen.key = key;
    seen.edited = new Set();
  }
  const near = (path) => [...seen.edited].some((one) => path === one || path.startsWith(`${one}/`) || (path && one.startsWith(`${path}/`)));
  return {
    open: errors.filter((one) => !near(one.path)),
    edited: (path) => seen.edited.add(path),
    forget: () => {
      seen.focused = "[]"; // if the same errors come again, they count as new
    },
    arrived: () => {
      const news = seen.focused !== key && errors.length > 0;
      seen.focused = key;
      return news;
    },
  };
}

/** Errors whose path belongs to no field. They are shown above the form. */
function useStray(root, errors) {
  const [stray, setStray] = useState([]);
  const key = JSON.stringify(errors);
  useLayoutEffect(() => {
    const paths = new Set([...root.current.querySelectorAll("[data-path]")].map((one) => one.dataset.path));
    const found = errors.filter((one) => !paths.has(one.path));
    if (JSON.stringify(found) !== JSON.stringify(stray)) setStray(found);
  });
  return key === "[]" ? [] : stray;
}

function focusFirst(root) {
  const bad = root?.querySelector('[aria-invalid="true"]');
  if (!bad) return;
  const into = bad.matches("input, select, textarea") ? bad : (bad.querySelector("input, select, textarea, button") ?? bad);
  into.focus();
}

function topLabel(schema) {
  const found = resolved(schema, schema);
  const { kinds } = kindsOf(found, schema);
  const shape = kinds.length === 1 ? shapeOf(kinds[0]) : "";
  return found.title ?? (shape === "object" && isObject(found.properties) ? "" : "Answer");
}

/** A JSON pointer as people read it: "/to/0/street" becomes "to, 1, street". */
function inWords(path) {
  return path
    .split("/")
    .slice(1)
    .map((step) => (/^\d+$/.test(step) ? String(Number(step) + 1) : step.replaceAll("~1", "/").replaceAll("~0", "~")))
    .join(", ");
}
