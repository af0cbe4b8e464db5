// A modal side panel. Escape or a click outside closes it.

import { Icon } from "./icons.js";
import { html, useEffect, useRef } from "./vendor/standalone.js";

export function Sheet({ open, onClose, label, side, children }) {
  const dialog = useRef(null);
  useEffect(() => {
    if (open && !dialog.current.open) dialog.current.showModal();
    else if (!open && dialog.current.open) dialog.current.close();
  }, [open]);
  return html`<dialog
    ref=${dialog}
    class=${`sheet ${side}`}
    aria-label=${label}
    onClose=${onClose}
    onClick=${(event) => event.target === dialog.current && onClose()}
  >
    <div class="sheet-body">
      <div class="sheet-head">
        <h2>${label}</h2>
        <button type="button" class="quiet icon-button" aria-label="Close" onClick=${onClose}><${Icon} name="close" /></button>
      </div>
      ${children}
    </div>
  </dialog>`;
}
