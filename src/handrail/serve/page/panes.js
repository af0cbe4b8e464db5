// The tabs beside the chat: file changes, and the timeline of a run.

import { FilesPanel } from "./files.js";
import * as server from "./server.js";
import { Broken, Loading } from "./states.js";
import { Timeline } from "./timeline.js";
import { html, useEffect, useState } from "./vendor/standalone.js";
import { duration } from "./words.js";

/**
 * The result of `load` as `{value, problem}`. `load` is called again when one of `facts` changes. The old value stays
 * until a new one arrives.
 */
function useLoaded(load, facts) {
  const [state, setState] = useState({ value: null, problem: null });
  useEffect(() => {
    let gone = false;
    load().then(
      (value) => gone || setState({ value, problem: null }),
      (problem) => gone || setState((before) => ({ ...before, problem })),
    );
    return () => {
      gone = true;
    };
  }, facts);
  return state;
}

export function FilesPane({ conversation }) {
  const { view, id, phase } = conversation;
  const [busy, setBusy] = useState(null);
  const [refused, setRefused] = useState(null);
  const { value, problem } = useLoaded(
    () => (phase === "new" ? Promise.resolve([]) : server.files(id)),
    [id, phase, view.changes, view.status],
  );
  const undo = async (callId) => {
    setBusy(callId);
    setRefused(null);
    try {
      await conversation.undo(callId);
    } catch (error) {
      setRefused(error.message);
    }
    setBusy(null);
  };
  if (problem && !value) return html`<${Broken} problem=${problem} />`;
  if (!value) return html`<${Loading} words="Loading changes…" />`;
  return html`<div class="pane">
    ${refused && html`<p class="problem" role="alert">${refused}</p>`}
    <${FilesPanel} changes=${value} onUndo=${undo} busy=${busy} />
  </div>`;
}

export function TimelinePane({ conversation }) {
  const { view, id, phase } = conversation;
  const [chosen, setChosen] = useState(null);
  const run = chosen ?? view.runs.at(-1)?.id ?? null;
  const { value, problem } = useLoaded(
    () => (run ? server.runTree(id, run) : Promise.resolve(undefined)),
    [id, run, view.changes, view.status],
  );
  if (phase === "loading") return html`<${Loading} words="Loading the run…" />`;
  if (!run) return html`<div class="state"><h2>No run yet</h2><p>Send a message to see how long each step takes.</p></div>`;
  return html`<div class="pane">
    ${view.runs.length > 1 &&
    html`<label class="chooser">
      Run
      <select value=${run} onChange=${(event) => setChosen(event.target.value)}>
        ${view.runs.map(
          (each, place) => html`<option key=${each.id} value=${each.id}>
            ${place + 1} · ${each.status}${each.seconds ? ` · ${duration(each.seconds)}` : ""}
          </option>`,
        )}
      </select>
    </label>`}
    ${problem && !value && html`<${Broken} problem=${problem} />`}
    ${!value && !problem && html`<${Loading} words="Loading the run…" />`}
    ${value && html`<${Timeline} tree=${value} />`}
  </div>`;
}
