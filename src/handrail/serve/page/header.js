// The header (the app's name, the cost so far, the connection, the person's menu) and the tabs.

import { useKept } from "./hooks.js";
import { Icon } from "./icons.js";
import { Menu } from "./menu.js";
import { address, TABS } from "./route.js";
import { spent } from "./store.js";
import { html, useLayoutEffect } from "./vendor/standalone.js";
import { count, dollars } from "./words.js";

export function Header({ about, conversation, onMenu, waitingElsewhere, onRemembered, onUsage, onSignOut, inbox, onInbox }) {
  const { view, connection } = conversation;
  const { input, output, cost } = spent(view);
  const [theme, setTheme] = useTheme();
  const items = [
    { words: "Remembered approvals", icon: "shield", act: onRemembered },
    { words: "Usage", icon: "usage", act: onUsage },
    ...Object.entries(THEMES).map(([name, words]) => ({ words, icon: THEME_ICONS[name], checked: theme === name, act: () => setTheme(name) })),
    ...(onSignOut ? [{ words: "Sign out", icon: "leave", act: onSignOut }] : []),
  ];
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
    html`<button type="button" class="quiet" aria-label=${inbox ? `Inbox, ${inbox} waiting for you` : "Inbox"} onClick=${onInbox}>
      <${Icon} name="inbox" /><span class="wide-only">Inbox</span>${inbox > 0 && html`<span class="badge">${inbox}</span>`}
    </button>`}
    <${Menu} label=${`Menu of ${about.principal}`} className="person" items=${items}>
      <${Icon} name="agent" /><span class="person-name">${about.principal}</span><${Icon} name="more" />
    <//>
  </header>`;
}

const THEMES = { auto: "System theme", light: "Light theme", dark: "Dark theme" };
const THEME_ICONS = { auto: "auto", light: "sun", dark: "moon" };

/** The chosen theme, and a function that changes it. */
function useTheme() {
  const [theme, setTheme] = useKept("handrail.theme", "auto");
  useLayoutEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }, [theme]);
  return [theme, setTheme];
}

const NAMES = { chat: "Chat", files: "Files", timeline: "Timeline" };

export function Tabs({ id, tab, conversation }) {
  if (conversation.phase === "new") return null;
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
