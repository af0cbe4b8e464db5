// Inputs for a single value.

import { html, useState } from "../vendor/standalone.js";
import { aria, Errors, Frame, GroupFrame, useBlock } from "./frame.js";
import { optionsOf, shown } from "./schema.js";

const LONG = 200; // a text with at least this maximum length gets several lines
const MOST_RADIOS = 4;

const INPUT_TYPES = { email: "email", uri: "url", date: "date", time: "time", password: "password" };

/** Text, on one line or several, depending on its schema. */
export function TextInput(props) {
  const { kind, form, path, value, empty, onChange } = props;
  const text = typeof value === "string" ? value : value === undefined || value === null ? "" : JSON.stringify(value);
  const secret = kind.writeOnly || kind.format === "password";
  const [tall] = useState(() => !secret && (kind.format === "textarea" || (kind.maxLength ?? 0) >= LONG || text.length > 80 || text.includes("\n")));
  const cleared = props.default === "" ? "" : empty;
  const common = {
    ...aria(props),
    value: text,
    placeholder: placeholder(props),
    onInput: (event) => onChange(event.target.value === "" ? cleared : event.target.value),
    onBlur: () => form.touch(path),
  };
  if (tall) return html`<${Frame} ...${props}><textarea class="input" rows="4" onKeyDown=${sendOnEnter} ...${common}></textarea><//>`;
  const type = secret ? "password" : (INPUT_TYPES[kind.format] ?? "text");
  return html`<${Frame} ...${props}>
    <input class=${`input is-${type}`} type=${type} step=${type === "time" ? "1" : undefined} autocomplete=${secret ? "new-password" : "off"}
      spellcheck=${kind.format ? "false" : undefined} ...${common} />
  <//>`;
}

/** Ctrl+Enter or Command+Enter submits; Enter alone starts a new line. */
export function sendOnEnter(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
}

function placeholder({ kind, default: given }) {
  if (given !== undefined && given !== null && given !== "") return `Default: ${shown(given)}`;
  const example = kind.examples?.[0];
  if (example !== undefined) return shown(example);
  return { uuid: "123e4567-e89b-12d3-a456-426614174000", duration: "PT1H30M", uri: "https://…", email: "name@example.org" }[kind.format];
}

const WHOLE = /^[+-]?\d+$/;
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;

/** Parses a number. Returns null if the text is not a finite number, or is a whole number that can't be sent exactly. */
function numberIn(text, type) {
  if (!(type === "integer" ? WHOLE : NUMBER).test(text)) return null;
  const number = Number(text);
  if (!Number.isFinite(number) || (WHOLE.test(text) && !Number.isSafeInteger(number))) return null;
  return number;
}

