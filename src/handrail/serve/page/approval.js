// An approval question: what the call would do, why it needs approval, and the choices, each with a keyboard shortcut.

import { DiffView } from "./diff.js";
import { Icon } from "./icons.js";
import { Rows } from "./rows.js";
import { html, useEffect, useRef, useState } from "./vendor/standalone.js";

export function Approval({ question, give, busy, keys }) {
  const { tool, reason, scopes, exact, diff } = question.payload ?? {};
  const [reasoning, setReasoning] = useState(false);
  const allow = (more) => give({ outcome: "answered", value: { approved: true, ...more } });
  const deny = (why) => give({ outcome: "answered", value: { approved: false, ...(why ? { reason: why } : {}) } });

  const choices = [{ key: "a", words: "Allow once", style: "primary", act: () => allow({ remember: "once" }) }];
  if (scopes) {
    if (exact !== false) choices.push({ key: "e", words: "Allow this exact call for the session", act: () => allow({ remember: "exact" }) });
    scopes.slice(0, 9).forEach((scope, place) =>
      choices.push({ key: String(place + 1), words: html`Allow <q>${scope}</q> for the session`, act: () => allow({ remember: "scope", scope }) }),
    );
  }
  choices.push({ key: "d", words: "Deny", style: "danger", act: () => deny("") });
  choices.push({ key: "r", words: "Deny with a reason", act: () => setReasoning(true) });

  // Shortcuts work only while the focus is in this question and not in a field, so that nothing is allowed by accident.
  const others = question.mine ? [] : (question.quorums ?? []); // other people vote on it in their inboxes
  keys.current = (event) => {
    if (busy || others.length || event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, textarea, select")) return;
    const choice = choices.find((each) => each.key === event.key.toLowerCase());
    if (choice) {
      event.preventDefault();
      choice.act();
    }
  };
  return html`<div class="approval-body">
    <h3><${Icon} name="shield" /> Allow <code>${tool ?? question.name}</code>?</h3>
    ${(question.message || reason) && html`<p class="why"><bdi>${question.message || reason}</bdi></p>`}
    <${Rows} rows=${question.rows} />
    ${diff && html`<${DiffView} diff=${diff} />`}
    <p class="digest soft">digest <code>${question.digest.slice(0, 16)}</code></p>
    ${others.length
      ? html`<p class="others" role="status"><${Icon} name="waiting" /> ${waitingFor(others, question.votes ?? [])}</p>`
      : reasoning
      ? html`<${Reason} label="Reason (the model sees it)" action="Deny" give=${deny} back=${() => setReasoning(false)} busy=${busy} />`
      : html`<div class="choices">
          ${choices.map(
            (choice) => html`<button key=${choice.key} type="button" class=${choice.style ?? ""} disabled=${busy} aria-keyshortcuts=${choice.key.toUpperCase()} onClick=${choice.act}>
              <span>${choice.words}</span> <kbd aria-hidden="true">${choice.key.toUpperCase()}</kbd>
            </button>`,
          )}
        </div>`}
  </div>`;
}

/** Says who must approve and who has: "Waiting for 2 people with the role finance. Allowed by fay." */
function waitingFor(quorums, votes) {
  const needed = quorums.map(({ role, approvals }) => `${approvals} ${approvals === 1 ? "person" : "people"} ${role ? `with the role ${role}` : "who may approve for others"}`);
  return `Waiting for ${needed.join(" and ")}.${votes.length ? ` Allowed by ${votes.join(", ")}.` : ""}`;
}

/** A field for a reason. Enter sends it, Escape goes back. */
function Reason({ label, action, give, back, busy }) {
  const [text, setText] = useState("");
  const field = useRef(null);
  useEffect(() => field.current?.focus(), []);
  return html`<form
    class="reason"
    onSubmit=${(event) => (event.preventDefault(), give(text.trim()))}
    onKeyDown=${(event) => event.key === "Escape" && (event.stopPropagation(), back())}
  >
    <label>${label}<input ref=${field} value=${text} onInput=${(event) => setText(event.target.value)} /></label>
    <button type="submit" class="danger" disabled=${busy}>${action}</button>
    <button type="button" class="quiet" onClick=${back}>Back</button>
  </form>`;
}
