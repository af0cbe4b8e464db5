// Limits on the Markdown that the page renders. A parser of Markdown needs a stack that grows with nesting and time that
// grows with the square of a paragraph's marks, so text beyond these limits is shown as it was written.

const MOST = 300_000; // characters of a text
const DEEP = 24; // quotes and lists inside each other
const INDENT = 80; // spaces before a list's mark
const ITEMS = 4_000; // items of lists and rows of tables
const COST = 6_000_000; // characters times marks of one paragraph; ten times that of a whole text

const CONTAINERS = /^(?:[ \t]*(?:>|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t])))+/;
const INDENTED = /^[ \t]*/;
const MARKS = /[_*~`[\]!<>|&\\:@]/g;

const STARTS = /^[ \t]*(?:[-*+][ \t]|\d{1,9}[.)][ \t]|\|)/; // a list's item or a row of a table, parsed by itself
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
