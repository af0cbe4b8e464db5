// A button that opens a menu. The arrow keys move in it. Escape, a choice, or leaving it closes it.

import { Icon } from "./icons.js";
import { html, useEffect, useRef, useState } from "./vendor/standalone.js";

/**
 * @param {{label: string, items: {words: any, note?: string, icon?: string, checked?: boolean, act: () => void}[],
 *   name?: string, title?: string, className?: string, style?: string, disabled?: boolean, children: any}} props
 *   `label` names the button, and `name` the menu. An item with `checked` is one of several that exclude each other, and
 *   leaves the menu open.
 */
export function Menu({ label, items, name = label, title, className = "", style = "quiet", disabled, children }) {
  const [open, setOpen] = useState(false);
  const box = useRef(null);
  const toggle = useRef(null);
  const all = () => [...box.current.querySelectorAll("[role^=menuitem]")];
  useEffect(() => {
    if (open) all()[0]?.focus();
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
      const items = all();
      items[(items.indexOf(document.activeElement) + step + items.length) % items.length].focus();
    } else if (!event.repeat) return event.stopPropagation(); // a letter is no shortcut of the question around the menu
    event.stopPropagation();
    event.preventDefault(); // also for a key that is held since it opened the menu
  };
  return html`<span class=${`menu-box ${className}`} ref=${box} onKeyDown=${pressed} onfocusout=${(event) => event.currentTarget.contains(event.relatedTarget) || setOpen(false)}>
    <button type="button" class=${style} ref=${toggle} disabled=${disabled} aria-haspopup="menu" aria-expanded=${String(open)} aria-label=${label} title=${title} onClick=${() => setOpen(!open)}>
      ${children}
    </button>
    ${open &&
    html`<span class="menu" role="menu" aria-label=${name}>
      ${items.map(
        ({ words, note, icon, checked, act }) => html`<button
          type="button"
          class="quiet"
          role=${checked === undefined ? "menuitem" : "menuitemradio"}
          aria-checked=${checked === undefined ? undefined : String(checked)}
          onClick=${() => (checked === undefined && close(), act())}
        >
          ${icon && html`<${Icon} name=${icon} />`}<span><span class="menu-words">${words}</span>${note && html`<span class="menu-note">${note}</span>`}</span>
        </button>`,
      )}
    </span>`}
  </span>`;
}
