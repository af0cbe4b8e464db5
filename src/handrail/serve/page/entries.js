// What happened, in the order it came: in the conversation, and likewise in each nested agent.

import { Card } from "./card.js";
import { drawnFor } from "./hooks.js";
import { Icon } from "./icons.js";
import { Markdown } from "./markdown.js";
import { html } from "./vendor/standalone.js";
import { Agent } from "./agent.js";

export function Entries({ scope, view, conversation }) {
  return (view.entries[scope] ?? []).map(({ kind, id }) => {
    if (kind === "call") return html`<${Card} key=${id} id=${id} view=${view} conversation=${conversation} />`;
    if (kind === "agent") return html`<${Agent} key=${id} agent=${view.agents[id]} view=${view} conversation=${conversation} />`;
    if (kind === "note") return html`<${Note} key=${id} note=${view.notes[id]} />`;
    if (kind === "activity") return html`<${Activity} key=${id} activity=${view.activities[id]} />`;
    return html`<${Message} key=${id} kind=${kind} message=${view.messages[id]} />`;
  });
}

const Message = drawnFor(
  ({ message }) => [message],
  ({ kind, message }) => {
    if (!message) return null;
    if (kind === "user") return html`<div class="message user"><p class="unseen">You:</p><p class="said">${message.text}</p></div>`;
    if (kind === "reasoning") {
      return html`<details class="reasoning"><summary>${message.open ? "Thinking…" : "Thought"}</summary><${Markdown} text=${message.text} /></details>`;
    }
    return html`<div class=${`message assistant${message.open ? " open" : ""}`} aria-busy=${message.open ? "true" : undefined}><${Markdown} text=${message.text} /></div>`;
  },
);

const Note = drawnFor(
  ({ note }) => [note],
  ({ note }) =>
    note.status === "cancelled"
      ? html`<p class="note cancelled"><${Icon} name="cancelled" /> Stopped. What was under way has been undone.</p>`
      : html`<div class="note failed" role="alert"><${Icon} name="error" /><div><strong>The run failed.</strong><p>${note.text}</p></div></div>`,
);

/** An activity that is no call's progress: its type and what it says. */
const Activity = drawnFor(
  ({ activity }) => [activity],
  ({ activity }) => html`<div class="activity"><span class="soft">${activity.type}</span> ${activity.content?.message ?? JSON.stringify(activity.content)}</div>`,
);
