// What runs used and cost: one's own, or everybody's for those with the right, divided by day, model, tool or person.

import * as server from "./server.js";
import { Loading } from "./states.js";
import { html, useEffect, useState } from "./vendor/standalone.js";
import { count, dollars, many } from "./words.js";

const KEYS = { day: "Day", model: "Model", tool: "Tool", person: "Person" };
const DAYS = [1, 7, 30, 90];

export function Usage({ mayReadAll }) {
  const [key, setKey] = useState("day");
  const [days, setDays] = useState(7);
  const [everybody, setEverybody] = useState(false);
  const [lines, setLines] = useState(null);
  const [problem, setProblem] = useState(null);
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
  useEffect(() => {
    let isCurrent = true;
    setLines(null);
    setProblem(null);
    server.usage(key, days, zone, everybody).then(
      (found) => isCurrent && setLines(found),
      (error) => isCurrent && setProblem(error.message),
    );
    return () => {
      isCurrent = false;
    };
  }, [key, days, everybody]);
  return html`<div class="approvals">
    <p>
      By <select aria-label="By" value=${key} onChange=${(event) => setKey(event.target.value)}>${Object.entries(KEYS).map(([value, name]) => html`<option value=${value}>${name}</option>`)}</select>${" "}
      of the last <select aria-label="Days" value=${days} onChange=${(event) => setDays(Number(event.target.value))}>${DAYS.map((each) => html`<option value=${each}>${each === 1 ? "day" : `${each} days`}</option>`)}</select>
    </p>
    ${mayReadAll && html`<p><label><input type="checkbox" checked=${everybody} onChange=${(event) => setEverybody(event.target.checked)} /> Everybody’s</label></p>`}
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${lines === null && !problem && html`<${Loading} words="Adding up…" />`}
    ${lines?.length === 0 && html`<p class="nothing">Nothing was used in this time.</p>`}
    <ul aria-label="What was used">
      ${(lines ?? []).map(
        (line) => html`<li key=${line[key]}>
          <p><strong>${line[key] || (key === "tool" ? "no tool" : "calls")}</strong> ${dollars(line.cost)}${line.unpriced > 0 && html` <abbr title="The price of some requests is not known">+ ?</abbr>`}</p>
          <p class="soft">${[many(line.requests, "request"), `${count(line.input)} tokens in`, `${count(line.output)} out`, line.calls && many(line.calls, "call"), line.failed && `${line.failed} failed`].filter(Boolean).join(" · ")}</p>
        </li>`,
      )}
    </ul>
  </div>`;
}
