// The open thread: keeps its view up to date, and sends messages, answers and undos.

import { encoded } from "./attachments.js";
import * as server from "./server.js";
import { blank, fromSnapshot, reduce, withoutSaid, withQueued, withRun, withSaid } from "./store.js";

const QUIET = 40_000; // Milliseconds without data after which a connection is considered dead. The server pings every 15 s.
const LONGEST = 15_000; // The longest pause between two attempts to connect, in milliseconds.

/**
 * A thread that the page shows and follows.
 *
 * `phase`: "loading", "new" (no messages yet), "ready" or "broken" (with `problem`).
 * `connection`: "none", "live" or "reconnecting". `changed()` is called after each change; for events, at most once per frame.
 */
export class Conversation {
  constructor(id, { unsaid, changed, signedOut, told }) {
    this.id = id;
    this.view = blank(id);
    this.phase = unsaid ? "new" : "loading"; // The server does not know the id of a new thread yet.
    this.connection = "none";
    this.problem = null;
    this.changed = changed;
    this.signedOut = signedOut;
    this.seen = new Set(); // The approvals whose head and end have been on screen, by id and digest.
    this.mayAnswer = true;
    this.told = told; // Called with each event, to refresh the list of threads.
    this.queue = [];
    this.following = null;
    this.closed = false;
  }

  /**
   * Load the thread and follow it. `begun` is its active run, which may be too new for the snapshot.
   * If the thread is already shown and can't be loaded now, tries again.
   */
  async open(begun = null) {
    this.following?.abort();
    this.following = null;
    this.queue = [];
    try {
      const snapshot = await server.snapshot(this.id);
      if (this.closed) return;
      this.view = fromSnapshot(snapshot);
      if (begun) this.view = withRun(this.view, begun);
      this.phase = "ready";
      this.problem = null;
    } catch (error) {
      if (this.closed) return;
      if (error.status === 401) return this.signedOut();
      if (error.kind === "ThreadUnknown") {
        this.phase = "new";
      } else if (this.phase === "ready" && error.kind !== "ThreadElsewhere") {
        // The thread was already shown, so keep it on screen and try again.
        this.connected("reconnecting");
        await pause(1000 + Math.random() * 1000);
        return this.closed ? undefined : this.open();
      } else {
        this.phase = "broken";
        this.problem = error;
      }
    }
    this.changed();
    if (this.phase === "ready") this.follow();
  }

  close() {
    this.closed = true;
    this.following?.abort();
  }

  async follow() {
    const stop = new AbortController();
    this.following = stop;
    let tries = 0;
    while (!stop.signal.aborted) {
      const known = this.view.lastEventId;
      let heard = 0;
      try {
        for await (const { id, event } of watched(this.id, known, stop.signal)) {
          tries = 0;
          this.connected("live");
          if (!event) continue;
          heard += 1;
          if (event.type === "MESSAGES_SNAPSHOT" && known && heard <= 2) {
            // The server no longer has the events that the page has missed, so load a new snapshot.
            return void this.open();
          }
          this.take(id, event);
        }
      } catch (error) {
        if (stop.signal.aborted) return;
        if (error.status === 401) return this.signedOut();
        if (error.status === 404) return void this.open();
      }
      if (stop.signal.aborted) return;
      this.connected("reconnecting");
      await pause(Math.min(LONGEST, 300 * 2 ** tries++) * (0.5 + Math.random()), stop.signal);
    }
  }

  connected(connection) {
    if (this.connection === connection) return;
    this.connection = connection;
    this.changed();
  }

  take(id, event) {
    this.queue.push([id, event]);
    if (this.queue.length === 1) frame(() => this.drain());
  }

  drain() {
    if (this.closed) return;
    const taken = this.queue;
    this.queue = [];
    let view = this.view;
    for (const [id, event] of taken) {
      view = reduce(view, event);
      if (id) view = { ...view, lastEventId: id };
    }
    this.view = view;
    this.changed();
    for (const [, event] of taken) this.told(event);
  }

  /** Send a message. The first message of a new thread creates it on the server. Throws if the message is not accepted. */
  async say(text, files = []) {
    const { status } = this.view;
    const said = `said-${Date.now()}`;
    if (this.phase === "ready") {
      // Show the message at once, because the first events may arrive before the server's response.
      this.view = { ...withSaid(this.view, said, text, files.map(shown)), status: "running" };
      this.changed();
    }
    let begun;
    try {
      begun = await this.guarded(server.say(this.id, text, await Promise.all(files.map(encoded))));
    } catch (error) {
      this.view = withoutSaid(this.view, said, status);
      this.changed();
      throw error;
    }
    if (this.phase !== "ready") return this.open(begun.run_id);
    this.view = withRun(this.view, begun.run_id);
  }

  /** Say something to the run while it works. If it has just ended, this starts the next run. */
  async send(text, when, id) {
    try {
      await this.queued(server.send(this.id, this.view.runId, { text, when, id }));
    } catch (error) {
      if (error.kind !== "MessageRefused") throw error;
      await this.say(text);
    }
  }

  edit(message, text, when) {
    return this.queued(server.edit(this.id, message, { text, when }));
  }

  withdraw(message) {
    return this.queued(server.withdraw(this.id, message));
  }

  /** Order the run to pause, wrap up or stop before its next step, or continue it. */
  order(given) {
    return this.queued(server.order(this.id, this.view.runId, given));
  }

  /** Show a message to the run as the server returns it. */
  async queued(promise) {
    const message = await this.guarded(promise);
    if (message) this.view = withQueued(this.view, message);
    this.changed();
  }

  answer(question, given) {
    return this.guarded(server.answer(this.id, { question_id: question.id, digest: question.digest, ...given }));
  }

  /** Note that the whole of a question has been on screen. */
  saw(question) {
    this.seen.add(`${question.id} ${question.digest}`);
    this.changed();
  }

  /** Allow these approvals once, each with the digest that was shown. Returns the errors of those that were not accepted. */
  async allow(questions) {
    const value = { approved: true, remember: "once" };
    const done = await Promise.allSettled(questions.map((question) => this.answer(question, { outcome: "answered", value })));
    return done.filter(({ status }) => status === "rejected").map(({ reason }) => reason);
  }

  cancel() {
    return this.guarded(server.cancel(this.id));
  }

  undo(callId) {
    return this.guarded(server.undo(this.id, callId));
  }

  async guarded(promise) {
    try {
      return await promise;
    } catch (error) {
      if (error.status === 401) this.signedOut();
      throw error;
    }
  }
}

/** Yields the events of a thread. A connection that is silent for too long is closed. */
async function* watched(id, after, signal) {
  const dead = new AbortController();
  let timer = setTimeout(() => dead.abort(), QUIET);
  try {
    for await (const item of server.events(id, after, AbortSignal.any([signal, dead.signal]))) {
      clearTimeout(timer);
      timer = setTimeout(() => dead.abort(), QUIET);
      yield item;
    }
  } finally {
    clearTimeout(timer);
    dead.abort();
  }
}

/** Calls `act` before the next frame, or soon if the page is hidden, because a hidden page draws no frames. */
function frame(act) {
  if (document.hidden) setTimeout(act, 200);
  else requestAnimationFrame(act);
}

/** Waits for this long, or until the network is back or the signal aborts. */
function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      removeEventListener("online", done);
      resolve();
    };
    const timer = setTimeout(done, milliseconds);
    addEventListener("online", done);
    signal?.addEventListener("abort", done, { once: true });
  });
}

/** A chosen file as it is shown until the server has it. */
const shown = (file) => ({ kind: "file", name: file.name, size: file.size, url: "" });
