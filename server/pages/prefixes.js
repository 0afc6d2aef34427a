// The tree of shared prefixes: the length of each, how often it was found, and the workers that hold it.

import { byId, h, setAttribute, setStyle, setText } from "./dom.js";
import { onFilter, shows } from "./filter.js";
import { ago, count, plural } from "./format.js";

export class Prefixes {
  constructor() {
    this.rows = new Map();
    this.all = [];
    onFilter(() => this.show({ prefixes: this.all }));
  }

  show({ prefixes: all }) {
    this.all = all;
    const prefixes = all.filter((prefix) => shows(prefix.model));
    byId("prefixes-panel").hidden = false;
    byId("prefixes-empty").hidden = prefixes.length > 0;
    byId("prefixes-scroll").hidden = prefixes.length === 0;
    const longest = Math.max(1, ...prefixes.map((prefix) => prefix.num_tokens));
    const models = new Set(prefixes.map((prefix) => prefix.model));
    const placed = new Map();
    const seen = new Set();
    for (const prefix of prefixes) {
      const key = `${prefix.model}/${prefix.hash}`;
      seen.add(key);
      let row = this.rows.get(key);
      if (row === undefined) this.rows.set(key, (row = new Row(prefix)));
      const above = prefix.parent === null ? null : this.rows.get(`${prefix.model}/${prefix.parent}`);
      const list = above?.children ?? byId("prefixes");
      const position = placed.get(list) ?? 0;
      if (list.children[position] !== row.element) list.insertBefore(row.element, list.children[position] ?? null);
      placed.set(list, position + 1);
      row.show(prefix, above?.tokens ?? 0, longest, models.size > 1);
    }
    for (const [key, row] of this.rows) {
      if (seen.has(key)) continue;
      row.element.remove();
      this.rows.delete(key);
    }
  }
}

class Row {
  constructor(prefix) {
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
      { "data-prefix": prefix.hash },
      h(
        "div",
        { class: "prefix" },
        h("span", { class: "what" }, this.length, " ", this.more),
        h("span", { class: "depth", "aria-hidden": "true" }, this.shared, this.own),
        this.hits,
        this.holders,
      ),
      this.children,
    );
  }

  show(prefix, above, longest, severalModels) {
    const width = (tokens) => `${((100 * tokens) / longest).toFixed(1)}%`;
    this.tokens = prefix.num_tokens;
    setText(this.length, plural(prefix.num_tokens, "token"));
    setText(this.more, severalModels ? prefix.model : prefix.hash);
    setAttribute(this.more, "title", `${prefix.model}, block hash ${prefix.hash}`);
    setStyle(this.shared, "width", width(above));
    setStyle(this.own, "width", width(prefix.num_tokens - above));
    setText(this.hits, `found ${count(prefix.num_hits)}\u00d7, ${ago(prefix.idle_s)}`);
    this.showHolders(prefix);
  }

  showHolders(prefix) {
    const rest = prefix.num_workers - prefix.workers.length;
    const names = rest > 0 ? [...prefix.workers, `and ${count(rest)} more`] : prefix.workers;
    const text = names.join("\n");
    if (text === this.text) return;
    this.text = text;
    const chips = names.map((name, i) => h("li", { class: i < prefix.workers.length ? "chip" : "muted" }, name));
    this.holders.replaceChildren(...chips);
  }
}
