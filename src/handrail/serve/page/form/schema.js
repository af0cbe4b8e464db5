// JSON Schema of one field: references, alternatives, labels and defaults. No DOM.

const MOST_STEPS = 100; // references in a row before they count as circular

/**
 * Resolves a schema's references, and an `allOf` of one schema. Keywords beside them take precedence. If the references
 * are circular, returns {}.
 */
export function resolved(schema, root) {
  let found = isObject(schema) ? schema : {};
  for (let step = 0; step < MOST_STEPS; step += 1) {
    if (typeof found.$ref === "string") {
      const { $ref, ...rest } = found;
      found = { ...pointedAt($ref, root), ...rest };
    } else if (Array.isArray(found.allOf) && found.allOf.length === 1) {
      const { allOf, ...rest } = found;
      found = { ...(isObject(allOf[0]) ? allOf[0] : {}), ...rest };
    } else {
      return found;
    }
  }
  return {};
}

function pointedAt(reference, root) {
  if (!reference.startsWith("#")) return {};
  let found = root;
  for (const step of reference.slice(1).split("/").slice(1)) {
    const name = decodeURIComponent(step).replaceAll("~1", "/").replaceAll("~0", "~");
    if (!isObject(found) || !Object.hasOwn(found, name)) return {};
    found = found[name];
  }
  return isObject(found) ? found : {};
}

/**
 * The alternatives of a schema, each resolved, without null.
 * @returns {{kinds: object[], nullable: boolean, discriminator: string|null}}
 */
export function kindsOf(schema, root) {
  const found = resolved(schema, root);
  const of = found.anyOf ?? found.oneOf;
  if (Array.isArray(of)) {
    const { anyOf, oneOf, discriminator, default: _, ...rest } = found;
    const each = of.flatMap((kind) => {
      const inner = resolved(kind, root);
      return inner.anyOf || inner.oneOf ? nested(inner, root) : [inner];
    });
    const kinds = each.filter((kind) => kind.type !== "null");
    return {
      kinds: kinds.map((kind) => ({ ...rest, ...kind, ...own(rest, kinds) })),
      nullable: kinds.length < each.length,
      discriminator: discriminator?.propertyName ?? null,
    };
  }
  if (Array.isArray(found.type)) {
    const names = found.type.filter((name) => name !== "null");
    return {
      kinds: names.map((type) => ({ ...found, type })),
      nullable: names.length < found.type.length,
      discriminator: null,
    };
  }
  if (found.type === "null") return { kinds: [], nullable: true, discriminator: null };
  if (Array.isArray(found.enum) && found.enum.includes(null) && found.enum.length > 1) {
    return { kinds: [{ ...found, enum: found.enum.filter((value) => value !== null) }], nullable: true, discriminator: null };
  }
  return { kinds: [found], nullable: false, discriminator: null };
}

/** The field's title, description and examples, for an alternative that is the only one beside null; {} if there are more. */
function own(rest, kinds) {
  if (kinds.length > 1) return {};
  const { title, description, examples } = rest;
  return Object.fromEntries(Object.entries({ title, description, examples }).filter(([, said]) => said !== undefined));
}

function nested(schema, root) {
  const { kinds, nullable } = kindsOf(schema, root);
  return nullable ? [...kinds, { type: "null" }] : kinds;
}

/** The allowed values, or null if the schema does not list them. */
export function optionsOf(schema) {
  if (Object.hasOwn(schema, "const")) return [schema.const];
  return Array.isArray(schema.enum) ? schema.enum : null;
}

/** The kind of input for a resolved schema. */
export function shapeOf(schema) {
  if (optionsOf(schema)) return Object.hasOwn(schema, "const") || schema.enum.length === 1 ? "const" : "choice";
  const type = schema.type ?? (schema.properties ? "object" : schema.items || schema.prefixItems ? "array" : null);
  if (type === "object") return schema.properties ? "object" : isObject(entriesOf(schema)) ? "map" : "json";
  if (type === "array") {
    if (schema.prefixItems) return "tuple";
    return isObject(schema.items) ? "array" : "json";
  }
  if (["string", "integer", "number", "boolean"].includes(type)) return type;
  return "json";
}

/** The schema of a mapping's values; null if there is none, or if each of several patterns has its own. */
export function entriesOf(schema) {
  if (isObject(schema.additionalProperties)) return schema.additionalProperties;
  const patterns = Object.values(schema.patternProperties ?? {});
  return patterns.length === 1 ? patterns[0] : null;
}

