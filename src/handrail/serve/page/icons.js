// Icons in the colour of the text beside them. They repeat what the text says, so screen readers skip them.

import { html } from "./vendor/standalone.js";

const PATHS = {
  ok: "M4 10.5 8 14.5 16 6",
  error: "M6 6 14 14M14 6 6 14",
  denied: "M10 3.5a6.5 6.5 0 1 0 0 13a6.5 6.5 0 0 0 0-13M5.5 5.5 14.5 14.5",
  cancelled: "M5 10H15",
  waiting: "M10 4V11M10 14.5V15.5",
  "timed out": "M10 3.5a6.5 6.5 0 1 0 0 13a6.5 6.5 0 0 0 0-13M10 6.5V10L12.5 12",
  invalid: "M10 4V11M10 14.5V15.5",
  conflict: "M4 7H13L10 4M16 13H7L10 16",
  compacted: "M10 2.5V8M7 5.5 10 8.5 13 5.5M10 17.5V12M7 14.5 10 11.5 13 14.5M3 10H17",
  menu: "M3 6H17M3 10H17M3 14H17",
  plus: "M10 4V16M4 10H16",
  close: "M5 5 15 15M15 5 5 15",
  send: "M10 16V4M5 9 10 4 15 9",
  stop: "M6 6H14V14H6Z",
  pause: "M7 5V15M13 5V15",
  "wrap up": "M4 10.5 8 14.5 16 6M16 11V16H4V13.5",
  more: "M6 8 10 12 14 8",
  "next step": "M3 10H13M9 6 13 10 9 14M16.5 5V15",
  now: "M11.5 3 5 11.5H9.5L8.5 17 15 8.5H10.5Z",
  afterwards: "M5 17V3.5H15L12.5 7 15 10.5H5",
  down: "M10 4V16M5 11 10 16 15 11",
  bin: "M4 6H16M8 6V4H12V6M6 6 7 16H13L14 6",
  undo: "M4 8H12a4 4 0 0 1 0 8H8M4 8 7.5 4.5M4 8 7.5 11.5",
  shield: "M10 3 16 5V10C16 13.5 13.5 16 10 17.5C6.5 16 4 13.5 4 10V5Z",
  sun: "M10 6.5a3.5 3.5 0 1 0 0 7a3.5 3.5 0 0 0 0-7M10 2V3.5M10 16.5V18M2 10H3.5M16.5 10H18M4.3 4.3 5.4 5.4M14.6 14.6 15.7 15.7M4.3 15.7 5.4 14.6M14.6 5.4 15.7 4.3",
  moon: "M16 11.5A6.5 6.5 0 0 1 8.5 4a6.5 6.5 0 1 0 7.5 7.5Z",
  auto: "M10 3.5a6.5 6.5 0 1 0 0 13a6.5 6.5 0 0 0 0-13M10 3.5V16.5M10 7H15.5M10 10H16.4M10 13H15.5",
  inbox: "M3 11H7L8.5 13.5H11.5L13 11H17M3 11 5 4H15L17 11V16H3Z",
  usage: "M4 16V10M8 16V6M12 16V12M16 16V4",
  leave: "M12 6V4H4V16H12V14M8 10H17M14 7 17 10 14 13",
  agent: "M10 3.5a2.5 2.5 0 1 0 0 5a2.5 2.5 0 0 0 0-5M4.5 16.5C4.5 13 7 11.5 10 11.5C13 11.5 15.5 13 15.5 16.5",
};

/** The icon with this name. Work in progress is a spinner, and an unknown name is a check mark. */
export function Icon({ name }) {
  if (name === "running" || name === "writing") return html`<span class="spinner" aria-hidden="true"></span>`;
  return html`<svg class="icon" viewBox="0 0 20 20" aria-hidden="true"><path d=${PATHS[name] ?? PATHS.ok} /></svg>`;
}
