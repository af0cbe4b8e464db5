// The root component: signs people in, and lays out the open thread with the header, the tabs and the list of threads.

import { Approvals } from "./approvals.js";
import { ChatPane } from "./chat.js";
import { Conversation } from "./conversation.js";
import { FilesPane, TimelinePane } from "./panes.js";
import { Header, Tabs } from "./header.js";
import { Inbox, useInbox } from "./inbox.js";
import { useMedia } from "./hooks.js";
import { loadRenderers } from "./renderers.js";
import { showQuestion, toQuestion } from "./question.js";
import { address, takeLink, useRoute } from "./route.js";
import * as server from "./server.js";
import { Sheet } from "./sheet.js";
import { Broken, Loading, SignIn } from "./states.js";
import { ThreadList, useThreads } from "./threads.js";
import { Usage } from "./usage.js";
import { html, useCallback, useEffect, useReducer, useRef, useState } from "./vendor/standalone.js";

const LISTED = new Set(["RUN_STARTED", "RUN_FINISHED", "RUN_ERROR"]);

export function App() {
  const [entry, setEntry] = useState({ phase: "loading" });
  const enter = useCallback(async (given) => {
    try {
      if (given) await server.login(given);
      const about = await server.about();
      if (about.renderers) await loadRenderers(new URL(about.renderers, location.href).href);
      setEntry({ phase: "ready", about });
    } catch (error) {
      if (error.status === 401 || error.status === 429) setEntry({ phase: "signin", refused: Boolean(given), problem: error.message });
      else setEntry({ phase: "broken", problem: error });
    }
  }, []);
  useEffect(() => void enter(takeLink(server.takeRoute())), []);

  if (entry.phase === "loading") return html`<${Loading} words="Opening…" whole />`;
  if (entry.phase === "signin") return html`<${SignIn} enter=${enter} refused=${entry.refused} problem=${entry.problem} />`;
  if (entry.phase === "broken") return html`<${Broken} problem=${entry.problem} again=${() => enter(null)} whole />`;
  const signedOut = () => setEntry({ phase: "signin" });
  const signOut = () => server.logout().then(signedOut, (error) => setEntry({ phase: "broken", problem: error }));
  return html`<${Frame} about=${entry.about} signedOut=${signedOut} signOut=${entry.about.session ? signOut : null} />`;
}

