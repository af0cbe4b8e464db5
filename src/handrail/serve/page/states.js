// What the page shows when it has no content: loading, an error, or the sign-in form.

import { leaveToSignIn, signInWays } from "./server.js";
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

/** A form for each way to sign in that the server has: with an organisation, with a name and a password, or with a token. */
export function SignIn({ enter, refused, problem }) {
  const [ways, setWays] = useState(null);
  const [away, setAway] = useState("");
  useEffect(() => void signInWays().then(setWays), []);
  if (!ways) return html`<${Loading} words="Opening…" whole />`;
  const { provider, secret } = ways;
  const leave = () => leaveToSignIn(provider).catch((error) => setAway(error.message));
  return html`<div class="state whole">
    <div class="signin">
      <h1>Sign in</h1>
      ${provider && html`<button type="button" class="primary" onClick=${leave}>Sign in with your organisation</button>`}
      ${away && html`<p class="problem" role="alert">${away}</p>`}
      ${provider && secret && html`<p class="soft">or</p>`}
      ${secret === "link" && html`<p>Open the newest link that <code>handrail serve</code> printed.</p>`}
      ${secret === "link" && refused && html`<p class="problem" role="alert">${problem}</p>`}
      ${(secret === "password" || secret === "token") && html`<${SecretForm} kind=${secret} enter=${enter} refused=${refused} problem=${problem} />`}
    </div>
  </div>`;
}

/** A form for a name and a password, or for a token. */
function SecretForm({ kind, enter, refused, problem }) {
  const isNamed = kind === "password";
  const [name, setName] = useState("");
  const [secret, setSecret] = useState("");
  const [busy, setBusy] = useState(false);
  const first = useRef(null);
  const field = useRef(null);
  useEffect(() => {
    setBusy(false);
    (refused ? field : first).current?.focus();
  }, [refused, problem]);
  const submit = (event) => {
    event.preventDefault();
    if (!secret.trim()) return field.current.focus();
    setBusy(true);
    enter(isNamed ? { name: name.trim(), password: secret } : { token: secret.trim() }).finally(() => setBusy(false));
  };
  return html`<form onSubmit=${submit}>
    ${isNamed && html`<label for="name">Name</label>
      <input id="name" ref=${first} autocomplete="username" spellcheck=${false} value=${name} onInput=${(event) => setName(event.target.value)} />`}
    <label for="token">${isNamed ? "Password" : "Token"}</label>
    <input
      id="token"
      ref=${(input) => ((field.current = input), isNamed || (first.current = input))}
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
    ${!isNamed && html`<p class="soft">Or open the newest link that <code>handrail serve</code> printed.</p>`}
  </form>`;
}
