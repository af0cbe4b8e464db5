// An approval question: what the call would do, why it needs approval, and the choices. Allow and Deny come last, always
// in the same places, and each has a keyboard shortcut.

import { DiffView } from "./diff.js";
import { Icon } from "./icons.js";
import { Menu } from "./menu.js";
import { Rows } from "./rows.js";
import { html, useEffect, useRef, useState } from "./vendor/standalone.js";

export function Approval({ question, give, busy, keys, children }) {
  const { tool, reason, scopes, exact, diff } = question.payload ?? {};
  const name = tool ?? question.name;
  const [reasoning, setReasoning] = useState(false);
  const allow = (more) => give({ outcome: "answered", value: { approved: true, ...more } });
  const deny = (why) => give({ outcome: "answered", value: { approved: false, ...(why ? { reason: why } : {}) } });
  const acts = { a: () => allow({ remember: "once" }), d: () => deny(""), r: () => setReasoning(true) };

  // Shortcuts work only while the focus is in this question and not in a field, so that nothing is allowed by accident.
  const others = question.mine ? [] : (question.quorums ?? []); // other people vote on it in their inboxes
  keys.current = (event) => {
    if (busy || others.length || event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, textarea, select")) return;
    const act = acts[event.key.toLowerCase()];
    if (act) {
      event.preventDefault();
      act();
    }
  };
  return html`<div class="approval-body">
    <h3>Allow <code>${name}</code>?</h3>
    ${(question.message || reason) && html`<p class="why"><bdi>${question.message || reason}</bdi></p>`}
    <${Rows} rows=${question.rows} />
    ${diff && html`<${DiffView} diff=${diff} />`}
    ${children}
    ${question.before && html`<${AskedAgain} before=${question.before} now=${question} />`}
    ${others.length
      ? html`<p class="others" role="status"><${Icon} name="waiting" /> ${waitingFor(others, question.votes ?? [])}</p>`
      : reasoning
        ? html`<${Reason} label="Reason (the model sees it)" action="Deny" give=${deny} back=${() => setReasoning(false)} busy=${busy} />`
        : html`<div class="choices">
            <button type="button" class="primary" disabled=${busy} aria-keyshortcuts="A" onClick=${acts.a}>Allow once <kbd aria-hidden="true">A</kbd></button>
            <button type="button" class="danger" disabled=${busy} aria-keyshortcuts="D" onClick=${acts.d}>Deny <kbd aria-hidden="true">D</kbd></button>
            <span class="more-choices">
              ${scopes && html`<${Menu} label="Always…" name="What to allow without asking" className="always" disabled=${busy} items=${always(name, scopes, exact, allow)}>Always… <${Icon} name="more" /><//>`}
              <button type="button" class="quiet" disabled=${busy} aria-keyshortcuts="R" onClick=${acts.r}>Deny with a reason <kbd aria-hidden="true">R</kbd></button>
            </span>
          </div>`}
  </div>`;
}

/** What can be allowed from now on, each with a sentence that says what will happen without asking. */
function always(tool, scopes, exact, allow) {
  const items = scopes.map((scope) => ({
    words: html`Always allow <q>${scope}</q>`,
    note: `In this thread, nobody is asked any more about a call that is covered by “${scope}”, whatever its other arguments.`,
    act: () => allow({ remember: "scope", scope }),
  }));
  if (exact === false) return items;
  const note = `In this thread, nobody is asked any more about ${tool} with exactly these arguments and these changes.`;
  return [{ words: "Always allow this exact call", note, act: () => allow({ remember: "exact" }) }, ...items];
}

/** Says what has changed since the person was asked before about the same call. */
function AskedAgain({ before, now }) {
  const changed = changes(before, now);
  return html`<div class="asked-again" role="status">
    <p><strong>You are asked again.</strong> ${changed.length ? "Since you were asked before, this has changed:" : "What you see is as it was before, but something else has changed."}</p>
    ${changed.length > 0 && html`<ul>${changed.map((words) => html`<li><bdi>${words}</bdi></li>`)}</ul>`}
  </div>`;
}

/** What differs between two versions of a question, in words. */
export function changes(before, now) {
  const was = new Map((before.rows ?? []).map((row) => [row.name, row]));
  const is = new Map((now.rows ?? []).map((row) => [row.name, row]));
  const found = [];
  for (const name of new Set([...was.keys(), ...is.keys()])) {
    const [old, fresh] = [was.get(name), is.get(name)];
    if (!old) found.push(`${name} was added`);
    else if (!fresh) found.push(`${name} was removed`);
    else if (whole(old) !== whole(fresh)) found.push(whole(old).length + whole(fresh).length > 120 ? `${name} is different` : `${name} was ${whole(old)}, and is ${whole(fresh)}`);
  }
  if ((before.payload?.diff ?? "") !== (now.payload?.diff ?? "")) found.push(now.payload?.diff ? "The diff is different." : "There is no diff any more.");
  if (before.message !== now.message) found.push(`The reason was: ${before.message}`);
  return found;
}

const whole = ({ text, rest = "" }) => text + rest;

/** Says who must approve and who has: "Waiting for 2 people with the role finance. Allowed by fay." */
function waitingFor(quorums, votes) {
  const needed = quorums.map(({ role, approvals, then }) => `${approvals} ${approvals === 1 ? "person" : "people"} ${role ? `with the role ${role}` : "who may approve for others"}${then ? `, later also ${then}` : ""}`);
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
