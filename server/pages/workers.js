// The table of workers: one row each, updated in place.

import { byId, h, setAttribute, setStyle, setText } from "./dom.js";
import { onFilter, shows } from "./filter.js";
import { NONE, clock, count, percent, plural, rate, seconds } from "./format.js";
import { callOps } from "./key.js";

const FLASH_MS = 500;
const LATE_S = 2;
const TONES = { serving: "good", standby: "", learning: "", draining: "warn", broken: "bad", refused: "bad", unreachable: "bad", joining: "", dead: "bad", left: "" };
const WORDS = { serving: "Serving", standby: "Standby", learning: "Learning", draining: "Draining", broken: "Failing", refused: "Refused", unreachable: "Not reached", joining: "Joining", dead: "Dead", left: "Left" };
const ABSENT = ["joining", "dead", "left", "refused", "unreachable"];
const CONFIRM = {
  drain: {
    title: (name) => `Drain ${name}?`,
    text: "It finishes its open requests and takes no new ones until its process is restarted.",
    go: "Drain",
  },
  purge: {
    title: (name) => `Purge the cache of ${name}?`,
    text: "It drops every cached block. Open requests continue; later ones compute their prompts in full.",
    go: "Purge",
  },
};

export class Workers {
  constructor(announce, warn) {
    this.announce = announce;
    this.warn = warn;
    this.rows = new Map();
    this.first = true;
    onFilter(() => this.show(this.all, this.needed, this.objectiveS));
  }

  show(all, needed, objectiveS) {
    this.all = all;
    this.needed = needed;
    this.objectiveS = objectiveS;
    const workers = all.filter((worker) => shows(worker.model));
    const body = byId("workers");
    const seen = new Set();
    const models = new Set(workers.map((worker) => worker.model));
    models.delete("");
    const oneModel = models.size < 2;
    workers.forEach((worker, position) => {
      seen.add(worker.worker);
      let row = this.rows.get(worker.worker);
      if (row === undefined) this.rows.set(worker.worker, (row = new Row(worker.worker, (name, action) => this.act(name, action))));
      if (!this.first && row.state !== worker.state) this.announce(`${worker.worker} is ${WORDS[worker.state].toLowerCase()}`);
      row.show(worker, oneModel);
      if (body.children[position] !== row.element) body.insertBefore(row.element, body.children[position] ?? null);
    });
    for (const [name, row] of this.rows) {
      if (seen.has(name)) continue;
      row.element.remove();
      this.rows.delete(name);
    }
    this.first = false;
    this.count(workers, models, needed);
  }

  count(workers, models, needed) {
    const serving = workers.filter((worker) => worker.state === "serving").length;
    const model = models.size === 1 ? [...models][0] : plural(models.size, "model");
    const numbers = Object.entries(needed).filter(([name]) => shows(name)).map(([name, number]) => (models.size === 1 ? count(number) : `${name} ${count(number)}`));
    const wanted = numbers.length ? `, needed for waits of at most ${count(this.objectiveS)}\u202fs: ${numbers.join(", ")}` : "";
    setText(byId("workers-count"), workers.length ? `${serving} of ${workers.length} serving ${model}${wanted}` : "");
    byId("workers-empty").hidden = workers.length > 0;
    byId("workers").parentElement.hidden = workers.length === 0;
  }

  /** Marks a worker that a request was just sent to. */
  flash(name) {
    const element = this.rows.get(name)?.element;
    if (!element || element.classList.contains("flash")) return;
    element.classList.add("flash");
    setTimeout(() => element.classList.remove("flash"), FLASH_MS);
  }

  async act(name, action) {
    if (!(await confirmed(name, CONFIRM[action]))) return;
    try {
      await callOps(`workers/${encodeURIComponent(name)}/${action}`, { method: "POST" });
      this.announce(action === "drain" ? `${name} drains` : `The cache of ${name} is purged`);
      this.warn("");
    } catch (error) {
      this.warn(`${CONFIRM[action].go} of ${name} failed: ${error.message}`);
    }
  }
}

function confirmed(name, words) {
  const dialog = byId("confirm");
  setText(byId("confirm-title"), words.title(name));
  setText(byId("confirm-text"), words.text);
  setText(byId("confirm-go"), words.go);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "go"), { once: true });
  });
}

