// The words that differ between two lines. No DOM.

const MOST_WORDS = 160; // between the equal ends of two lines; if there are more, only the ends are compared
const LEAST_ALIKE = 0.35; // below this similarity, marking words is useless

/** @typedef {{text: string, changed: boolean}} Piece */

/**
 * The pieces of a removed line and of the added line beside it.
 * @returns {[Piece[], Piece[]]|null} null if they have too little in common
 */
export function wordDiff(before, after) {
  const a = wordsOf(before);
  const b = wordsOf(after);
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head += 1;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && a.at(-1 - tail) === b.at(-1 - tail)) tail += 1;
  const keptA = new Array(a.length).fill(false);
  const keptB = new Array(b.length).fill(false);
  keep(keptA, head, tail);
  keep(keptB, head, tail);
  const midA = a.slice(head, a.length - tail);
  const midB = b.slice(head, b.length - tail);
  if (midA.length <= MOST_WORDS && midB.length <= MOST_WORDS) {
    for (const [i, j] of common(midA, midB)) {
      keptA[head + i] = true;
      keptB[head + j] = true;
    }
  }
  if (alike(a, keptA, before, after) < LEAST_ALIKE) return null;
  return [joined(a, keptA), joined(b, keptB)];
}

function wordsOf(line) {
  return line.match(/[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu) ?? [];
}

function keep(kept, head, tail) {
  kept.fill(true, 0, head);
  kept.fill(true, kept.length - tail);
}

/** Pairs of indices of a longest common subsequence. */
function common(a, b) {
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      lengths[i * width + j] =
        a[i] === b[j]
          ? lengths[(i + 1) * width + j + 1] + 1
          : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  const pairs = [];
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (a[i] === b[j]) pairs.push([i++, j++]);
    else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return pairs;
}

/** The share of the longer line that both lines have in common, not counting blanks. */
function alike(words, kept, before, after) {
  const same = words.reduce((sum, word, at) => sum + (kept[at] ? word.trim().length : 0), 0);
  const most = Math.max(before.replace(/\s/g, "").length, after.replace(/\s/g, "").length);
  return most ? same / most : 1;
}

function joined(words, kept) {
  const pieces = [];
  words.forEach((word, at) => {
    const last = pieces.at(-1);
    if (last && last.changed === !kept[at]) last.text += word;
    else pieces.push({ text: word, changed: !kept[at] });
  });
  return pieces;
}

/**
 * The rows of a hunk, side by side, each line with its pieces.
 * Removed lines are paired one by one with the added lines that follow them.
 */
export function rowsOf(lines) {
  const rows = [];
  for (let at = 0; at < lines.length; ) {
    if (lines[at].type === "same") {
      rows.push({ left: lines[at], right: lines[at], pieces: null });
      at += 1;
      continue;
    }
    const removed = [];
    const added = [];
    while (lines[at]?.type === "removed") removed.push(lines[at++]);
    while (lines[at]?.type === "added") added.push(lines[at++]);
    for (let i = 0; i < Math.max(removed.length, added.length); i += 1) {
      const left = removed[i] ?? null;
      const right = added[i] ?? null;
      rows.push({ left, right, pieces: left && right ? wordDiff(left.text, right.text) : null });
    }
  }
  return rows;
}
