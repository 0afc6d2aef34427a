// The table of what each tenant has used since this gateway started.

import { byId, h } from "./dom.js";
import { count, percent, seconds } from "./format.js";

export function showUsage(tenants) {
  byId("usage-panel").hidden = tenants.length === 0;
  byId("usage").replaceChildren(...tenants.map(row));
}

function row(used) {
  const cell = (text) => h("td", { class: "number" }, text);
  return h(
    "tr",
    {},
    h("td", {}, used.tenant),
    cell(count(used.requests)),
    cell(count(used.prompt_tokens)),
    cell(percent(used.prompt_tokens ? used.cached_tokens / used.prompt_tokens : null)),
    cell(count(used.output_tokens)),
    cell(seconds(used.prefill_s)),
    cell(seconds(used.prefill_saved_s)),
    cell(seconds(used.queue_s)),
  );
}
