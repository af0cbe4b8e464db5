// A parser for JSON that is still being written. Numbers that JavaScript would round keep their digits.

// A random prefix for numbers that are kept as text. It is secret, so no text can pretend to be a number.
const NUMBER = `number ${crypto.getRandomValues(new Uint32Array(4)).join(" ")} `;
const STRINGS_AND_NUMBERS = /"(?:[^"\\]|\\[^])*(?:"|$)|-?\d[\d.eE+-]*/g;

/**
 * The value of an unfinished JSON text so far, or undefined if it has none yet. `exactly` restores numbers that would
 * have been rounded.
 */
export function partial(written) {
  const text = written.replace(STRINGS_AND_NUMBERS, (token) => (token[0] === '"' || String(Number(token)) === token ? token : JSON.stringify(NUMBER + token)));
  try {
    return JSON.parse(text);
  } catch {
    // The text is incomplete. Close what is open. If the result does not parse, drop the last token.
  }
  for (const cut of [text, withoutTail(text)]) {
    try {
      return JSON.parse(closed(cut));
    } catch {
      // Try the next, shorter candidate.
    }
  }
  return undefined;
}

/** The text with every open string, list and object closed. */
function closed(text) {
  const open = [];
  let inString = false;
  let escaped = false;
  for (const character of text) {
    if (inString) {
      if (escaped) escaped = false;
      else if (character === "\\") escaped = true;
      else if (character === '"') inString = false;
    } else if (character === '"') inString = true;
    else if (character === "{") open.push("}");
    else if (character === "[") open.push("]");
    else if (character === "}" || character === "]") open.pop();
  }
  let whole = escaped ? text.slice(0, -1) : text;
  if (inString) whole = `${whole.replace(/\\u[0-9a-fA-F]{0,3}$/, "")}"`;
  return whole.replace(/,\s*$/, "") + open.reverse().join("");
}

/** The text up to the last comma or opening bracket outside a string. */
function withoutTail(text) {
  let end = 0;
  let inString = false;
  let escaped = false;
  for (let place = 0; place < text.length; place++) {
    const character = text[place];
    if (inString) {
      if (escaped) escaped = false;
      else if (character === "\\") escaped = true;
      else if (character === '"') inString = false;
    } else if (character === '"') inString = true;
    else if (character === ",") end = place;
    else if (character === "{" || character === "[") end = place + 1;
  }
  return text.slice(0, end);
}

/** Returns a parsed value as text, with every number as it was written. */
export function exactly(value) {
  if (typeof value === "string") return value.startsWith(NUMBER) ? value.slice(NUMBER.length) : value;
  const flat = JSON.stringify(value);
  const text = flat.length > 60 && typeof value === "object" ? JSON.stringify(value, null, 2) : flat;
  return text.replaceAll(new RegExp(`"${NUMBER}([^"]*)"`, "g"), "$1");
}

const HIDDEN = /(?![\n\t\ufe0f])[\p{Cc}\p{Cf}\p{Cn}\p{Co}\p{Cs}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\u2800]/gu;

/** Returns the text with escapes for characters that are invisible or change the direction of text. */
export function visible(text) {
  return text.replace(HIDDEN, (character) => {
    const number = character.codePointAt(0);
    const [letter, digits] = number < 0x100 ? ["x", 2] : number < 0x10000 ? ["u", 4] : ["U", 8];
    return `\\${letter}${number.toString(16).padStart(digits, "0")}`;
  });
}
