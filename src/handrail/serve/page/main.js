// Starts the page.

import { App } from "./app.js";
import { html, render } from "./vendor/standalone.js";

render(html`<${App} />`, document.getElementById("page"));
