// An MCP server's page on which a person answers a question that asks for a secret. The address names the question.
//
// People authenticate with the token of their MCP client. The token is kept only while the page is open.

import { SchemaForm } from "./form.js";
import { Rows } from "./rows.js";
import { Loading } from "./states.js";
import { html, render, useEffect, useRef, useState } from "./vendor/standalone.js";

const named = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
let token = "";

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(token && { Authorization: `Bearer ${token}` }) };
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options, headers });
  } catch {
    throw { status: 0, message: "The server is not responding. It may have been stopped, or the network is down." };
  }
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  const told = body.error?.message ?? `the server refused this (${response.status})`;
  throw { status: response.status, message: told.charAt(0).toUpperCase() + told.slice(1), fields: body.error?.fields ?? [] };
}

const load = () => ask(`question?${new URLSearchParams(named)}`);
const send = (answer) => ask("question", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ...named, ...answer }) });

function Answer() {
  const [state, setState] = useState({ phase: "loading" });
  const open = () =>
    load().then(
      (question) => setState({ phase: "asked", question, errors: [] }),
      (error) => setState({ phase: error.status === 401 ? "token" : "broken", problem: token || error.status !== 401 ? error.message : "" }),
    );
  useEffect(() => void open(), []);
  const enter = (given) => {
    token = given;
    return open();
  };
  const answer = (given) => {
    setState({ ...state, busy: true });
    send({ digest: state.question.digest, ...given }).then(
      () => setState({ phase: "done", declined: Boolean(given.decline) }),
      (error) => setState({ ...state, busy: false, errors: error.fields?.length ? error.fields : [{ path: "", message: error.message }] }),
    );
  };
  if (state.phase === "loading") return html`<${Loading} words="Loading the question…" whole />`;
  if (state.phase === "token") return html`<${Token} enter=${enter} problem=${state.problem} />`;
  if (state.phase === "broken") return html`<div class="state whole" role="alert"><h1>The question can’t be shown</h1><p>${state.problem}</p></div>`;
  if (state.phase === "done")
    return html`<div class="state whole" role="status"><h1>${state.declined ? "Declined" : "Answered"}</h1><p>You can close this page and go back to your client.</p></div>`;
  const { question } = state;
  const decline = html`<button type="button" disabled=${state.busy} onClick=${() => answer({ decline: true })}>Decline</button>`;
  return html`<div class="state whole">
    <div class="signin answer">
      <h1>${question.title || "A question"}</h1>
      <p>${question.message}</p>
      <p>A call to <code>${question.tool}</code> by ${question.principal} asks this question. Neither your client nor its model sees the answer. If you did not make this call, decline.</p>
      <${Rows} rows=${question.rows} />
      <${SchemaForm} schema=${question.schema} errors=${state.errors} disabled=${state.busy} submitLabel="Answer" secondary=${decline} onSubmit=${(value) => answer({ value })} />
    </div>
  </div>`;
}

function Token({ enter, problem }) {
  const [given, setGiven] = useState("");
  const field = useRef(null);
  useEffect(() => field.current?.focus(), [problem]);
  const submit = (event) => {
    event.preventDefault();
    if (given.trim()) enter(given.trim());
  };
  return html`<div class="state whole">
    <form class="signin" onSubmit=${submit}>
      <h1>Answer a question</h1>
      <p>Enter the token that your MCP client sends to this server. If the server has users, this is your name and your token: <code>NAME:TOKEN</code>.</p>
      <label for="token">Token</label>
      <input id="token" ref=${field} type="password" autocomplete="off" spellcheck=${false} value=${given} aria-invalid=${problem ? "true" : undefined} aria-describedby=${problem ? "token-problem" : undefined} onInput=${(event) => setGiven(event.target.value)} />
      ${problem && html`<p id="token-problem" class="problem" role="alert">${problem}</p>`}
      <button type="submit" class="primary">Continue</button>
    </form>
  </div>`;
}

render(html`<${Answer} />`, document.getElementById("page"));
