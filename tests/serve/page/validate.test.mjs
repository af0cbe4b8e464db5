// Tests for validate.js: its messages, and that it never rejects what it does not understand.

import assert from "node:assert/strict";
import { test } from "node:test";
import { validate } from "../../../src/handrail/serve/page/validate.js";

const said = (schema, value) => validate(schema, value).map((one) => `${one.path}: ${one.message}`);

test("each keyword has a message", () => {
  const table = [
    [{ type: "string", minLength: 3 }, "te", "at least 3 characters, this has 2"],
    [{ type: "string", minLength: 1 }, "", "at least 1 character, this has 0"],
    [{ type: "string", maxLength: 1 }, "😀😀", "at most 1 character, this has 2"],
    [{ type: "string", pattern: "^a+$" }, "b", "this must match ^a+$"],
    [{ type: "integer" }, 1.5, "a whole number, such as 3"],
    [{ type: "integer" }, "x", "a whole number, such as 3"],
    [{ type: "number" }, "cheap", "a number, such as 2.5"],
    [{ type: "integer", minimum: 1 }, 0, "at least 1"],
    [{ type: "integer", maximum: 9 }, 10, "at most 9"],
    [{ type: "number", exclusiveMinimum: 0 }, 0, "more than 0"],
    [{ type: "number", exclusiveMaximum: 1 }, 1, "less than 1"],
    [{ type: "integer", multipleOf: 5 }, 7, "a multiple of 5"],
    [{ type: "boolean" }, "yes", "yes or no"],
    [{ enum: ["S", "M"] }, "L", "choose one of: S, M"],
    [{ const: 3 }, 4, "choose one of: 3"],
    [{ type: "array", items: {}, minItems: 1 }, [], "at least 1 entry, this has 0"],
    [{ type: "array", items: {}, maxItems: 1 }, [1, 2], "at most 1 entry, this has 2"],
    [{ type: "array", items: {}, uniqueItems: true }, [{ a: 1, b: 2 }, { b: 2, a: 1 }], "each entry may occur only once"],
    [{ type: "null" }, 1, "no value is allowed here"],
    [{ anyOf: [{ type: "integer" }, { type: "string" }] }, true, "this matches none of the allowed types"],
    [{ type: "string" }, undefined, "a value is required"],
  ];
  for (const [schema, value, words] of table) assert.deepEqual(said(schema, value), [`: ${words}`]);
});

test("the messages for formats give an example", () => {
  const table = [
    ["date", "2024-02-29", "2026-02-29", "a date, such as"],
    ["time", "14:30", "26:00", "a time, such as"],
    ["date-time", "2026-01-31T12:00:00+02:00", "now", "a date and time, such as"],
    ["email", "ada@example.org", "ada", "an e-mail address, such as"],
    ["uri", "https://example.org", "example", "an address, such as"],
    ["uuid", "123e4567-e89b-12d3-a456-426614174000", "123", "a UUID, such as"],
    ["duration", "P3DT1H30M", "PT", "a duration, such as"],
  ];
  for (const [format, good, bad, words] of table) {
    assert.deepEqual(said({ type: "string", format }, good), []);
    assert.match(said({ type: "string", format }, bad)[0], new RegExp(words));
  }
});

test("every problem has the JSON pointer of its place", () => {
  const schema = {
    type: "object",
    required: ["to", "a/b"],
    additionalProperties: false,
    properties: { to: { type: "array", items: { $ref: "#/$defs/Street" } }, "a/b": { type: "string" } },
    $defs: { Street: { type: "object", required: ["number"], properties: { number: { type: "integer" } } } },
  };
  assert.deepEqual(said(schema, { to: [{ number: 1 }, {}, { number: "x" }], more: 1 }).sort(), [
    "/a~1b: a value is required",
    "/more: there is no such field",
    "/to/1/number: a value is required",
    "/to/2/number: a whole number, such as 3",
  ]);
});

test("a discriminator selects the alternative to validate", () => {
  const kind = (name, properties) => ({ type: "object", required: ["kind", ...Object.keys(properties)], properties: { kind: { const: name }, ...properties } });
  const schema = { oneOf: [kind("card", { number: { type: "string" } }), kind("cash", {})], discriminator: { propertyName: "kind" } };
  assert.deepEqual(said(schema, { kind: "cash" }), []);
  assert.deepEqual(said(schema, { kind: "card" }), ["/number: a value is required"]);
});

test("unknown keywords and formats do not block", () => {
  const schemas = [
    {},
    true,
    { type: "unheard-of" },
    { not: { type: "string" } },
    { if: { type: "string" }, then: { minLength: 99 } },
    { $ref: "https://elsewhere/schema" },
    { $ref: "#/$defs/missing" },
    { type: "string", pattern: "(?P<year>\\d+)" },
    { type: "string", pattern: "^[[:alpha:]]+$" },
    { type: "string", pattern: "(?i)^ABC$" },
    { type: "string", format: "unheard-of" },
    { $ref: "#" },
  ];
  for (const schema of schemas) assert.deepEqual(said(schema, "abc"), [], JSON.stringify(schema));
});

test("validation with a recursive schema ends where the value ends", () => {
  const schema = { $ref: "#/$defs/Tree", $defs: { Tree: { type: "object", required: ["name"], properties: { name: { type: "string" }, inner: { type: "array", items: { $ref: "#/$defs/Tree" } } } } } };
  assert.deepEqual(said(schema, { name: "a", inner: [{ name: "b", inner: [{}] }] }), ["/inner/0/inner/0/name: a value is required"]);
});
