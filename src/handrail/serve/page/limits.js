// Limits on the Markdown that the page renders. A parser of Markdown needs a stack that grows with nesting and time that
// grows with the square of a paragraph's marks, so text beyond these limits is shown as it was written.

const MOST = 300_000; // characters of a text
const DEEP = 24; // quotes and lists inside each other
const INDENT = 80; // spaces before a list's mark
const COST = 6_000_000; // characters times marks of one paragraph, and a tenth of that of a whole text

const CONTAINERS = /^(?:[ \t]*(?:>|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t])))+/;
const INDENTED = /^[ \t]*/;
const MARKS = /[_*~`[\]!<>|&\\:@]/g;

/** Whether a text is too large, too deep or too costly to be rendered as Markdown. */
export function isTooMuch(text) {
  if (text.length > MOST) return true;
  let characters = 0;
  let marks = 0;
  let whole = 0;
  for (const line of text.split("\n")) {
    const containers = CONTAINERS.exec(line)?.[0] ?? "";
    if (containers.replace(/[^>*+.)-]/g, "").length > DEEP) return true;
    if (INDENTED.exec(line)[0].length > INDENT && /[>*+-]|\d[.)]/.test(line)) return true;
    if (line.trim() === "") {
      whole += characters * marks;
      characters = marks = 0;
    } else {
      characters += line.length + 1;
      marks += line.match(MARKS)?.length ?? 0;
    }
    if (characters * marks > COST || whole > 10 * COST) return true;
  }
  return false;
}
