// The files that a call changed: a summary, a diff that can be opened, and an undo button.

import { DiffView } from "./diff.js";
import { Icon } from "./icons.js";
import { html, useState } from "./vendor/standalone.js";

export const UNAPPLIED = "These changes are recorded, but not in the files, for example because their folder is missing. “handrail runs show” says why.";

export function Changes({ id, facts, conversation }) {
  const [open, setOpen] = useState(false);
  return html`<div class="changes">
    <details onToggle=${(event) => setOpen(event.currentTarget.open)}>
      <summary><${Counted} diff=${facts.diff ?? ""} paths=${facts.paths ?? []} /></summary>
      ${open && html`<${DiffView} diff=${facts.diff ?? ""} />`}
    </details>
    ${facts.unapplied && html`<p class="soft">${UNAPPLIED}</p>`}
    ${!facts.undone && !facts.unapplied && facts.status === "ok" && html`<${Undo} id=${id} conversation=${conversation} />`}
  </div>`;
}

function Counted({ diff, paths }) {
  let added = 0;
  let removed = 0;
  for (const line of diff.split("\n")) {
    if (line.startsWith("+") && !line.startsWith("+++")) added++;
    else if (line.startsWith("-") && !line.startsWith("---")) removed++;
  }
  const names = paths.length > 3 ? `${paths.slice(0, 2).join(", ")} and ${paths.length - 2} more` : paths.join(", ");
  return html`<span class="counted"><span>${names || "Changes"}</span> <span class="added">+${added}</span> <span class="removed">−${removed}</span></span>`;
}

function Undo({ id, conversation }) {
  const [stage, setStage] = useState("idle");
  const [problem, setProblem] = useState(null);
  const undo = async () => {
    setStage("busy");
    try {
      await conversation.undo(id);
      setStage("idle");
    } catch (error) {
      setProblem(error.message);
      setStage("idle");
    }
  };
  if (stage === "idle") {
    return html`<span class="undo">
      <button type="button" class="small" onClick=${() => (setProblem(null), setStage("asked"))}><${Icon} name="undo" /> Undo</button>
      ${problem && html`<span class="problem" role="alert">${problem}</span>`}
    </span>`;
  }
  return html`<span class="undo" role="group" aria-label="Undo this call?" onKeyDown=${(event) => event.key === "Escape" && setStage("idle")}>
    <span>Restore the files?</span>
    <button type="button" class="danger small" disabled=${stage === "busy"} ref=${(button) => stage === "asked" && button?.focus()} onClick=${undo}>
      ${stage === "busy" ? "Undoing…" : "Yes, undo"}
    </button>
    <button type="button" class="quiet small" onClick=${() => setStage("idle")}>Keep</button>
  </span>`;
}
