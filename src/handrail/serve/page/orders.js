// The menu beside the Stop button: what a run can be ordered to do before its next step.

import { Icon } from "./icons.js";
import { Menu } from "./menu.js";
import { html } from "./vendor/standalone.js";
import { ORDER } from "./words.js";

/** The menu of orders. `give(order)` sends one. */
export function Orders({ isPaused, give }) {
  const items = Object.entries(ORDER)
    .filter(([order]) => !(isPaused && order === "pause"))
    .map(([order, words]) => ({ words, icon: order, act: () => give(order) }));
  return html`<${Menu} label="Pause or wrap up" name="Orders to the run" title="Pause, wrap up, or stop after this step" className="orders" style="quiet more" items=${items}>
    <${Icon} name="more" />
  <//>`;
}
