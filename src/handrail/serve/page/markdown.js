// Markdown written by a model, which is untrusted. marked parses it and DOMPurify sanitizes it, block by block, so
// that only the block being written is rendered again and a selection elsewhere survives.

import { Copy } from "./copy.js";
import { DiffView } from "./diff.js";
import { isWhole, parseDiff } from "./diff/parse.js";
import { drawnFor } from "./hooks.js";
import { lexed } from "./limits.js";
import purify from "./vendor/dompurify.js";
import { Marked } from "./vendor/marked.js";
import { html } from "./vendor/standalone.js";

const HARMLESS = /^<\/?(?:br|sub|sup|kbd|b|i|em|strong|details|summary)\s*\/?>$/i;

// A formula stays as it was written. Markdown would take its backslashes and stars away.
const FORMULA = /^(?:\$\$[^$]{1,2000}\$\$|\$(?![\s$])[^$\n]{0,200}[^$\s]\$(?!\d)|\\\([^\n]{1,200}?\\\)|\\\[[^]{1,2000}?\\\])/;

const marked = new Marked({
  gfm: true,
  extensions: [
    {
      name: "formula",
      level: "inline",
      start: (text) => text.match(/\$|\\[([]/)?.index,
      tokenizer: (text) => FORMULA.test(text) && { type: "formula", raw: FORMULA.exec(text)[0] },
      renderer: ({ raw }) => escaped(raw),
    },
  ],
  renderer: {
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    // HTML is shown as text, except for a few elements that only format text.
    html: ({ text }) => (HARMLESS.test(text.trim()) ? text : escaped(text)),
    // Loading an external image would reveal the reader to the image's server. A link with the image's text is shown instead.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
  },
});

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "b", "blockquote", "br", "code", "del", "details", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr",
    "i", "kbd", "li", "ol", "p", "pre", "s", "span", "strong", "sub", "summary", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "colspan", "rowspan"],
  ADD_URI_SAFE_ATTR: ["start", "align", "colspan", "rowspan"], // the values of all others must be such an address as below
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|#)/i,
};

purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
});

function escaped(text) {
  return String(text ?? "").replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}

/** The sanitized HTML of one block. */
export function safe(unsafe) {
  return purify.sanitize(unsafe, ALLOWED);
}

/** The blocks of a text, or null if the text is beyond the limits or can't be parsed. */
function blocksOf(text) {
  try {
    return lexed(marked, text)?.filter((token) => token.type !== "space") ?? null;
  } catch {
    return null;
  }
}

/** The HTML of a block, or the block's text as it was written if it can't be rendered. */
function rendered(block) {
  try {
    return safe(marked.parser([block]));
  } catch {
    return `<pre class="unrendered">${escaped(block.raw)}</pre>`;
  }
}

/** Rendered Markdown. Text that is beyond the limits or can't be parsed is shown as it was written. */
export const Markdown = drawnFor(
  ({ text }) => [text],
  ({ text }) => {
    const blocks = blocksOf(text);
    if (!blocks) return html`<div class="prose"><pre class="unrendered">${text}</pre></div>`;
    return html`<div class="prose">
      ${blocks.map((block, place) =>
        block.type === "code"
          ? html`<${Code} key=${place} text=${block.text} language=${block.lang} />`
          : html`<${Block} key=${place} raw=${block.raw} block=${block} />`,
      )}
    </div>`;
  },
);

const Block = drawnFor(
  ({ raw }) => [raw],
  ({ block }) =>
    block.type === "table"
      ? html`<div class="block table" role="region" aria-label="Table" tabindex="0" dangerouslySetInnerHTML=${{ __html: rendered(block) }}></div>`
      : html`<div class="block" dangerouslySetInnerHTML=${{ __html: rendered(block) }}></div>`,
);

const Code = drawnFor(
  ({ text, language }) => [text, language],
  ({ text, language }) => {
    return html`<figure class="code">
      <figcaption>
        <span>${language ?? ""}</span>
        <${Copy} text=${text} />
      </figcaption>
      ${/^(?:diff|patch)\b/i.test(language ?? "") ? html`<${Diff} text=${text} />` : html`<pre tabindex="0"><code>${text}</code></pre>`}
    </figure>`;
  },
);

const SIGNS = { "+": "is-added", "-": "is-removed", "@": "is-hunk" };

/** A diff that a model wrote. One without the headers of files, or with wrong ones, is shown as its lines. */
function Diff({ text }) {
  if (isWhole(parseDiff(text))) return html`<${DiffView} diff=${text} />`;
  return html`<pre tabindex="0"><code>${text.split("\n").map((line) => html`<span class=${`line ${SIGNS[line[0]] ?? ""}`}>${line}${"\n"}</span>`)}</code></pre>`;
}
