// The header (the app's name, the cost so far, the connection) and the tabs.

import { useKept } from "./hooks.js";
import { Icon } from "./icons.js";
import { address, TABS } from "./route.js";
import { spent } from "./store.js";
import { html, useLayoutEffect } from "./vendor/standalone.js";
import { count, dollars } from "./words.js";

export function Header({ about, conversation, onMenu, waitingElsewhere, onRemembered, onSignOut, inbox, onInbox }) {
  const { view, connection } = conversation;
  const { input, output, cost } = spent(view);
  return html`<header class="head">
    ${onMenu &&
    html`<button type="button" class="quiet icon-button" aria-label=${waitingElsewhere > 0 ? `Threads, ${waitingElsewhere} waiting for you` : "Threads"} onClick=${onMenu}>
      <${Icon} name="menu" />${waitingElsewhere > 0 && html`<span class="badge">${waitingElsewhere}</span>`}
    </button>`}
    <div class="who">
      <h1>${about.name}</h1>
      ${about.model && html`<span class="model">${about.model}</span>`}
    </div>
    <p class="connection" role="status">
      ${connection === "reconnecting" && html`<span class="spinner" aria-hidden="true"></span> Reconnecting…`}
    </p>
    ${input + output > 0 &&
    html`<p class=${cost === null ? "spent" : "spent priced"} title="Tokens read and written in this thread, and their cost">
      <span><abbr title="tokens in">↑</abbr> ${count(input)}</span>
      <span><abbr title="tokens out">↓</abbr> ${count(output)}</span>
      ${cost !== null && html`<span>${dollars(cost)}</span>`}
    </p>`}
    ${inbox !== null &&
    html`<button type="button" class="quiet icon-button" aria-label=${inbox ? `Inbox, ${inbox} waiting for you` : "Inbox"} title="Inbox" onClick=${onInbox}>
      <${Icon} name="inbox" />${inbox > 0 && html`<span class="badge">${inbox}</span>`}
    </button>`}
    <button type="button" class="quiet icon-button" aria-label="Remembered approvals" title="Remembered approvals" onClick=${onRemembered}>
      <${Icon} name="shield" />
    </button>
    <${Theme} />
    ${onSignOut &&
    html`<button type="button" class="quiet icon-button" aria-label="Sign out" title=${`Sign out ${about.principal}`} onClick=${onSignOut}>
      <${Icon} name="leave" />
    </button>`}
  </header>`;
}

const THEMES = { auto: "light", light: "dark", dark: "auto" };

function Theme() {
  const [theme, setTheme] = useKept("handrail.theme", "auto");
  useLayoutEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }, [theme]);
  const names = { auto: "system", light: "light", dark: "dark" };
  return html`<button
    type="button"
    class="quiet icon-button"
    aria-label=${`Theme: ${names[theme]}`}
    title=${`Theme: ${names[theme]}`}
    onClick=${() => setTheme(THEMES[theme] ?? "auto")}
  >
    <${Icon} name=${{ auto: "auto", light: "sun", dark: "moon" }[theme]} />
  </button>`;
}

const NAMES = { chat: "Chat", files: "Files", timeline: "Timeline" };

export function Tabs({ id, tab, conversation }) {
  if (conversation.phase === "new") return html`<div class="tabs" role="tablist" aria-label="Views"><${Tab} id=${id} name="chat" chosen /></div>`;
  const pressed = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = TABS[(TABS.indexOf(tab) + step + TABS.length) % TABS.length];
    location.hash = address(id, next);
    document.getElementById(`tab-${next}`)?.focus();
  };
  return html`<div class="tabs" role="tablist" aria-label="Views" onKeyDown=${pressed}>
    ${TABS.map((name) => html`<${Tab} key=${name} id=${id} name=${name} chosen=${name === tab} />`)}
  </div>`;
}

function Tab({ id, name, chosen }) {
  return html`<button
    type="button"
    role="tab"
    id=${`tab-${name}`}
    aria-selected=${String(chosen)}
    aria-controls="panel"
    tabindex=${chosen ? 0 : -1}
    onClick=${() => chosen || (location.hash = address(id, name))}
  >
    ${NAMES[name]}
  </button>`;
}