class Row {
  constructor(name, act) {
    this.state = "";
    const cell = (attributes = {}, ...children) => h("td", { role: "cell", ...attributes }, ...children);
    const number = (label) => cell({ class: "number", "data-label": label });
    this.dot = h("span", { class: "dot" });
    this.word = h("span");
    this.more = h("span", { class: "state-more" });
    this.numerics = h("span", { class: "model" });
    this.used = h("i", { class: "used" });
    this.cached = h("i", { class: "cached" });
    this.blocks = h("span", { class: "muted" });
    this.meter = h("span", { class: "meter", role: "img" }, this.used, this.cached);
    this.cells = {
      running: number("Running"),
      waiting: number("Waiting"),
      hits: number("Cache hits"),
      prefill: number("Prefill"),
      queued: number("Queued"),
    };
    this.buttons = ["drain", "purge"].map((action) =>
      h(
        "button",
        { class: "button small", type: "button", "aria-label": `${CONFIRM[action].go} ${name}`, onclick: () => act(name, action) },
        CONFIRM[action].go,
      ),
    );
    this.element = h(
      "tr",
      { role: "row", "data-worker": name },
      cell({}, h("span", { class: "name", title: name }, name), this.numerics),
      cell({}, h("span", { class: "state" }, this.dot, this.word), this.more),
      this.cells.running,
      this.cells.waiting,
      cell({}, h("span", { class: "blocks" }, this.meter, this.blocks)),
      this.cells.hits,
      this.cells.prefill,
      this.cells.queued,
      cell({}, h("span", { class: "actions" }, ...this.buttons)),
    );
  }

  show(worker, oneModel) {
    const load = worker.load;
    this.state = worker.state;
    setAttribute(this.element, "class", this.element.classList.contains("flash") ? `${worker.state} flash` : worker.state);
    setAttribute(this.dot, "class", `dot ${TONES[worker.state]}`);
    setText(this.word, WORDS[worker.state]);
    const late = lease(worker.lease_left_s);
    const isSteady = worker.state === "serving";
    const since = isSteady ? "" : `since ${clock(worker.since)}${worker.reason ? `: ${worker.reason}` : ""}`;
    this.more.hidden = isSteady && !late;
    setText(this.more, [since, late].filter(Boolean).join(", "));
    setAttribute(this.word, "title", `since ${clock(worker.since)}`);
    setText(this.numerics, (oneModel ? worker.numerics : worker.model) ?? "");
    setAttribute(this.numerics, "title", `${worker.model}, ${worker.numerics ?? "unknown"}, revision ${worker.revision ?? "not learnt"}, ${worker.url}, epoch ${worker.epoch}`);
    setText(this.cells.running, count(load?.running));
    setText(this.cells.waiting, count(load?.waiting));
    setText(this.cells.hits, percent(worker.hit_rate));
    setText(this.cells.prefill, load?.prefill_tokens_per_s ? `${rate(load.prefill_tokens_per_s)} tok/s` : NONE);
    setText(this.cells.queued, load ? seconds(load.queued_s) : NONE);
    this.showBlocks(worker, load);
    const [drain, purge] = this.buttons;
    purge.disabled = ABSENT.includes(worker.state);
    drain.disabled = purge.disabled || worker.state === "draining";
  }

  showBlocks(worker, load) {
    if (!load?.blocks) {
      setText(this.blocks, NONE);
      setStyle(this.used, "width", "0%");
      setStyle(this.cached, "width", "0%");
      setAttribute(this.meter, "aria-label", "blocks not known");
      return;
    }
    const used = load.blocks - load.free_blocks;
    const cached = Math.max(0, Math.min(load.free_blocks, (worker.published_blocks ?? 0) - used)); // reported at other times
    setStyle(this.used, "width", `${((100 * used) / load.blocks).toFixed(1)}%`);
    setStyle(this.cached, "width", `${((100 * cached) / load.blocks).toFixed(1)}%`);
    setText(this.blocks, `${count(used + cached)} of ${count(load.blocks)}`);
    setAttribute(this.meter, "aria-label", `${count(used)} blocks in use, ${count(cached)} cached, of ${count(load.blocks)}`);
  }
}

/** Returns what is left of a lease that is late; it lasts 6 s and is renewed each second or sooner. */
function lease(leftS) {
  if (leftS === null || leftS >= LATE_S) return "";
  return leftS > 0 ? `lease ${leftS.toFixed(1)}\u202fs left` : "lease over";
}
