// Reads a JSON list of {schema, value}, and writes the problems that validate.js finds in each.

import { validate } from "../../../src/handrail/serve/page/validate.js";

let text = "";
for await (const part of process.stdin) text += part;
console.log(JSON.stringify(JSON.parse(text).map(({ schema, value }) => validate(schema, value))));
