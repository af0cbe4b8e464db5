// A nested agent: a branch that opens inside the card of the call it runs in, with its own text and cards.

import { Entries } from "./entries.js";
import { Icon } from "./icons.js";
import { isAsked } from "./store.js";
import { html, useState } from "./vendor/standalone.js";
import { many, STATUS } from "./words.js";

export function Agent({ agent, view, conversation }) {
  const entries = view.entries[agent.id] ?? [];
  const asked = entries.some((entry) => entry.kind === "call" && isAsked(view, entry.id));
  // Opens when it works or asks, unless the reader chose otherwise; it does not shut by itself, since things would jump.
  const [chosen, setChosen] = useState(null);
  const [worked, setWorked] = useState(false);
  if ((agent.status === "running" || asked) && !worked) setWorked(true);
  const open = asked || (chosen ?? worked);
  const calls = entries.filter((entry) => entry.kind === "call").length;
  const status = asked ? "waiting" : (agent.status ?? "ok");
  return html`<details
    class="agent"
    open=${open}
    onToggle=${(event) => event.target === event.currentTarget && event.currentTarget.open !== open && setChosen(event.currentTarget.open)}
  >
    <summary aria-label=${`Agent ${agent.name}, ${STATUS[status] ?? status}`}>
      <${Icon} name="agent" />
      <span class="agent-name">${agent.name}</span>
      <span class=${`status ${status}`}><${Icon} name=${status} /> ${STATUS[status] ?? status}</span>
      ${calls > 0 && html`<span class="soft">${many(calls, "call")}</span>`}
    </summary>
    <div class="branch" role="group" aria-label=${`What ${agent.name} did`}>
      ${open && html`<${Entries} scope=${agent.id} view=${view} conversation=${conversation} />`}
      ${entries.length === 0 && html`<p class="soft">Nothing said yet.</p>`}
    </div>
  </details>`;
}
