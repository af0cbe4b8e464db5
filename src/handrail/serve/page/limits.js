// Limits on the Markdown that the page renders. A Markdown parser needs stack that grows with the nesting, and time that
// grows with the square of a paragraph's marks. Text beyond these limits is therefore shown as it was written.

const MOST = 300_000; // characters in a text
const DEEP = 24; // levels of nested quotes and lists
const INDENT = 80; // spaces before a list marker
const ITEMS = 4_000; // list items and table rows
const COST = 6_000_000; // characters times marks in one paragraph; a whole text may cost ten times as much

const CONTAINERS = /^(?:[ \t]*(?:>|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t])))+/;
const INDENTED = /^[ \t]*/;
const MARKS = /[_*~`[\]!<>|&\\:@]/g;

const STARTS = /^[ \t]*(?:[-*+][ \t]|\d{1,9}[.)][ \t]|\|)/; // a list item or a table row, which is parsed by itself
const FENCE = /^ {0,3}(?:(`{3,})[^`]*|(~{3,}).*)$/;

/** Whether a text is too large, too deep or too costly to be rendered as Markdown. */
export function isTooMuch(text) {
  if (text.length > MOST) return true;
  let [characters, marks, whole, items] = [0, 0, 0, 0];
  let fence = "";
  for (const line of text.split("\n")) {
    const found = FENCE.exec(line);
    const mark = found?.[1] ?? found?.[2] ?? "";
    if (fence) {
      if (mark[0] === fence[0] && mark.length >= fence.length && line.trim() === mark) fence = "";
      continue; // code has no marks
    }
    const containers = CONTAINERS.exec(line)?.[0] ?? "";
    if (containers.replace(/[^>*+.)-]/g, "").length > DEEP) return true;
    if (INDENTED.exec(line)[0].length > INDENT && /[>*+-]|\d[.)]/.test(line)) return true;
    if (STARTS.test(line) && ++items > ITEMS) return true;
    if (mark || line.trim() === "" || STARTS.test(line)) {
      whole += characters * marks;
      characters = marks = 0;
    }
    fence = mark;
    characters += line.length + 1;
    marks += line.match(MARKS)?.length ?? 0;
    if (characters * marks > COST || whole > 10 * COST) return true;
  }
  return false;
}