/** The index of the first alternative that fits a value, by discriminator, options, properties or type; 0 if none fits. */
export function kindOfValue(kinds, value, discriminator, root) {
  const fits = (kind) => {
    if (discriminator && isObject(value)) {
      const mark = resolved(kind.properties?.[discriminator] ?? {}, root);
      return (optionsOf(mark) ?? []).includes(value[discriminator]);
    }
    const options = optionsOf(kind);
    if (options) return options.includes(value);
    if (isObject(value) && kind.properties) return Object.keys(value).every((key) => Object.hasOwn(kind.properties, key));
    return typeFits(kind.type, value);
  };
  return Math.max(0, kinds.findIndex(fits));
}

export function typeFits(type, value) {
  if (type === undefined) return true;
  if (type === "object") return isObject(value);
  if (type === "array") return Array.isArray(value);
  if (type === "integer") return Number.isInteger(value);
  if (type === "number") return typeof value === "number" && Number.isFinite(value);
  if (type === "null") return value === null;
  return typeof value === type;
}

/** The name under which people choose an alternative. */
export function kindName(kind, discriminator, root) {
  const mark = discriminator && resolved(kind.properties?.[discriminator] ?? {}, root);
  const said = mark && optionsOf(mark)?.[0];
  if (said !== undefined && said !== null) return humanised(String(said));
  if (kind.title) return kind.title;
  const options = optionsOf(kind);
  if (options) return options.map(shown).join(", ");
  const marks = Object.values(kind.properties ?? {}).map((one) => resolved(one, root)).find((one) => Object.hasOwn(one, "const"));
  if (marks) return humanised(String(marks.const));
  const words = { string: "Text", integer: "Whole number", number: "Number", boolean: "Yes or no", array: "List", object: "Several fields" };
  if (kind.type === "object" && kind.properties) return Object.keys(kind.properties).map(humanised).join(", ") || words.object;
  return FORMAT_NAMES[kind.format] ?? words[kind.type] ?? "Something else";
}

const FORMAT_NAMES = { date: "Date", time: "Time", "date-time": "Date and time", email: "E-mail", uri: "Address", uuid: "UUID", duration: "Duration" };

/** The label of a property: its title, or its name in words if the title is missing or only repeats the name. */
export function labelOf(name, schema) {
  const title = isObject(schema) ? schema.title : undefined;
  if (typeof title === "string" && title && squeezed(title) !== squeezed(name)) return title;
  return humanised(name);
}

function squeezed(text) {
  return text.toLowerCase().replace(/[\s_-]/g, "");
}

export function humanised(name) {
  const words = name.replace(/([a-z0-9])([A-Z])/g, "$1 $2").replace(/[_-]+/g, " ").trim();
  return words ? words[0].toUpperCase() + words.slice(1) : name;
}

/** A value as people read it in a list of options. */
export function shown(value) {
  if (value === true) return "Yes";
  if (value === false) return "No";
  if (value === null) return "Nothing";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/**
 * The initial value of a field: its default. Without one, a required field starts with null if it may be null, and with
 * `blank` otherwise. undefined means no value.
 */
export function initial(schema, root, { required = true, depth = 0 } = {}) {
  const found = resolved(schema, root);
  if (Object.hasOwn(found, "default")) return structuredClone(found.default);
  const { kinds, nullable } = kindsOf(found, root);
  if (nullable) return required ? null : undefined;
  if (!required || kinds.length === 0) return undefined;
  return blank(kinds[0], root, depth);
}

/** The value with which a field of this kind starts: a constant, a group of initial values, or undefined for any other. */
export function blank(kind, root, depth = 0) {
  const shape = shapeOf(kind);
  if (shape === "const") return optionsOf(kind)[0];
  if (shape === "map") return {};
  if (shape === "object" && depth < 8) {
    const value = {};
    const required = new Set(kind.required ?? []);
    for (const [name, inner] of Object.entries(kind.properties)) {
      const begun = initial(inner, root, { required: required.has(name), depth: depth + 1 });
      if (begun !== undefined) value[name] = begun;
    }
    return value;
  }
  if (shape === "tuple") return kind.prefixItems.map((inner) => initial(inner, root, { depth: depth + 1 }));
  if (shape === "array") {
    const least = Math.min(kind.uniqueItems || optionsOf(resolved(kind.items, root)) ? 0 : (kind.minItems ?? 0), 20);
    return Array.from({ length: least }, () => initial(kind.items, root, { depth: depth + 1 }));
  }
  return undefined;
}

export function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** A JSON pointer extended by a key. */
export function below(path, step) {
  return `${path}/${String(step).replaceAll("~", "~0").replaceAll("/", "~1")}`;
}
