// A parser for JSON that is still being written.

/** The value of a truncated JSON text so far, or undefined. */
export function partial(text) {
  try {
    return JSON.parse(text);
  } catch {
    // Incomplete. Close what is open; if that does not parse, drop the last token.
  }
  for (const cut of [text, withoutTail(text)]) {
    try {
      return JSON.parse(closed(cut));
    } catch {
      // The next, shorter one.
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

/** The text up to the last comma or bracket outside a string, without an incomplete key or word. */
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
