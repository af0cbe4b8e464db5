// Shows one component of the page at a time, with the props that a test passes, and records its callbacks.

import { html, render } from "/assets/vendor/standalone.js";
import { DiffView } from "/assets/diff.js";
import { FilesPanel } from "/assets/files.js";
import { SchemaForm } from "/assets/form.js";
import { QuestionForm, register, rendererFor } from "/assets/renderers.js";
import { Timeline } from "/assets/timeline.js";

const said = [];
const note = (name) => (value) => void said.push([name, value ?? null]);

register("colour", ({ question, submit, decline }) => html`<div>
  <p>${question.payload.words}</p>
  <button onClick=${() => submit({ colour: "red" })}>Red</button><button onClick=${() => decline("none of these")}>None</button>
</div>`);
register("broken", () => {
  throw new Error("no such paint");
});

const shows = {
  form: (props) => html`<${SchemaForm} ...${props} onSubmit=${note("submit")} onChange=${note("change")} />`,
  diff: (props) => html`<${DiffView} ...${props} onMode=${note("mode")} />`,
  timeline: (props) => html`<${Timeline} ...${props} />`,
  files: (props) => html`<${FilesPanel} ...${props} onUndo=${(id) => {
    said.push(["undo", id]);
    if (props.refuse) throw new Error(props.refuse);
  }} />`,
  question: (props) => html`<${rendererFor(props.question.name) ?? QuestionForm} ...${props} submit=${note("submit")}
    decline=${note("decline")} onDraft=${note("draft")} />`,
};

const root = document.getElementById("widget");
let shown = null;

// With `anew` false, the component that is shown gets the new props. Otherwise a new one replaces it.
window.show = (name, props, { anew = true } = {}) => {
  if (anew) {
    render(null, root);
    said.length = 0;
  }
  shown = anew ? { name, props } : { name: shown.name, props: { ...shown.props, ...props } };
  render(shows[shown.name](shown.props), root);
};
window.said = said;
window.ready = true;
