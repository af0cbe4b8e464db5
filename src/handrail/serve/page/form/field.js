// One field of a form, by its schema: a single input, or a group of fields (objects, lists, mappings, unions).

import { html, useLayoutEffect, useRef, useState } from "../vendor/standalone.js";
import { Frame, GroupFrame, idOf, useBlock } from "./frame.js";
import { BooleanInput, ChoiceInput, DateTimeInput, JsonInput, NumberInput, TextInput } from "./inputs.js";
import {
  below, blank, entriesOf, initial, isObject, kindName, kindOfValue, kindsOf, labelOf, optionsOf, resolved, shapeOf, shown,
} from "./schema.js";

const MOST_DEEP = 12; // beyond this many levels of nesting, the form asks for JSON

/**
 * @param {{form: object, schema: object, path: string, label: string, required: boolean, value: any,
 *   onChange: (value: any) => void, top?: boolean, without?: string}} props
 *   `top`: this is the whole form. `without`: a property to hide, because a chooser sets it.
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
    // A cleared field becomes null if it may be null and is required or has a default. Any other field becomes undefined.
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

/** Propagates a change to all parents. Only the field itself counts as edited. */
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

/** A value that is fixed by the schema. */
function Fixed(props) {
  return html`<${Frame} ...${props}><p class="field-fixed" id=${props.id}>${shown(optionsOf(props.kind)[0])}</p><//>`;
}

// -- groups ---------------------------------------------------------------------------------------------

/** The fields of an object. An optional object is added and removed as a whole. */
function ObjectField(props) {
  const { form, kind, path, label, value, empty, optional, onChange, top, without } = props;
  const there = value !== undefined && value !== null;
  if (optional && !there && !top) return html`<${Absent} ...${props} add=${() => onChange(blank(kind, form.root))} />`;
  const held = isObject(value) ? value : blank(kind, form.root);
  const required = new Set(kind.required ?? []);
  const set = (name, next) => {
    const { [name]: _, ...rest } = held;
    onChange(next === undefined ? rest : inOrder(kind, { ...rest, [name]: next }));
  };
  const fields = Object.entries(kind.properties)
    .filter(([name]) => name !== without)
    .map(([name, inner]) => html`<${Field} key=${name} form=${form} schema=${inner} path=${below(path, name)} label=${labelOf(name, inner)}
      required=${required.has(name)} value=${held[name]} onChange=${(next) => set(name, next)} />`);
  const tools = optional && !top && html`<${Remove} what=${label} remove=${() => onChange(empty)} />`;
  return html`<${GroupFrame} ...${props} optional=${optional && !top} className=${top ? "is-top" : "is-object"} tools=${tools}>
    ${fields.length ? fields : without ? null : html`<p class="field-hint">Nothing to fill in.</p>`}
  <//>`;
}

/** Returns the object with its keys in the order of the schema, so that the value reads like the form. */
function inOrder(kind, value) {
  const names = Object.keys(kind.properties);
  const place = (name) => (names.includes(name) ? names.indexOf(name) : names.length);
  return Object.fromEntries(Object.entries(value).sort(([a], [b]) => place(a) - place(b)));
}

function Absent({ path, id, label, hint, errors, add }) {
  return html`<${GroupFrame} path=${path} id=${id} label=${label} hint=${hint} errors=${errors} optional=${true} className="is-absent">
    <button type="button" class="quiet small" aria-label=${`Add ${label}`} onClick=${add}>Add</button>
  <//>`;
}

function Remove({ what, remove }) {
  return html`<button type="button" class="quiet small field-remove" aria-label=${`Remove ${what}`} onClick=${remove}>Remove</button>`;
}

/** A stable key for each entry, so that its input moves with it. */
function useKeys(length) {
  const keys = useRef({ next: 0, list: [] }).current;
  while (keys.list.length < length) keys.list.push((keys.next += 1));
  keys.list.length = length;
  return keys.list;
}

