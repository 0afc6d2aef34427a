// The list of routing decisions, and why the chosen one was the cheapest.

import { byId, h, setAttribute, setStyle, setText } from "./dom.js";
import { NONE, clock, count, rate, seconds } from "./format.js";

const MAX_ROWS = 50;

export class Decisions {
  constructor(flash) {
    this.flash = flash;
    this.rows = new Map();
    this.waiting = [];
    this.pinned = null;
    this.shown = null;
    this.policy = "headstart";
    this.pause = byId("pause");
    this.pause.addEventListener("click", () => this.setPaused(!this.paused));
    byId("follow").addEventListener("click", () => this.pin(null));
  }

  get paused() {
    return this.pause.getAttribute("aria-pressed") === "true";
  }

  setPaused(paused) {
    this.pause.setAttribute("aria-pressed", String(paused));
    setText(this.pause, paused ? "Go on" : "Pause");
    if (!paused) this.add(this.waiting.splice(0), {});
  }

  begin(policy, decisions) {
    this.policy = policy;
    setText(byId("cost-title"), policy === "headstart" ? "Cost" : "Score");
    this.rows.clear();
    byId("decisions").replaceChildren();
    this.add(decisions, {});
  }

  add(decisions, found) {
    for (const decision of decisions) this.flash(decision.worker);
    if (this.paused) {
      this.waiting.push(...decisions);
      this.waiting.splice(0, Math.max(0, this.waiting.length - MAX_ROWS));
    } else {
      this.put(decisions.slice(-MAX_ROWS));
    }
    for (const [request, tokens] of Object.entries(found)) this.setFound(request, tokens);
    byId("decisions-empty").hidden = this.rows.size > 0 || this.waiting.length > 0;
    const latest = [...this.rows.values()].at(-1)?.decision ?? null;
    if (latest !== null && this.pinned === null) this.explain(latest);
  }

  put(decisions) {
    const list = byId("decisions");
    for (const decision of decisions) {
      this.rows.get(decision.request)?.element.remove();
      this.rows.delete(decision.request);
      const row = new Row(decision, () => this.pin(decision.request));
      this.rows.set(decision.request, row);
      list.prepend(row.element);
    }
    for (const [request, row] of this.rows) {
      if (this.rows.size <= MAX_ROWS) break;
      if (request === this.pinned) continue;
      row.element.remove();
      this.rows.delete(request);
    }
  }

  setFound(request, tokens) {
    const waiting = this.waiting.find((decision) => decision.request === request);
    if (waiting) waiting.found_tokens = tokens;
    const row = this.rows.get(request);
    if (row === undefined) return;
    row.decision.found_tokens = tokens;
    row.show();
    if (this.shown === request) this.explain(row.decision);
  }

  pin(request) {
    this.pinned = request;
    byId("follow").hidden = request === null;
    const row = request === null ? [...this.rows.values()].at(-1) : this.rows.get(request);
    if (row) this.explain(row.decision);
  }

  setRate(perS) {
    const told = this.rows.size > 0 && perS > 16 ? `${rate(perS)} per second, a sample of 16 shown` : "";
    setText(byId("decisions-rate"), told);
  }

  explain(decision) {
    this.rows.get(this.shown)?.mark(false);
    this.shown = decision.request;
    this.rows.get(this.shown)?.mark(true);
    byId("why").hidden = false;
    byId("why-empty").hidden = true;
    byId("verdict").replaceChildren(...verdict(decision, this.policy));
    const most = Math.max(1e-9, ...decision.candidates.map((each) => each.wait_s + each.prefill_s));
    byId("costs").replaceChildren(...decision.candidates.map((each) => costRow(each, decision, most)));
    const rest = decision.num_candidates - decision.candidates.length;
    byId("more-candidates").hidden = rest <= 0;
    setText(byId("more-candidates"), `and ${count(rest)} more, none of them cheaper`);
  }
}

class Row {
  constructor(decision, choose) {
    this.decision = decision;
    this.held = h("i");
    this.tokens = h("span", { class: "tokens" });
    this.button = h(
      "button",
      { type: "button", onclick: choose },
      h("span", { class: "at" }, clock(decision.at)),
      h("span", { class: "to" }, decision.worker),
      h("span", { class: "prompt", "aria-hidden": "true" }, this.held),
      this.tokens,
    );
    this.element = h("li", { "data-request": decision.request }, this.button);
    this.show();
  }

  show() {
    const { found_tokens: found, matched_tokens: matched, prompt_tokens: all } = this.decision;
    const cached = found ?? matched;
    setStyle(this.held, "width", `${((100 * cached) / Math.max(1, all)).toFixed(1)}%`);
    setText(this.tokens, `${count(cached)} of ${count(all)} cached`);
  }

  mark(current) {
    if (current) setAttribute(this.button, "aria-current", "true");
    else this.button.removeAttribute("aria-current");
  }
}

/** The decision as one or two sentences. */
function verdict(decision, policy) {
  const strong = (text) => h("strong", {}, text);
  const [chosen, ...others] = decision.candidates;
  const parts = [strong(decision.worker), ` took a prompt of ${count(decision.prompt_tokens)} tokens. `];
  const held = decision.matched_tokens;
  parts.push(held ? `It was expected to hold ${count(held)} of them` : "No prefix of it was known there");
  if (decision.found_tokens === null) parts.push(". ");
  else if (decision.found_tokens === held) parts.push(held ? ", and did. " : ". ");
  else parts.push(`, and found ${count(decision.found_tokens)}. `);
  const next = others.find((each) => each.cost !== null);
  if (!decision.index_answered) parts.push("The index did not answer: this gateway\u2019s own memory decided. ");
  if (decision.resumed) parts.push("It continues an answer whose worker was lost. ");
  if (!next) parts.push(decision.num_candidates > 1 ? "No other worker could take it." : "It is the only worker.");
  else if (policy !== "headstart") parts.push(`The policy is ${policy}.`);
  else if (next.cost - chosen.cost < 5e-4) parts.push(`${next.worker} would have cost the same.`);
  else parts.push(`${next.worker}, the next best, would have cost ${seconds(next.cost - chosen.cost)} more.`);
  return parts;
}

function costRow(candidate, decision, most) {
  const width = (part) => `${((100 * part) / most).toFixed(2)}%`;
  const wait = h("i", { class: "wait" });
  const prefill = h("i", { class: "prefill" });
  setStyle(wait, "width", width(candidate.wait_s));
  setStyle(prefill, "width", width(candidate.prefill_s));
  const text = `${seconds(candidate.wait_s)} wait, ${seconds(candidate.prefill_s)} prefill`;
  const bar = h("span", { class: "stack", role: "img", "aria-label": text, title: text }, wait, prefill);
  const cost = candidate.cost === null ? NONE : candidate.cost.toFixed(3);
  return h(
    "tr",
    { class: candidate.worker === decision.worker ? "chosen" : "" },
    h("td", { class: "worker" }, candidate.worker),
    h("td", { class: "number" }, count(candidate.matched_tokens)),
    h("td", {}, candidate.guard ? h("span", { class: "guard" }, candidate.guard) : bar),
    h("td", { class: "number" }, cost),
  );
}
