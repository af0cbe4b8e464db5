// The menu beside the Stop button: what a run can be ordered to do before its next step.

import { Icon } from "./icons.js";
import { html, useEffect, useRef, useState } from "./vendor/standalone.js";
import { ORDER } from "./words.js";

/** The menu. The arrow keys move in it, Escape closes it. `give(order)` returns a promise. */
export function Orders({ isPaused, give }) {
  const [open, setOpen] = useState(false);
  const box = useRef(null);
  const toggle = useRef(null);
  const items = () => [...box.current.querySelectorAll("[role=menuitem]")];
  useEffect(() => {
    if (open) items()[0].focus();
  }, [open]);
  const close = () => {
    setOpen(false);
    toggle.current.focus();
  };
  const pressed = (event) => {
    if (!open) return;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") close();
    else if (step) {
      const all = items();
      all[(all.indexOf(document.activeElement) + step + all.length) % all.length].focus();
    } else return;
    event.preventDefault();
  };
  return html`<span class="orders" ref=${box} onKeyDown=${pressed} onfocusout=${(event) => event.currentTarget.contains(event.relatedTarget) || setOpen(false)}>
    <button type="button" class="quiet more" ref=${toggle} aria-haspopup="menu" aria-expanded=${String(open)} aria-label="Pause or wrap up" title="Pause, wrap up, or stop after this step" onClick=${() => setOpen(!open)}>
      <${Icon} name="more" />
    </button>
    ${open &&
    html`<span class="menu" role="menu" aria-label="Orders to the run">
      ${Object.entries(ORDER)
        .filter(([order]) => !(isPaused && order === "pause"))
        .map(([order, words]) => html`<button key=${order} type="button" class="quiet" role="menuitem" onClick=${() => (close(), give(order))}><${Icon} name=${order} /> ${words}</button>`)}
    </span>`}
  </span>`;
}
