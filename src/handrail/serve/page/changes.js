// The files that a call changed: how much, and the control that restores them.

import { Icon } from "./icons.js";
import { html, useLayoutEffect, useRef, useState } from "./vendor/standalone.js";

export const UNAPPLIED = "These changes are recorded, but not in the files, for example because their folder is missing. “handrail runs show” says why.";

/** The number of lines that a diff adds and removes, without a zero. */
export function Counted({ diff = "" }) {
  let added = 0;
  let removed = 0;
  for (const line of diff.split("\n")) {
    if (line.startsWith("+") && !line.startsWith("+++")) added++;
    else if (line.startsWith("-") && !line.startsWith("---")) removed++;
  }
  return html`<span class="counted">${added > 0 && html`<span class="added">+${added}</span>`} ${removed > 0 && html`<span class="removed">−${removed}</span>`}</span>`;
}

/** The button that undoes a call. It asks for confirmation in the same place. `undo` returns a promise. */
export function Undo({ tool, paths, undo, busy = false, disabled = false }) {
  const [asking, setAsking] = useState(false);
  const [refused, setRefused] = useState("");
  const [under, setUnder] = useState(false);
  const first = useRef(null);
  const button = useRef(null);
  const was = useRef(false);
  useLayoutEffect(() => {
    if (asking) first.current?.focus();
    else if (was.current) button.current?.focus();
    was.current = asking;
  }, [asking]);
  const act = async () => {
    setAsking(false);
    setRefused("");
    setUnder(true);
    try {
      await undo();
    } catch (error) {
      setRefused(error?.message ?? String(error));
    }
    setUnder(false);
  };
  if (under || busy) return html`<span class="change-word" role="status">Undoing…</span>`;
  if (!asking) {
    return html`<button type="button" class="quiet small undo" ref=${button} disabled=${disabled} aria-label=${`Undo ${tool}`}
        onClick=${() => setAsking(true)}><${Icon} name="undo" /> Undo</button>
      ${refused && html`<p class="field-error" role="alert">${refused}</p>`}`;
  }
  const escape = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    setAsking(false);
  };
  return html`<span class="confirm" role="group" aria-label=${`Undo ${tool}?`} onKeyDown=${escape}>
    <span>Restore ${paths.length === 1 ? "this path" : `these ${paths.length} paths`}?</span>
    <button type="button" class="danger small" ref=${first} onClick=${act}>Undo</button>
    <button type="button" class="quiet small" onClick=${() => setAsking(false)}>Keep</button>
  </span>`;
}
