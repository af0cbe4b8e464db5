// Validates a value against the JSON Schemas that pydantic writes, for immediate feedback.
// Unknown keywords are ignored, because the server validates everything again. No DOM.

import { below, entriesOf, isObject, kindOfValue, kindsOf, optionsOf, shown, typeFits } from "./form/schema.js";

/** @typedef {{path: string, message: string}} Problem  `path` is a JSON pointer; "" is the whole value. */

const MOST_DEEP = 60;

/** @returns {Problem[]} empty if no problem is found */
export function validate(schema, value, root = schema) {
  const problems = [];
  check(schema, value, { root, path: "", depth: 0, say: (path, message) => problems.push({ path, message }) });
  return problems;
}

function check(schema, value, at) {
  if (at.depth > MOST_DEEP) return;
  const { kinds, nullable, discriminator } = kindsOf(schema, at.root);
  if (value === null && nullable) return;
  if (value === undefined) {
    at.say(at.path, "a value is required");
    return;
  }
  if (kinds.length === 0) {
    if (value !== null) at.say(at.path, "no value is allowed here");
    return;
  }
  if (kinds.length > 1 && !discriminator) checkUnion(kinds, value, at);
  else checkKind(kinds[kindOfValue(kinds, value, discriminator, at.root)], value, at);
}

/** Accepts a value that matches one alternative. Otherwise reports the problems of the closest one. */
function checkUnion(kinds, value, at) {
  let nearest = null;
  for (const kind of kinds) {
    const found = [];
    checkKind(kind, value, { ...at, say: (path, message) => found.push({ path, message }) });
    if (!found.length) return;
    const off = typeFits(kind.type, value) ? found.length : Infinity;
    if (!nearest || off < nearest.off) nearest = { off, found };
  }
  if (nearest.off === Infinity) at.say(at.path, "this matches none of the allowed types");
  else for (const { path, message } of nearest.found) at.say(path, message);
}

function checkKind(kind, value, at) {
  const options = optionsOf(kind);
  if (options) {
    if (!options.some((option) => same(option, value))) at.say(at.path, `choose one of: ${options.map(shown).join(", ")}`);
    return;
  }
  const type = kind.type ?? (kind.properties ? "object" : undefined);
  if (!CHECKS[type]) return;
  if (!typeFits(type, value)) {
    at.say(at.path, WANTED[type]);
    return;
  }
  CHECKS[type](kind, value, at);
}

const WANTED = {
  string: "some text",
  integer: "a whole number, such as 3",
  number: "a number, such as 2.5",
  boolean: "yes or no",
  array: "a list",
  object: "several fields",
  null: "no value is allowed here",
};

const CHECKS = { string: checkString, integer: checkNumber, number: checkNumber, boolean() {}, array: checkArray, object: checkObject };

function checkString(schema, text, at) {
  const length = [...text].length;
  const { minLength, maxLength, pattern, format } = schema;
  if (typeof minLength === "number" && length < minLength) at.say(at.path, `at least ${counted(minLength, "character")}, this has ${length}`);
  else if (typeof maxLength === "number" && length > maxLength) at.say(at.path, `at most ${counted(maxLength, "character")}, this has ${length}`);
  else if (typeof pattern === "string" && !matches(pattern, text)) at.say(at.path, `this must match ${pattern}`);
  else if (Object.hasOwn(FORMATS, format ?? "") && !FORMATS[format].fits(text)) at.say(at.path, FORMATS[format].words);
}

