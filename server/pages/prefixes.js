// The tree of the hottest stems: how long each is, how often it was found, and who holds it.

import { byId, h, setAttribute, setStyle, setText } from "./dom.js";
import { count, plural, seconds } from "./format.js";

export class Prefixes {
  constructor() {
    this.rows = new Map();
  }

  show({ stems, num_workers: workers, num_told: told }) {
    byId("prefixes-panel").hidden = false;
    byId("prefixes-empty").hidden = stems.length > 0;
    byId("prefixes-scroll").hidden = stems.length === 0;
    const silent = workers - told;
    setText(byId("prefixes-count"), silent > 0 ? `${count(told)} of ${plural(workers, "worker")} have told theirs` : "");
    const longest = Math.max(1, ...stems.map((stem) => stem.num_tokens));
    const models = new Set(stems.map((stem) => stem.model));
    const placed = new Map();
    const seen = new Set();
    for (const stem of stems) {
      const key = `${stem.model}/${stem.hash}`;
      seen.add(key);
      let row = this.rows.get(key);
      if (row === undefined) this.rows.set(key, (row = new Row(stem)));
      const above = stem.parent === null ? null : this.rows.get(`${stem.model}/${stem.parent}`);
      const list = above?.children ?? byId("prefixes");
      const position = placed.get(list) ?? 0;
      if (list.children[position] !== row.element) list.insertBefore(row.element, list.children[position] ?? null);
      placed.set(list, position + 1);
      row.show(stem, above?.tokens ?? 0, longest, models.size > 1);
    }
    for (const [key, row] of this.rows) {
      if (seen.has(key)) continue;
      row.element.remove();
      this.rows.delete(key);
    }
  }
}

class Row {
  constructor(stem) {
    this.tokens = 0;
    this.length = h("span", { class: "length" });
    this.more = h("span", { class: "muted" });
    this.shared = h("i", { class: "shared" });
    this.own = h("i", { class: "own" });
    this.hits = h("span", { class: "hits" });
    this.holders = h("ul", { class: "holders" });
    this.children = h("ul");
    this.element = h(
      "li",
      { "data-stem": stem.hash },
      h(
        "div",
        { class: "stem" },
        h("span", { class: "what" }, this.length, " ", this.more),
        h("span", { class: "depth", "aria-hidden": "true" }, this.shared, this.own),
        this.hits,
        this.holders,
      ),
      this.children,
    );
  }

  show(stem, above, longest, severalModels) {
    const width = (tokens) => `${((100 * tokens) / longest).toFixed(1)}%`;
    this.tokens = stem.num_tokens;
    setText(this.length, plural(stem.num_tokens, "token"));
    setText(this.more, severalModels ? stem.model : stem.hash);
    setAttribute(this.more, "title", `${stem.model}, block hash ${stem.hash}`);
    setStyle(this.shared, "width", width(above));
    setStyle(this.own, "width", width(stem.num_tokens - above));
    setText(this.hits, `found ${count(stem.num_hits)}\u00d7, ${lately(stem)}`);
    this.showHolders(stem);
  }

  showHolders(stem) {
    const rest = stem.num_workers - stem.workers.length;
    const names = rest > 0 ? [...stem.workers, `and ${count(rest)} more`] : stem.workers;
    const told = names.join("\n");
    if (told === this.told) return;
    this.told = told;
    const chips = names.map((name, i) => h("li", { class: i < stem.workers.length ? "chip" : "muted" }, name));
    this.holders.replaceChildren(...chips);
  }
}

function lately(stem) {
  if (stem.num_references) return `in use by ${count(stem.num_references)}`;
  return stem.idle_s < 1 ? "just now" : `${seconds(Math.round(stem.idle_s))} ago`;
}
