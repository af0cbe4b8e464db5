// What the page shows when it has no content: loading, an error, or the sign-in form.

import { leaveToSignIn, signInPath } from "./server.js";
import { html, useEffect, useRef, useState } from "./vendor/standalone.js";

export function Loading({ words, whole = false }) {
  return html`<div class=${whole ? "state whole" : "state"} role="status">
    <span class="spinner large" aria-hidden="true"></span>
    <p>${words}</p>
  </div>`;
}

export function Broken({ problem, again, whole = false }) {
  return html`<div class=${whole ? "state whole" : "state"} role="alert">
    <h2>${problem.status === 0 ? "The server is not responding" : "This could not be loaded"}</h2>
    <p>${problem.message}</p>
    ${again && html`<button type="button" class="primary" onClick=${again}>Try again</button>`}
  </div>`;
}

export function SignIn({ enter, refused, problem }) {
  const [name, setName] = useState("");
  const [secret, setSecret] = useState("");
  const [busy, setBusy] = useState(false);
  const [provider, setProvider] = useState(null);
  const [away, setAway] = useState("");
  useEffect(() => void signInPath().then(setProvider), []);
  const field = useRef(null);
  useEffect(() => {
    setBusy(false);
    field.current?.focus();
  }, [refused, problem]);
  const submit = (event) => {
    event.preventDefault();
    if (!secret.trim()) return field.current.focus();
    setBusy(true);
    const given = name.trim() ? { name: name.trim(), password: secret } : { token: secret.trim() };
    enter(given).finally(() => setBusy(false));
  };
  const leave = () => leaveToSignIn(provider).catch((error) => setAway(error.message));
  return html`<div class="state whole">
    <form class="signin" onSubmit=${submit}>
      <h1>Sign in</h1>
      <p>Open the newest link that <code>handrail serve</code> printed. If the server has users, sign in with your name and password. If it was started with a token, sign in with the token.</p>
      ${provider && html`<button type="button" class="primary" onClick=${leave}>Sign in with your organisation</button>`}
      ${away && html`<p class="problem" role="alert">${away}</p>`}
      <label for="name">Name</label>
      <input id="name" autocomplete="username" spellcheck=${false} value=${name} onInput=${(event) => setName(event.target.value)} />
      <label for="token">Password or token</label>
      <input
        id="token"
        ref=${field}
        type="password"
        autocomplete="current-password"
        spellcheck=${false}
        value=${secret}
        aria-invalid=${refused ? "true" : undefined}
        aria-describedby=${refused ? "token-problem" : undefined}
        onInput=${(event) => setSecret(event.target.value)}
      />
      ${refused && html`<p id="token-problem" class="problem" role="alert">${problem}</p>`}
      <button type="submit" class="primary" disabled=${busy}>${busy ? "Signing in…" : "Sign in"}</button>
    </form>
  </div>`;
}
