// Limits on the Markdown that the page renders. The parser's stack grows with the nesting. The parser's time grows with
// the number of table cells, and with the length of a paragraph times the number of its marks. Text beyond these limits is
// therefore shown as it was written.
//
// What looks like a code fence here may not be one for the parser, for example inside an HTML comment. So the limits for
// code hold everywhere, and stricter ones hold outside of what looks like code. The cost of the marks is measured in the
// parser's own blocks.

const MOST = 300_000; // characters in a text
const DEEP = 24; // levels of nested quotes and lists
const DEEP_IN_CODE = 100;
const INDENT = 80; // spaces before a list marker
const ITEMS = 4_000; // list items and table rows
const ITEMS_IN_CODE = 20_000;
const CELLS = 20_000; // table cells: every row is padded to as many cells as the table has columns
const COST = 6_000_000; // characters times marks in one paragraph; a whole text may cost ten times as much

const CONTAINERS = /^(?:[ \t]*(?:>|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t])))+/;
const INDENTED = /^[ \t]*/;
const MARKS = /[_*~`[\]!<>|&\\:@$]/g;

const STARTS = /^[ \t]*(?:[-*+][ \t]|\d{1,9}[.)][ \t]|\|)/; // a list item or a table row, which is parsed by itself
const COLUMNS = /^[ \t>]*[|:-][-|: \t]*$/; // the line below a table's header
const FENCE = /^ {0,3}(?:(`{3,})[^`]*|(~{3,}).*)$/;

/** Whether a text is too large, too deep or has too many parts to be parsed as Markdown. */
export function isTooMuch(text) {
  if (text.length > MOST) return true;
  let [items, every, columns, cells] = [0, 0, 0, 0];
  let fence = "";
  for (const line of text.split(/\r\n|\r|\n/)) {
    const levels = (CONTAINERS.exec(line)?.[0] ?? "").replace(/[^>*+.)-]/g, "").length;
    if (levels > DEEP_IN_CODE) return true;
    if (STARTS.test(line) && ++every > ITEMS_IN_CODE) return true;
    if (line.trim() === "") columns = 0;
    else if (COLUMNS.test(line)) columns = Math.max(columns, line.split("|").length);
    if ((cells += columns) > CELLS) return true;
    const found = FENCE.exec(line);
    const mark = found?.[1] ?? found?.[2] ?? "";
    if (fence) {
      if (mark[0] === fence[0] && mark.length >= fence.length && line.trim() === mark) fence = "";
      continue;
    }
    fence = mark;
    if (levels > DEEP) return true;
    if (INDENTED.exec(line)[0].length > INDENT && /[>*+-]|\d[.)]/.test(line)) return true;
    if (STARTS.test(line) && ++items > ITEMS) return true;
  }
  return false;
}

/** The tokens of a text, or null if it is too large, too deep or too costly to be rendered as Markdown. */
export function lexed(marked, text) {
  if (isTooMuch(text)) return null;
  const lexer = new marked.Lexer(marked.defaults);
  lexer.blockTokens(text.replace(/\r\n|\r/g, "\n"), lexer.tokens);
  let whole = 0;
  for (const { src } of lexer.inlineQueue) {
    const cost = src.length * (src.match(MARKS)?.length ?? 0);
    whole += cost;
    if (cost > COST || whole > 10 * COST) return null;
  }
  for (const { src, tokens } of lexer.inlineQueue) lexer.inlineTokens(src, tokens);
  return lexer.tokens;
}
