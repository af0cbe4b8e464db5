// A thread's remembered decisions, each with a button that revokes it.

import { useEffect, useState, html } from "./vendor/standalone.js";
import * as server from "./server.js";
import { Loading } from "./states.js";
import { ago } from "./words.js";

export function Approvals({ id, unsaid }) {
  const [kept, setKept] = useState(unsaid ? [] : null);
  const [problem, setProblem] = useState(null);
  const load = async () => {
    try {
      setKept(await server.approvals(id));
      setProblem(null);
    } catch (error) {
      setProblem(error.message);
    }
  };
  useEffect(() => void (unsaid || load()), [id]);
  const revoke = async (approval) => {
    try {
      await server.revoke(id, approval.id);
    } catch (error) {
      return setProblem(error.message);
    }
    return load();
  };
  return html`<div class="approvals">
    <p class="soft">You won’t be asked about these again until you revoke them.</p>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${kept === null && !problem && html`<${Loading} words="Loading…" />`}
    ${kept?.length === 0 && html`<p class="nothing">No decisions are remembered in this thread.</p>`}
    <ul>
      ${(kept ?? []).map(
        (approval) => html`<li key=${approval.id}>
          <p>
            <strong>${approval.approved ? "Allowed" : "Denied"}</strong> <code>${approval.tool}</code>
            ${approval.scope ? html` for <q>${approval.scope}</q>` : html` with exactly these arguments`}
          </p>
          <p class="soft">${[approval.by && `by ${approval.by}`, approval.at && ago(approval.at), approval.reason].filter(Boolean).join(" · ")}</p>
          <button type="button" class="small" aria-label=${`Revoke ${approval.tool}`} onClick=${() => revoke(approval)}>Revoke</button>
        </li>`,
      )}
    </ul>
  </div>`;
}