/** Entries that can be added, removed and moved. Several of a choice become checkboxes. */
function ArrayField(props) {
  const { form, kind, path, label, value, empty, optional, onChange } = props;
  const items = Array.isArray(value) ? value : [];
  const keys = useKeys(items.length);
  const list = useRef(null);
  const [toFocus, setToFocus] = useState(null);
  useLayoutEffect(() => {
    if (!toFocus) return;
    list.current?.querySelector(toFocus)?.focus();
    setToFocus(null);
  }, [toFocus]);
  const inner = resolved(kind.items, form.root);
  // Nothing can be ticked twice, so a list that needs more values than there are is an ordinary one, and so is one that has a value twice.
  const isTicked = optionsOf(inner) && (kind.uniqueItems || ((kind.minItems ?? 0) <= optionsOf(inner).length && new Set(items).size === items.length));
  if (isTicked) return html`<${TickList} ...${props} options=${optionsOf(inner)} items=${items} />`;
  const most = kind.maxItems ?? Infinity;
  const give = (next) => onChange(next.length || !optional ? next : Array.isArray(props.default) ? [] : empty);
  const add = () => {
    give([...items, initial(kind.items, form.root)]);
    setToFocus(`:scope > .entry:nth-child(${items.length + 1}) :is(input, select, textarea, button.quiet)`);
  };
  const remove = (at) => {
    keys.splice(at, 1);
    give(items.toSpliced(at, 1));
    setToFocus(items.length > 1 ? `:scope > .entry:nth-child(${Math.min(at + 1, items.length - 1)}) [data-act=remove]` : ":scope ~ .add-entry");
  };
  const move = (at, to) => {
    const moved = (all) => {
      all.splice(to, 0, ...all.splice(at, 1));
      return all;
    };
    moved(keys);
    give(moved([...items]));
    setToFocus(`:scope > .entry:nth-child(${to + 1}) [data-act=${to < at ? "up" : "down"}]`);
  };
  const set = (at, next) => onChange(items.with(at, next));
  return html`<${GroupFrame} ...${props} className="is-array">
    <ol class="entries" ref=${list}>
      ${items.map((item, at) => html`<${Entry} key=${keys[at]} form=${form} schema=${kind.items} path=${below(path, at)} label=${`${label} ${at + 1}`}
        at=${at} last=${items.length - 1} value=${item} set=${set} remove=${remove} move=${move} />`)}
    </ol>
    ${items.length === 0 && html`<p class="field-hint">None yet.</p>`}
    ${items.length < most && html`<button type="button" class="quiet small add-entry" aria-label=${`Add to ${label}`} onClick=${add}>Add</button>`}
  <//>`;
}

function Entry({ form, schema, path, label, at, last, value, set, remove, move }) {
  const act = (name, words, sign, off, run) => html`<button type="button" class="quiet small entry-tool" data-act=${name} aria-label=${`${words} ${label}`} title=${words}
    aria-disabled=${off ? "true" : undefined} onClick=${() => off || run()}>${sign}</button>`;
  return html`<li class="entry">
    <${Field} form=${form} schema=${schema} path=${path} label=${label} required=${true} value=${value} onChange=${(next) => set(at, next)} />
    <div class="entry-tools">
      ${last > 0 && act("up", "Move up", "↑", at === 0, () => move(at, at - 1))}
      ${last > 0 && act("down", "Move down", "↓", at === last, () => move(at, at + 1))}
      ${act("remove", "Remove", "×", false, () => remove(at))}
    </div>
  </li>`;
}

function TickList(props) {
  const { options, items, optional, empty, onChange } = props;
  const toggle = (option, ticked) => {
    const next = options.filter((one) => (one === option ? ticked : items.includes(one)));
    onChange(next.length || !optional ? next : Array.isArray(props.default) ? [] : empty);
  };
  return html`<${GroupFrame} ...${props} className="is-choice">
    <div class="radios">${options.map((option) => html`<label class="check"><input type="checkbox" checked=${items.includes(option)}
      onChange=${(event) => toggle(option, event.target.checked)} /><span>${shown(option)}</span></label>`)}</div>
  <//>`;
}

/** A list with a schema for each position. */
function TupleField(props) {
  const { form, kind, path, label, value, optional, empty, onChange } = props;
  if (optional && !Array.isArray(value)) return html`<${Absent} ...${props} add=${() => onChange(blank(kind, form.root))} />`;
  const items = Array.isArray(value) ? value : blank(kind, form.root);
  const tools = optional && html`<${Remove} what=${label} remove=${() => onChange(empty)} />`;
  return html`<${GroupFrame} ...${props} className="is-object" tools=${tools}>
    ${kind.prefixItems.map((inner, at) => html`<${Field} key=${at} form=${form} schema=${inner} path=${below(path, at)}
      label=${inner.title ?? `${label} ${at + 1}`} required=${true} value=${items[at]}
      onChange=${(next) => onChange(kind.prefixItems.map((_, place) => (place === at ? next : items[place])))} />`)}
  <//>`;
}