/** A number, edited as text so that no input is lost. The arrow keys step it. */
export function NumberInput(props) {
  const { kind, form, path, value, empty, onChange } = props;
  const [typed, setTyped] = useState(() => plain(value));
  const read = (text) => (text.trim() === "" ? empty : (numberIn(text.trim(), kind.type) ?? text));
  const text = same(read(typed), value) ? typed : plain(value);
  const bad = typeof value === "string" ? (kind.type === "integer" ? wholeWords(value) : "a number, such as 2.5") : null;
  const errors = useBlock(props, bad);
  const set = (next) => {
    setTyped(next);
    onChange(read(next));
  };
  const step = (event) => {
    const way = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (!way || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    set(String(stepped(kind, typeof value === "number" ? value : (props.default ?? null), way)));
  };
  const told = { ...props, errors, hint: [props.hint, bounds(kind)].filter(Boolean).join(" ") || undefined };
  return html`<${Frame} ...${told}>
    <input class="input is-number" type="text" inputmode=${kind.type === "integer" ? "numeric" : "decimal"} autocomplete="off"
      role="spinbutton" aria-valuenow=${typeof value === "number" ? value : undefined} aria-valuemin=${kind.minimum} aria-valuemax=${kind.maximum}
      ...${aria(told)} value=${text} placeholder=${placeholder(props)} onKeyDown=${step}
      onInput=${(event) => set(event.target.value)} onBlur=${() => form.touch(path)} />
  <//>`;
}

function wholeWords(text) {
  return WHOLE.test(text.trim()) ? "a whole number of at most 15 digits" : "a whole number, such as 3";
}

function plain(value) {
  return value === undefined || value === null ? "" : String(value);
}

function same(a, b) {
  return a === b || ((a ?? null) === null && (b ?? null) === null);
}

function bounds({ type, minimum, maximum, exclusiveMinimum, exclusiveMaximum }) {
  const low = minimum ?? (exclusiveMinimum !== undefined && type === "integer" ? exclusiveMinimum + 1 : undefined);
  const high = maximum ?? (exclusiveMaximum !== undefined && type === "integer" ? exclusiveMaximum - 1 : undefined);
  if (low !== undefined && high !== undefined) return `From ${low} to ${high}.`;
  if (low !== undefined) return `At least ${low}.`;
  if (high !== undefined) return `At most ${high}.`;
  if (exclusiveMinimum !== undefined) return `More than ${exclusiveMinimum}.`;
  return exclusiveMaximum === undefined ? "" : `Less than ${exclusiveMaximum}.`;
}

function stepped(kind, from, way) {
  const step = kind.multipleOf ?? 1;
  const low = kind.minimum ?? -Infinity;
  const high = kind.maximum ?? Infinity;
  const next = typeof from === "number" ? Math.round((from + way * step) * 1e9) / 1e9 : Math.max(low, Math.min(high, 0));
  return Math.max(low, Math.min(high, next));
}

/** A checkbox if there is a default and no third value. Otherwise a choice, so that nobody answers by doing nothing. */
export function BooleanInput(props) {
  if (typeof props.default !== "boolean" || props.optional && props.nullable) return html`<${Choice} ...${props} options=${[true, false]} />`;
  const { path, id, label, hint, value, errors, onChange } = props;
  return html`<div class="field is-check" data-path=${path}>
    <label class="check"><input type="checkbox" ...${aria({ ...props, optional: true })} checked=${value === undefined ? props.default : value === true}
      onChange=${(event) => onChange(event.target.checked)} /><span>${label}</span></label>
    ${hint && html`<p class="field-hint" id=${`${id}-hint`}>${hint}</p>`}
    <${Errors} id=${id} errors=${errors} />
  </div>`;
}

/** One of several values: radio buttons for a few, a list for many. */
export function ChoiceInput(props) {
  return html`<${Choice} ...${props} options=${optionsOf(props.kind)} />`;
}

function Choice(props) {
  const { options, path, id, value, empty, optional, default: given, form, onChange } = props;
  const canBeLeft = optional && !(given !== undefined && given !== null);
  const held = value === undefined && given !== undefined ? given : value;
  const chosen = held === undefined || held === null ? -1 : options.findIndex((option) => option === held);
  const choose = (at) => onChange(at < 0 ? empty : options[at]);
  const left = props.nullable ? "None" : "Not set";
  if (options.length > MOST_RADIOS) {
    return html`<${Frame} ...${props}>
      <select class="input" ...${aria(props)} value=${String(chosen)} onBlur=${() => form.touch(path)} onChange=${(event) => choose(Number(event.target.value))}>
        ${(canBeLeft || chosen < 0) && html`<option value="-1" disabled=${!canBeLeft}>${canBeLeft ? left : "Choose…"}</option>`}
        ${options.map((option, at) => html`<option value=${String(at)}>${shown(option)}</option>`)}
      </select>
    <//>`;
  }
  const radio = (at, words) => html`<label class="radio"><input type="radio" name=${id} checked=${chosen === at} onChange=${() => choose(at)} /><span>${words}</span></label>`;
  return html`<${GroupFrame} ...${props} role="radiogroup" className="is-choice">
    <div class="radios">${options.map((option, at) => radio(at, shown(option)))}${canBeLeft && radio(-1, left)}</div>
  <//>`;
}

/** A text field for JSON, for values that can't be shown as fields. */
export function JsonInput(props) {
  const { form, path, value, empty, onChange } = props;
  const [typed, setTyped] = useState(() => (value === undefined || (value === null && props.default === null) ? "" : JSON.stringify(value, null, 2)));
  const problem = typed.trim() === "" ? null : parseProblem(typed);
  const errors = useBlock(props, problem);
  const set = (text) => {
    setTyped(text);
    if (text.trim() === "") onChange(empty);
    else if (!parseProblem(text)) onChange(JSON.parse(text));
  };
  const told = { ...props, errors, hint: props.hint ?? "As JSON: text in double quotes, a number, [a list], {an object}." };
  return html`<${Frame} ...${told}>
    <textarea class="input is-code" rows="4" spellcheck="false" ...${aria(told)} value=${typed} onKeyDown=${sendOnEnter}
      onInput=${(event) => set(event.target.value)} onBlur=${() => form.touch(path)}></textarea>
  <//>`;
}

function parseProblem(text) {
  try {
    JSON.parse(text);
    return null;
  } catch (error) {
    return `this is not valid JSON: ${error.message}`;
  }
}

// -- moments --------------------------------------------------------------------------------------------

const MOMENT = /^(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d(?::\d\d)?)(?:\.\d+)?(Z|[+-]\d\d:?\d\d)?$/i;

/**
 * A date and time with a UTC offset, unless the person chooses none. Without an offset, it would mean a different moment
 * in another time zone.
 */
export function DateTimeInput(props) {
  const { form, path, id, label, value, empty, onChange } = props;
  const found = MOMENT.exec(typeof value === "string" ? value : "");
  const local = found ? `${found[1]}T${found[2]}` : "";
  const [zone, setZone] = useState(() => (found ? zoneOf(found[3], local) : "yours"));
  const give = (moment, chosen) => onChange(moment ? `${moment.length === 16 ? `${moment}:00` : moment}${offsetIn(chosen, moment)}` : empty);
  return html`<${GroupFrame} ...${props} className="is-moment">
    <div class="moment">
      <input class="input" type="datetime-local" step=${/T\d\d:\d\d:\d\d/.test(local) && !local.endsWith(":00") ? "1" : undefined} ...${aria(props)}
        id=${`${id}-moment`} aria-label=${label} value=${local} onInput=${(event) => give(event.target.value, zone)} onBlur=${() => form.touch(path)} />
      <select class="input" aria-label=${`${label}: time zone`} value=${zone} onChange=${(event) => {
        setZone(event.target.value);
        give(local, event.target.value);
      }}>
        <option value="yours">your time (${offsetIn("yours", local)})</option>
        <option value="Z">UTC</option>
        <option value="">no time zone</option>
        ${!["yours", "Z", ""].includes(zone) && html`<option value=${zone}>${zone}</option>`}
      </select>
    </div>
  <//>`;
}

function zoneOf(offset, local) {
  if (!offset) return "";
  if (/^z$/i.test(offset)) return "Z";
  return offset === offsetIn("yours", local) ? "yours" : offset;
}

/** The text after a moment: for "yours" the UTC offset in the page's time zone, such as "+02:00", or else `zone` itself. */
function offsetIn(zone, moment) {
  if (zone !== "yours") return zone;
  const minutes = -(moment ? new Date(moment) : new Date()).getTimezoneOffset();
  const parts = [Math.floor(Math.abs(minutes) / 60), Math.abs(minutes) % 60].map((part) => String(part).padStart(2, "0"));
  return `${minutes < 0 ? "-" : "+"}${parts.join(":")}`;
}
