// The table of the places where each client's conversations part from known prompts.

import { byId, h } from "./dom.js";
import { count } from "./format.js";

export function showPartings(partings) {
  byId("partings-panel").hidden = partings.length === 0;
  byId("partings").replaceChildren(...partings.map(row));
}

function row(parting) {
  const number = (value) => h("td", { class: "number" }, count(value));
  return h(
    "tr",
    { title: parting.tenant && `tenant ${parting.tenant}` },
    h("td", {}, parting.client || "unnamed client"),
    h("td", {}, parting.field || "template"),
    number(parting.part_tokens),
    number(parting.prompt_tokens),
    number(parting.num_conversations),
    h("td", { class: "muted" }, parting.model),
  );
}
