// A question's payload as rows of text from the server, in which every character is visible and numbers are exact.

import { html } from "./vendor/standalone.js";

/** Rows of names and text. A long value ends with the number of folded characters, and a click shows them. */
export function Rows({ rows }) {
  if (!rows?.length) return null;
  return html`<dl class="values rows">
    ${rows.map(
      ({ name, text, rest, folded }) => html`<div key=${name}>
        <dt><bdi>${name}</bdi></dt>
        <dd>
          <bdi>${text}</bdi>${rest &&
          html`<details class="fold">
            <summary>${folded.toLocaleString("en")} more characters</summary>
            <bdi>${rest}</bdi>
          </details>`}
        </dd>
      </div>`,
    )}
  </dl>`;
}
