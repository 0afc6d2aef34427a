// The model that the page shows; all of them until one is chosen.

import { byId, h } from "./dom.js";

const select = byId("model");
const listeners = [];
let known = "";

/** Returns whether something about this model is shown. Facts of no model always are. */
export const shows = (model) => select.value === "" || !model || select.value === model;

export const onFilter = (listener) => listeners.push(listener);

select.addEventListener("change", () => listeners.forEach((listener) => listener()));

/** Offers the models there are. */
export function offer(models) {
  const names = [...models].filter((name) => name).sort();
  if (names.join("\n") === known) return;
  known = names.join("\n");
  const chosen = select.value;
  const options = names.map((name) => h("option", { value: name }, name));
  select.replaceChildren(h("option", { value: "" }, "all"), ...options);
  select.value = names.includes(chosen) ? chosen : "";
  byId("filter").hidden = names.length < 2;
  if (select.value !== chosen) listeners.forEach((listener) => listener());
}
