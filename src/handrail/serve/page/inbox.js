// The inbox: questions in other people's runs that this person may vote on.

import { Icon } from "./icons.js";
import { Question } from "./question.js";
import * as server from "./server.js";
import { html, useCallback, useEffect, useState } from "./vendor/standalone.js";

const SECONDS = 3;

/** The open questions that this person may vote on, reloaded every few seconds. `questions` is null if the person may not vote. */
export function useInbox(enabled, signedOut) {
  const [questions, setQuestions] = useState(enabled ? [] : null);
  const reload = useCallback(async () => {
    try {
      setQuestions(await server.inbox());
    } catch (error) {
      if (error.status === 401) signedOut();
    }
  }, []);
  useEffect(() => {
    if (!enabled) return undefined;
    reload();
    const timer = setInterval(reload, SECONDS * 1000);
    return () => clearInterval(timer);
  }, [enabled]);
  return { questions, reload };
}

export function Inbox({ inbox }) {
  const [counted, setCounted] = useState("");
  const waits = (inbox.questions ?? []).filter((question) => !question.voted);
  const conversation = {
    answer: async (question, given) => {
      const { approved, reason } = given.value;
      const { decided } = await server.vote({ question_id: question.id, digest: question.digest, approved, reason: reason ?? "" });
      const what = `${question.payload?.tool ?? question.name} for ${question.principal}`;
      setCounted(decided === null ? `Your vote for ${what} counts. Other people’s votes are still needed.` : `Your vote counts: ${what} is ${decided ? "allowed" : "denied"}.`);
      await inbox.reload();
    },
  };
  return html`<div class="inbox">
    <p class="counted-vote" role="status">${counted && html`<${Icon} name="ok" /> ${counted}`}</p>
    ${waits.length === 0 && html`<p class="nothing">Nothing is waiting for you.</p>`}
    ${waits.map(
      (question) => html`<article key=${question.digest}>
        <p class="soft">${question.principal} asks${question.votes.length ? `; allowed by ${question.votes.join(", ")}` : ""}</p>
        <${Question} question=${{ ...question, mine: true }} conversation=${conversation} />
      </article>`,
    )}
  </div>`;
}
