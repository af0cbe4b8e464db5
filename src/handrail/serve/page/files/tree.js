// What the calls of a conversation did to each file, and these files as a tree. No DOM: node can test it.

import { parseDiff } from "../diff/parse.js";

/**
 * @typedef {{path: string, origin: string|null, outcome: "added"|"changed"|"moved"|"removed", steps: {change: object, path: string}[]}} File
 *   `origin` is the path before the first call, null if the file did not exist. `steps` are the calls that changed it, oldest first,
 *   each with the path under which its diff has the file.
 */

/**
 * What the calls did together. Calls that were undone or not applied are left out, and so are files that were added and removed again.
 * @param {object[]} changes as `GET /threads/{id}/files` returns them, oldest first
 * @returns {File[]} ordered by path
 */
export function filesOf(changes) {
  const files = new Map(); // by path; a removed file stands under its origin
  for (const change of changes) if (!change.undone && !change.unapplied) take(files, change);
  const outcome = ({ gone, origin }, path) => (gone ? "removed" : origin === null ? "added" : origin === path ? "changed" : "moved");
  return [...files]
    .map(([path, { gone, origin, steps }]) => ({ path, origin, outcome: outcome({ gone, origin }, path), steps }))
    .sort((a, b) => (a.path < b.path ? -1 : 1));
}

function take(files, change) {
  const parts = parseDiff(change.diff).files;
  // All moved files leave their old paths first, because two may change places.
  const moved = new Map(parts.filter((part) => part.change === "renamed").map((part) => [part, files.get(part.from) ?? { origin: part.from, steps: [] }]));
  for (const part of moved.keys()) files.delete(part.from);
  for (const part of parts) {
    const { path } = part;
    const before = moved.get(part) ?? files.get(path);
    const steps = [...(before?.steps ?? []), { change, path }];
    if (part.change === "deleted") remove(files, path, { origin: path, ...before, steps });
    else if (part.change === "new") files.set(path, { origin: before?.gone ? path : null, gone: false, steps });
    else files.set(path, { origin: path, ...before, gone: false, steps });
  }
  const named = new Set(parts.flatMap((part) => [part.path, part.from]));
  for (const path of (change.paths ?? []).filter((each) => !named.has(each))) {
    const before = files.get(path);
    files.set(path, { origin: path, ...before, gone: false, steps: [...(before?.steps ?? []), { change, path }] });
  }
}

function remove(files, path, { origin, steps }) {
  files.delete(path);
  if (origin === null) return;
  const there = files.get(origin); // what was put in its place meanwhile
  files.set(origin, { origin: there?.origin ?? origin, gone: !there, steps: [...steps, ...(there?.steps ?? [])] });
}

/**
 * @typedef {{name: string, file: File|null, children: Node[]}} Node  A folder with nothing but one folder in it is one node with it.
 * @returns {Node[]}
 */
export function treeOf(files) {
  const root = { name: "", file: null, children: [] };
  for (const file of files) {
    let node = root;
    for (const name of file.path.split("/")) {
      let next = node.children.find((each) => each.name === name);
      if (!next) node.children.push((next = { name, file: null, children: [] }));
      node = next;
    }
    node.file = file;
  }
  return root.children.map(joined);
}

function joined(node) {
  const [only] = node.children;
  if (node.children.length === 1 && !node.file && only.children.length) return joined({ ...only, name: `${node.name}/${only.name}` });
  return { ...node, children: node.children.map(joined) };
}
