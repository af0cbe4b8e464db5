// JSON that is still being written: what of it can be read already.

/** The value a truncated JSON text holds so far; undefined where it holds none. */
export function partial(text) {
  try {
    return JSON.parse(text);
  } catch {
    // Not whole yet. Close what is open; where that does not parse, the last token is cut off and dropped.
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

/** The text with every string, list and object that is open in it closed. */
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

/** The text up to the last comma or bracket outside of a string: without a key or a word that is half there. */
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
