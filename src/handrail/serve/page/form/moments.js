// A date and time, with the offset it is meant in: a bare one means another moment elsewhere.

import { html, useState } from "../vendor/standalone.js";
import { aria, GroupFrame } from "./field.js";

const MOMENT = /^(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d(?::\d\d)?)(?:\.\d+)?(Z|[+-]\d\d:?\d\d)?$/i;

export function DateTimeInput(props) {
  const { form, path, id, label, value, empty, onChange } = props;
  const found = MOMENT.exec(typeof value === "string" ? value : "");
  const local = found ? `${found[1]}T${found[2]}` : "";
  const [zone, setZone] = useState(() => (found ? zoneOf(found[3], local) : "yours"));
  const give = (moment, chosen) => onChange(moment ? `${moment.length === 16 ? `${moment}:00` : moment}${offsetIn(chosen, moment)}` : empty);
  return html`<${GroupFrame} ...${props} className="is-moment">
    <div class="moment">
      <input class="input" type="datetime-local" step=${/T\d\d:\d\d:\d\d/.test(local) && !local.endsWith(":00") ? "1" : undefined} ...${aria(props)}
        id=${`${id}-moment`} aria-label=${label} value=${local} onInput=${(event) => give(event.target.value, zone)} onBlur=${() => form.touch(path)} />
      <select class="input" aria-label=${`${label}: time zone`} value=${zone} onChange=${(event) => {
        setZone(event.target.value);
        give(local, event.target.value);
      }}>
        <option value="yours">your time (${offsetIn("yours", local)})</option>
        <option value="Z">UTC</option>
        <option value="">no time zone</option>
        ${!["yours", "Z", ""].includes(zone) && html`<option value=${zone}>${zone}</option>`}
      </select>
    </div>
  <//>`;
}

function zoneOf(offset, local) {
  if (!offset) return "";
  if (/^z$/i.test(offset)) return "Z";
  return offset === offsetIn("yours", local) ? "yours" : offset;
}

/** "+02:00" for the time of this page at that moment. */
function offsetIn(zone, moment) {
  if (zone !== "yours") return zone;
  const minutes = -(moment ? new Date(moment) : new Date()).getTimezoneOffset();
  const parts = [Math.floor(Math.abs(minutes) / 60), Math.abs(minutes) % 60].map((part) => String(part).padStart(2, "0"));
  return `${minutes < 0 ? "-" : "+"}${parts.join(":")}`;
}
