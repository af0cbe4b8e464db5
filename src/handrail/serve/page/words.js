// Times, numbers, prices, statuses and outcomes in words.

export const STATUS = {
  writing: "writing",
  running: "running",
  waiting: "waiting for an answer",
  ok: "done",
  error: "failed",
  denied: "denied",
  cancelled: "cancelled",
  "timed out": "timed out",
  invalid: "invalid",
  conflict: "conflict",
};

export const THREAD_STATUS = {
  idle: "",
  running: "running",
  waiting: "waiting for you",
  failed: "failed",
  cancelled: "stopped",
};

/** How a question ended. An approval that was answered is approved or denied. */
export const OUTCOME = {
  answered: "Answered",
  approved: "Allowed",
  denied: "Denied",
  declined: "Declined",
  cancelled: "Withdrawn",
  "timed out": "Expired unanswered",
};

/** A duration in words: 850 ms, 4.2 s, 3 min 12 s, 2 h 5 min; "" if it is unknown. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "";
  if (seconds < 1) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

/** A number in short form: 940, 12.4k, 1.2M. */
export function count(number) {
  if (number < 1000) return String(number);
  if (number < 1_000_000) return `${trimmed(number / 1000)}k`;
  return `${trimmed(number / 1_000_000)}M`;
}

const trimmed = (number) => (number < 100 ? number.toFixed(1).replace(/\.0$/, "") : String(Math.round(number)));

/** A price in US dollars, with more digits if it is small. */
export function dollars(cost) {
  const value = Number(cost);
  if (value === 0) return "$0";
  if (value < 0.0001) return "<$0.0001";
  return `$${value < 0.1 ? value.toFixed(4) : value.toFixed(2)}`;
}

/** When a message to a run is told to its model: in short, and what that means. */
export const WHEN = {
  "next step": ["Next step", "The model is told before its next step."],
  now: ["Now", "The model stops its current answer, and is told."],
  afterwards: ["Afterwards", "The model is told when it would be done."],
};

/** What a run is ordered to do before its next step. */
export const ORDER = {
  pause: "Pause before the next step",
  "wrap up": "Wrap up in one last turn",
  stop: "Stop after this step",
};

/** How a run ended that somebody stopped. */
export const ENDED = {
  cancelled: "Stopped. Unfinished calls were rolled back.",
  stopped: "Stopped after its step. What it has done stays.",
  "wrapped up": "Told to finish, so its task may not be complete.",
};

/** How long ago a time was, in short form, or its date if that is a week or more; "" if it is not a time. */
export function ago(iso, now = Date.now()) {
  const then = Date.parse(iso);
  if (Number.isNaN(then)) return "";
  const seconds = Math.max(0, (now - then) / 1000);
  if (seconds < 60) return "now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h`;
  if (seconds < 7 * 86_400) return `${Math.floor(seconds / 86_400)} d`;
  return new Date(then).toLocaleDateString(undefined, { day: "numeric", month: "short" });
}

/** A number with its noun: 1 question, 3 questions. */
export function many(number, one, several = `${one}s`) {
  return number === 1 ? `1 ${one}` : `${number} ${several}`;
}