function Frame({ about, signedOut, signOut }) {
  const route = useRoute();
  const narrow = useMedia("(max-width: 760px)");
  const [menu, setMenu] = useState(false);
  const [remembered, setRemembered] = useState(false);
  const [counting, setCounting] = useState(false);
  const [reading, setReading] = useState(false);
  const [missing, setMissing] = useState("");
  useEffect(() => {
    // A notification's link names a question. Where it is shown depends on who has signed in.
    setMissing("");
    if (route.question === undefined) return;
    const found = ({ thread }) => {
      if (thread === null) setReading(true);
      else location.replace(address(thread));
      showQuestion(route.question);
    };
    const failed = (error) => (error.status === 401 ? signedOut() : setMissing(error.message));
    server.placeOf(route.question ?? "").then(found, failed);
  }, [route.question]);
  const inbox = useInbox(about.people && about.actions.includes("vote"), signedOut);
  const list = useThreads(signedOut);
  const conversation = useConversation(route, signedOut, (event) => {
    if (LISTED.has(event.type) || event.name?.startsWith("handrail.question")) list.reload();
  });
  conversation.mayAnswer = about.actions.includes("run");
  const { view } = conversation;
  const waiting = Object.keys(view.questions).length;

  const title = view.title || list.threads?.find((thread) => thread.id === route.id)?.title || about.name;
  useEffect(() => {
    document.title = `${waiting ? `(${waiting}) ` : ""}${title}`;
  }, [waiting, title]);
  useEffect(() => setMenu(false), [route.id, narrow]);
  // All tabs share the session, so a tab that shows one person's threads must not send requests as another.
  const compare = () => server.about().then((now) => now.principal === about.principal || location.reload(), (error) => error.status === 401 && signedOut());
  useEffect(() => server.onSession(compare), []);
  useEffect(() => {
    // Alt+Q goes to the next open question, wherever the focus is.
    const pressed = (event) => {
      if (event.altKey && event.code === "KeyQ") toQuestion();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);

  const say = async (text, files) => {
    await conversation.say(text, files);
    // A new thread gets its address with its first message.
    if (route.unsaid) history.replaceState(null, "", address(route.id));
    list.reload();
  };
  const isAlone = conversation.phase === "new" && list.threads?.length === 0 && !list.words;
  const tabbed = conversation.phase === "new" ? {} : { role: "tabpanel", "aria-labelledby": `tab-${route.tab}` };
  const threads = html`<${ThreadList} list=${list} current=${route.id} live=${view} onForgotten=${(id) => id === route.id && (location.hash = "#/")} />`;

  return html`<div class=${isAlone ? "frame alone" : "frame"}>
    <a class="skip" href="#composer" onClick=${skip}>Skip to the message field</a>
    ${isAlone ? null : narrow
      ? html`<${Sheet} open=${menu} onClose=${() => setMenu(false)} label="Threads" side="left">${threads}<//>`
      : html`<nav class="sidebar" aria-label="Threads">${threads}</nav>`}
    <div class="main">
      <${Header}
        about=${about}
        conversation=${conversation}
        onMenu=${narrow && !isAlone ? () => setMenu(true) : null}
        waitingElsewhere=${list.waiting - (view.status === "waiting" ? 1 : 0)}
        onRemembered=${() => setRemembered(true)}
        onUsage=${() => setCounting(true)}
        onSignOut=${signOut}
        inbox=${inbox.questions?.filter((question) => !question.voted).length ?? null}
        onInbox=${() => setReading(true)}
      />
      <${Tabs} id=${route.id} tab=${route.tab} conversation=${conversation} />
      <main id="panel" ...${tabbed} class="panel">
        ${missing && html`<p class="problem" role="alert">${missing}</p>`}
        ${route.tab === "chat" && html`<${ChatPane} key=${route.id} about=${about} conversation=${conversation} say=${say} />`}
        ${route.tab === "files" && html`<${FilesPane} key=${route.id} conversation=${conversation} />`}
        ${route.tab === "timeline" && html`<${TimelinePane} key=${route.id} conversation=${conversation} />`}
      </main>
    </div>
    <${Sheet} open=${reading} onClose=${() => setReading(false)} label="Inbox" side="right">${reading && html`<${Inbox} inbox=${inbox} />`}<//>
    <${Sheet} open=${counting} onClose=${() => setCounting(false)} label="Usage" side="right">
      ${counting && html`<${Usage} mayReadAll=${about.people && about.actions.includes("audit")} />`}
    <//>
    <${Sheet} open=${remembered} onClose=${() => setRemembered(false)} label="Remembered approvals" side="right">
      ${remembered && html`<${Approvals} id=${route.id} unsaid=${conversation.phase === "new"} />`}
    <//>
  </div>`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("composer")?.focus();
}

/** The conversation with this id. It is opened, unless it is new, and closed when another one is shown. */
function useConversation({ id, unsaid }, signedOut, told) {
  const [, draw] = useReducer((number) => number + 1, 0);
  const latest = useRef(null);
  latest.current = { signedOut, told };
  const held = useRef(null);
  if (held.current?.id !== id) {
    held.current?.close();
    held.current = new Conversation(id, {
      unsaid,
      changed: () => draw(0),
      signedOut: () => latest.current.signedOut(),
      told: (event) => latest.current.told(event),
    });
  }
  useEffect(() => void (unsaid || held.current.open()), [id]);
  useEffect(() => () => held.current.close(), []);
  return held.current;
}
