// Parses unified diffs as Handrail's filesystems write them. No DOM: node can test it.
//
// A hunk is read by the counts in its header, never by what a line looks like. So a line such as "--- a/x" or
// "diff --git" in a file can't be taken for the header of another file.

/**
 * @typedef {{type: "same"|"added"|"removed", text: string, old: number|null, new: number|null, bare: boolean}} Line
 *   `bare`: the line has no newline at its end.
 * @typedef {{header: string, lines: Line[]}} Hunk
 * @typedef {{path: string, from: string|null, change: "new"|"deleted"|"renamed"|"changed", runsLater: boolean, notes: string[],
 *   hunks: Hunk[], added: number, removed: number, lines: number}} FileDiff
 * @typedef {{files: FileDiff[], remarks: string[]}} Diff  `remarks`: lines that concern no file, such as state changes.
 */

const HUNK = /^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)$/;
const NOTE = /^(new|deleted) (file|folder|link)( mode \d+)?$|^(file|folder|link) becomes |^(old|new) mode \d+$|^(Large|Binary|Long) files .* differ|^.* differ, and their content can't be shown$|^content: |^index [0-9a-f]+\.\.[0-9a-f]+( \d+)?$|^similarity index \d+%$|^runs later: |^no change$/;

/** @returns {Diff} */
export function parseDiff(text) {
  const lines = String(text ?? "").split("\n");
  if (lines.at(-1) === "") lines.pop();
  const files = [];
  const remarks = [];
  let file = null;
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const hunk = HUNK.exec(line);
    if (line.startsWith("diff --git ")) {
      file = newFile(namesIn(line.slice("diff --git ".length)));
      files.push(file);
      at += 1;
    } else if (line.startsWith("--- ") && lines[at + 1]?.startsWith("+++ ")) {
      file = headed(files, file, line.slice(4), lines[at + 1].slice(4));
      at += 2;
    } else if (hunk && file) {
      at = readHunk(file, hunk, lines, at + 1);
    } else {
      if (!takeNote(file, line)) remarks.push(line);
      at += 1;
    }
  }
  return { files, remarks };
}

/** Whether a text that somebody wrote as a diff is one: every line of it is in a file, and every hunk has as many lines as its header says. */
export function isWhole({ files, remarks }) {
  const counts = ({ header }) => [header.match(HUNK)[2] ?? 1, header.match(HUNK)[4] ?? 1].map(Number);
  const sides = ({ lines }) => [lines.filter((line) => line.old !== null).length, lines.filter((line) => line.new !== null).length];
  return files.length > 0 && !remarks.length && files.every(({ hunks }) => hunks.every((hunk) => String(counts(hunk)) === String(sides(hunk))));
}

function newFile({ old, path }) {
  return {
    path, from: old !== path ? old : null, change: "changed", runsLater: false, notes: [], hunks: [], added: 0, removed: 0, lines: 0,
  };
}

/** Splits the two names of a `diff --git` line. They are equal unless the file was renamed. */
function namesIn(text) {
  const half = (text.length - 1) / 2;
  if (text[half] === " " && text.slice(2, half) === text.slice(half + 3)) {
    const path = text.slice(2, half);
    return { old: path, path };
  }
  const at = text.indexOf(" b/");
  if (at < 0) return { old: text, path: text };
  return { old: text.slice(2, at), path: text.slice(at + 3) };
}

/** The file that `---` and `+++` name: the one that `diff --git` started, or a new one in a plain diff. */
function headed(files, file, old, path) {
  if (!file || file.hunks.length) {
    const named = path === "/dev/null" ? old : path;
    file = newFile({ old: bare(named), path: bare(named) });
    files.push(file);
  }
  if (old === "/dev/null") file.change = "new";
  else if (path === "/dev/null") file.change = "deleted";
  return file;
}

function bare(name) {
  return name.replace(/^[ab]\//, "").replace(/\t.*$/, "");
}

function readHunk(file, match, lines, at) {
  let old = Number(match[1]);
  let now = Number(match[3]);
  let oldLeft = match[2] === undefined ? 1 : Number(match[2]);
  let newLeft = match[4] === undefined ? 1 : Number(match[4]);
  const hunk = { header: match[0], lines: [] };
  file.hunks.push(hunk);
  for (; at < lines.length; at += 1) {
    const line = lines[at];
    const sign = line[0] ?? " ";
    if (sign === "\\" && hunk.lines.length) {
      hunk.lines.at(-1).bare = true;
    } else if (sign === "-" && oldLeft > 0) {
      hunk.lines.push({ type: "removed", text: line.slice(1), old: old++, new: null, bare: false });
      oldLeft -= 1;
      file.removed += 1;
    } else if (sign === "+" && newLeft > 0) {
      hunk.lines.push({ type: "added", text: line.slice(1), old: null, new: now++, bare: false });
      newLeft -= 1;
      file.added += 1;
    } else if (sign === " " && oldLeft > 0 && newLeft > 0) {
      hunk.lines.push({ type: "same", text: line.slice(1), old: old++, new: now++, bare: false });
      oldLeft -= 1;
      newLeft -= 1;
    } else {
      break; // the hunk is over
    }
  }
  file.lines += hunk.lines.length;
  return at;
}

/** Adds a line to the file's notes if it concerns the file. Returns whether it does. */
function takeNote(file, line) {
  if (!file || file.hunks.length) return false;
  if (line.startsWith("rename from ")) {
    file.from = line.slice("rename from ".length);
    file.change = "renamed";
    return true;
  }
  if (line.startsWith("rename to ")) {
    file.path = line.slice("rename to ".length);
    return true;
  }
  if (!NOTE.test(line)) return false;
  if (line.startsWith("runs later: ")) file.runsLater = true;
  if (line.startsWith("new ") && !line.startsWith("new mode")) file.change = "new";
  if (line.startsWith("deleted ")) file.change = "deleted";
  file.notes.push(line);
  return true;
}