/** Names and values. The rows are kept here, because a name may be empty or a duplicate while it is typed. */
function MapField(props) {
  const { form, kind, path, label, value, empty, optional, onChange } = props;
  const [rows, setRows] = useState(() => Object.entries(isObject(value) ? value : {}).map(([name, held], id) => ({ id, name, held })));
  const list = useRef(null);
  const [added, setAdded] = useState(0);
  useLayoutEffect(() => {
    if (added) list.current?.querySelector(":scope > li:last-child input")?.focus();
  }, [added]);
  const give = (next) => {
    setRows(next);
    const named = Object.fromEntries(next.filter((row) => row.name !== "").map((row) => [row.name, row.held]));
    onChange(next.length || !optional ? named : isObject(props.default) ? {} : empty);
  };
  const add = () => {
    give([...rows, { id: Math.max(-1, ...rows.map((row) => row.id)) + 1, name: "", held: initial(entriesOf(kind), form.root) }]);
    setAdded(added + 1);
  };
  const put = (row, part) => give(rows.map((one) => (one === row ? { ...row, ...part } : one)));
  return html`<${GroupFrame} ...${props} className="is-array">
    <ul class="entries" ref=${list}>
      ${rows.map((row, at) => html`<${MapRow} key=${row.id} form=${form} schema=${entriesOf(kind)} path=${path} row=${row}
        label=${`${label} ${at + 1}`} twice=${rows.some((one) => one !== row && one.name === row.name)} put=${put}
        remove=${() => give(rows.filter((one) => one !== row))} />`)}
    </ul>
    ${rows.length === 0 && html`<p class="field-hint">None yet.</p>`}
    <button type="button" class="quiet small add-entry" aria-label=${`Add to ${label}`} onClick=${add}>Add</button>
  <//>`;
}

function MapRow({ form, schema, path, row, label, twice, put, remove }) {
  const own = `${path}/ name ${row.id}`; // a path for the name field itself, which no value can have
  const problem = row.name === "" ? "a name is required" : twice ? "this name occurs twice" : null;
  const errors = useBlock({ form, path: own, errors: [] }, problem);
  const id = idOf(form, own);
  return html`<li class="entry is-named">
    <${Frame} path=${own} id=${id} label=${`${label}: name`} errors=${errors}>
      <input class="input" type="text" id=${id} autocomplete="off" aria-invalid=${errors.length ? "true" : undefined}
        aria-describedby=${errors.length ? `${id}-error` : undefined} value=${row.name}
        onInput=${(event) => put(row, { name: event.target.value })} onBlur=${() => form.touch(own)} />
    <//>
    <${Field} form=${form} schema=${schema} path=${row.name ? below(path, row.name) : `${own} value`} label=${`${label}: value`} required=${true} value=${row.held}
      onChange=${(held) => put(row, { held })} />
    <div class="entry-tools"><button type="button" class="quiet small entry-tool" aria-label=${`Remove ${label}`} title="Remove" onClick=${remove}>×</button></div>
  </li>`;
}

/** A union: the chosen alternative, then its fields. */
function UnionField(props) {
  const { form, kinds, path, id, label, value, empty, optional, discriminator, onChange } = props;
  const none = value === undefined || value === null;
  const [picked, setPicked] = useState(() => (none ? (optional ? -1 : 0) : kindOfValue(kinds, value, discriminator, form.root)));
  const at = discriminator && !none ? kindOfValue(kinds, value, discriminator, form.root) : picked;
  const pick = (next) => {
    setPicked(next);
    onChange(next < 0 ? empty : blank(kinds[next], form.root));
  };
  const names = kinds.map((kind) => kindName(kind, discriminator, form.root));
  const left = props.nullable ? "None" : "Not set";
  const radio = (place, words) => html`<label class="radio"><input type="radio" name=${`${id}-kind`} checked=${at === place} onChange=${() => pick(place)} /><span>${words}</span></label>`;
  const chooser = kinds.length <= 4
    ? html`<div class="radios" role="radiogroup" aria-label=${`${label || "Answer"}: kind`}>${names.map((name, place) => radio(place, name))}${optional && radio(-1, left)}</div>`
    : html`<select class="input" aria-label=${`${label || "Answer"}: kind`} value=${String(at)} onChange=${(event) => pick(Number(event.target.value))}>
        ${names.map((name, place) => html`<option value=${String(place)}>${name}</option>`)}${optional && html`<option value="-1">${left}</option>`}
      </select>`;
  // The alternative is the same value at the same path, so its field shows the errors.
  const fields = at >= 0 && isObject(kinds[at].properties);
  const frame = { ...props, id: `${id}-union`, errors: at >= 0 ? [] : props.errors };
  return html`<${GroupFrame} ...${frame} className="is-union">
    ${chooser}
    ${at >= 0 && html`<div class="union-body" key=${at}><${Field} form=${form} schema=${kinds[at]} path=${path} label=${fields ? "" : names[at]} required=${true}
      value=${none ? undefined : value} onChange=${onChange} without=${discriminator} top=${fields} /></div>`}
  <//>`;
}
