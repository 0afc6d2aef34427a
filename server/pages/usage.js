// The table of what each tenant has used since this gateway started, and of its requests without an answer.

import { byId, h } from "./dom.js";
import { count, percent, seconds } from "./format.js";

export class Usage {
  constructor() {
    this.tenants = [];
    this.reasons = [];
  }

  show(tenants) {
    this.tenants = tenants;
    this.draw();
  }

  /** Takes the reasons of the history: who had no answer, and why. */
  count(reasons) {
    this.reasons = reasons;
    this.draw();
  }

  draw() {
    byId("usage-panel").hidden = this.tenants.length === 0;
    byId("usage").replaceChildren(...this.tenants.map((used) => this.row(used)));
  }

  row(used) {
    const cell = (text) => h("td", { class: "number" }, text);
    const turned = (outcome) =>
      this.reasons.reduce((sum, each) => sum + (each.tenant === used.tenant && each.outcome === outcome ? each.requests : 0), 0);
    return h(
      "tr",
      {},
      h("td", {}, used.tenant),
      cell(count(used.requests)),
      cell(count(turned("refused"))),
      cell(count(turned("wrong"))),
      cell(count(used.prompt_tokens)),
      cell(percent(used.prompt_tokens ? used.cached_tokens / used.prompt_tokens : null)),
      cell(count(used.output_tokens)),
      cell(seconds(used.prefill_s)),
      cell(seconds(used.prefill_saved_s)),
      cell(seconds(used.queue_s)),
    );
  }
}