/** Whether a text matches a pattern. Also true if the pattern can't be used here, or means something else in JavaScript. */
function matches(pattern, text) {
  if (/\[\[|&&|~~|\(\?[^:=!]/.test(pattern)) return true;
  try {
    return new RegExp(pattern, "u").test(text);
  } catch {
    return true;
  }
}

const TIME = /^([01]\d|2[0-3]):[0-5]\d(:[0-5]\d([.,]\d+)?)?(Z|[+-]\d\d:?(\d\d)?)?$/i;
const SECONDS = /^[+-]?(\d+\.?\d*|\.\d+)$/; // a number of seconds since 1970 is also valid
const PERIOD = /^[+-]?P(?=.)(\d+Y)?(\d+M)?(\d+W)?(\d+([.,]\d+)?D)?(T(\d+([.,]\d+)?H)?(\d+([.,]\d+)?M)?(\d+([.,]\d+)?S)?)?$/i;
const DAYS_AND_TIME = /^[+-]?(?=\S)(\d+ ?d(ays?)?,? ?)?(\d+:\d\d(:\d\d(\.\d+)?)?)?$/i;

/** The known formats, each with a liberal check, and a description with an example. */
export const FORMATS = {
  date: { fits: isDate, words: "a date, such as 2026-05-31" },
  time: { fits: (text) => TIME.test(text), words: "a time, such as 14:30" },
  "date-time": { fits: isMoment, words: "a date and time, such as 2026-05-31T14:30:00" },
  email: { fits: (text) => /^[^@\s]+@[^@\s]+\.[^@\s]+$/.test(text), words: "an e-mail address, such as ada@example.org" },
  uri: { fits: (text) => /^[A-Za-z][A-Za-z0-9+.-]*:\S+$/.test(text), words: "an address, such as https://example.org" },
  uuid: {
    fits: (text) => /^(urn:uuid:|\{)?[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}\}?$/i.test(text),
    words: "a UUID, such as 123e4567-e89b-12d3-a456-426614174000",
  },
  duration: {
    fits: (text) => (PERIOD.test(text) && !/^.?PT$/i.test(text)) || DAYS_AND_TIME.test(text),
    words: "a duration, such as PT1H30M",
  },
};

function isMoment(text) {
  if (SECONDS.test(text)) return true;
  return isDate(text.slice(0, 10)) && (text.length === 10 || (/[T _]/i.test(text[10]) && TIME.test(text.slice(11))));
}

function isDate(text) {
  const found = /^(\d{4})-(\d\d)-(\d\d)$/.exec(text);
  if (!found) return false;
  const [year, month, day] = found.slice(1).map(Number);
  const made = new Date(Date.UTC(2000, month - 1, day));
  made.setUTCFullYear(year, month - 1, day);
  return year > 0 && made.getUTCMonth() === month - 1 && made.getUTCDate() === day;
}

function checkNumber(schema, number, at) {
  const bounds = [
    ["minimum", "at least", (bound) => number >= bound],
    ["maximum", "at most", (bound) => number <= bound],
    ["exclusiveMinimum", "more than", (bound) => number > bound],
    ["exclusiveMaximum", "less than", (bound) => number < bound],
  ];
  for (const [key, words, fits] of bounds) {
    const bound = schema[key];
    if (typeof bound === "number" && !fits(bound)) {
      at.say(at.path, `${words} ${bound}`);
      return;
    }
  }
  const step = schema.multipleOf;
  if (typeof step === "number" && step > 0 && Math.abs(number / step - Math.round(number / step)) > 1e-9) at.say(at.path, `a multiple of ${step}`);
}

function checkArray(schema, items, at) {
  const { minItems, maxItems, prefixItems, items: rest } = schema;
  if (typeof minItems === "number" && items.length < minItems) at.say(at.path, `at least ${counted(minItems, "entry", "entries")}, this has ${items.length}`);
  if (typeof maxItems === "number" && items.length > maxItems) at.say(at.path, `at most ${counted(maxItems, "entry", "entries")}, this has ${items.length}`);
  if (schema.uniqueItems && new Set(items.map(canonical)).size < items.length) at.say(at.path, "each entry may occur only once");
  items.forEach((item, index) => {
    const inner = prefixItems?.[index] ?? rest;
    if (isObject(inner)) check(inner, item, deeper(at, index));
  });
}

function checkObject(schema, value, at) {
  const properties = schema.properties ?? {};
  for (const name of schema.required ?? []) {
    if (!Object.hasOwn(value, name) || value[name] === undefined) at.say(below(at.path, name), "a value is required");
  }
  for (const [name, held] of Object.entries(value)) {
    if (held === undefined) continue;
    if (Object.hasOwn(properties, name)) check(properties[name], held, deeper(at, name));
    else if (entriesOf(schema)) check(entriesOf(schema), held, deeper(at, name));
    else if (schema.additionalProperties === false && !schema.patternProperties) at.say(below(at.path, name), "there is no such field");
  }
  const count = Object.keys(value).length;
  if (count < (schema.minProperties ?? 0)) at.say(at.path, `at least ${counted(schema.minProperties, "entry", "entries")}, this has ${count}`);
  if (count > (schema.maxProperties ?? Infinity)) at.say(at.path, `at most ${counted(schema.maxProperties, "entry", "entries")}, this has ${count}`);
}

function deeper(at, step) {
  return { ...at, path: below(at.path, step), depth: at.depth + 1 };
}

function same(a, b) {
  return a === b || canonical(a) === canonical(b);
}

/** Returns canonical JSON, which is equal for equal values, regardless of the order of keys. */
function canonical(value) {
  return JSON.stringify(value, (_, held) => (isObject(held) ? Object.fromEntries(Object.entries(held).sort(([a], [b]) => (a < b ? -1 : 1))) : held));
}

function counted(number, thing, things = `${thing}s`) {
  return `${number} ${number === 1 ? thing : things}`;
}
