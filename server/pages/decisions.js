// The list of routing decisions, and why the chosen worker was the cheapest.

import { byId, h, setAttribute, setStyle, setText } from "./dom.js";
import { onFilter, shows } from "./filter.js";
import { callOps } from "./key.js";
import { NONE, clock, count, rate, seconds } from "./format.js";

const MAX_ROWS = 50;
const EXPLAIN_MS = 1000; // the shortest time between explanations of the latest decision

export class Decisions {
  constructor(flash) {
    this.flash = flash;
    this.rows = new Map();
    this.waiting = [];
    this.pinned = null;
    this.shown = null;
    this.explained = 0;
    this.timer = 0;
    this.costs = [];
    this.timeline = new Timeline(byId("timeline"));
    this.policy = "headstart";
    this.pause = byId("pause");
    this.pause.addEventListener("click", () => this.setPaused(!this.paused));
    onFilter(() => this.filter());
    byId("follow").addEventListener("click", () => this.pin(null));
    byId("find").addEventListener("submit", (event) => {
      event.preventDefault();
      this.find(byId("find-id").value.trim());
    });
  }

  get paused() {
    return this.pause.getAttribute("aria-pressed") === "true";
  }

  setPaused(paused) {
    this.pause.setAttribute("aria-pressed", String(paused));
    setText(this.pause, paused ? "Go on" : "Pause");
    if (!paused) this.add(this.waiting.splice(0), {}, {});
  }

  begin(policy, decisions) {
    this.policy = policy;
    const isCost = policy === "headstart";
    setText(byId("cost-title"), isCost ? "Cost" : "Score");
    setText(byId("bar-title"), isCost ? "Its parts" : "Seconds to the first token");
    setText(byId("predicted-title"), isCost ? "What was predicted: the lowest cost wins" : "What was predicted");
    byId("others-legend").hidden = !isCost;
    this.rows.clear();
    this.explained = 0;
    byId("decisions").replaceChildren();
    this.add(decisions, {}, {});
  }

  add(decisions, found, times) {
    for (const decision of decisions) this.flash(decision.worker);
    if (this.paused) {
      this.waiting.push(...decisions);
      this.waiting.splice(0, Math.max(0, this.waiting.length - MAX_ROWS));
    } else {
      this.put(decisions.slice(-MAX_ROWS));
    }
    for (const [request, reached] of Object.entries(times)) this.change(request, { times: reached });
    for (const [request, tokens] of Object.entries(found)) this.change(request, { found_tokens: tokens });
    byId("decisions-empty").hidden = this.rows.size > 0 || this.waiting.length > 0;
    if (this.pinned === null && this.timer === 0) {
      const leftMs = Math.max(0, this.explained + EXPLAIN_MS - performance.now());
      if (leftMs === 0) this.explainLatest();
      else this.timer = setTimeout(() => this.explainLatest(), leftMs);
    }
  }

  filter() {
    for (const row of this.rows.values()) row.element.hidden = !shows(row.decision.model);
    this.explainLatest();
  }

  explainLatest() {
    clearTimeout(this.timer);
    this.timer = 0;
    const latest = [...this.rows.values()].filter((row) => shows(row.decision.model)).at(-1);
    if (latest === undefined || this.pinned !== null) return;
    this.explained = performance.now();
    this.explain(latest.decision);
  }

  put(decisions) {
    const list = byId("decisions");
    for (const decision of decisions) {
      const row = this.rows.get(decision.request) ?? this.spare() ?? new Row((request) => this.pin(request));
      this.rows.delete(row.decision?.request);
      row.take(decision);
      this.rows.set(decision.request, row);
      list.prepend(row.element);
    }
  }

  /** Returns the oldest row that is neither shown nor focused, for reuse: new rows for every decision cost memory. */
  spare() {
    if (this.rows.size < MAX_ROWS) return null;
    for (const [request, row] of this.rows) {
      if (request !== this.pinned && request !== this.shown && row.button !== document.activeElement) return row;
    }
    return null;
  }

  change(request, facts) {
    const waiting = this.waiting.find((decision) => decision.request === request);
    if (waiting) Object.assign(waiting, facts);
    const row = this.rows.get(request);
    if (row === undefined) return;
    Object.assign(row.decision, facts);
    row.show();
    if (this.shown === request) this.explain(row.decision);
  }

  pin(request) {
    this.pinned = request;
    byId("follow").hidden = request === null;
    if (request === null) this.explainLatest();
    else this.explain(this.rows.get(request).decision);
  }

  /** Shows a recorded decision, by the id of its request or of its answer. */
  async find(id) {
    let problem = "";
    try {
      const { decisions } = await callOps(`decisions/${encodeURIComponent(id)}`);
      this.pinned = decisions[0].request;
      byId("follow").hidden = false;
      this.explain(decisions[0]);
    } catch (error) {
      problem = error.message;
    }
    byId("find-problem").hidden = !problem;
    setText(byId("find-problem"), problem);
  }

  setRate(perS) {
    const text = this.rows.size > 0 && perS > 16 ? `${rate(perS)} per second, a sample of 16 shown` : "";
    setText(byId("decisions-rate"), text);
  }

  explain(decision) {
    this.rows.get(this.shown)?.mark(false);
    this.shown = decision.request;
    this.rows.get(this.shown)?.mark(true);
    byId("why").hidden = false;
    byId("why-empty").hidden = true;
    byId("verdict").replaceChildren(...verdict(decision, this.policy));
    this.timeline.show(decision.times);
    const isCost = this.policy === "headstart";
    const most = Math.max(1e-9, ...decision.candidates.map((each) => length(each, isCost)));
    while (this.costs.length < decision.candidates.length) this.costs.push(new CostRow(byId("costs")));
    this.costs.forEach((row, i) => row.show(decision.candidates[i], decision, most, isCost));
    const rest = decision.num_candidates - decision.candidates.length;
    byId("more-candidates").hidden = rest <= 0;
    setText(byId("more-candidates"), `and ${count(rest)} more, none of them cheaper`);
  }
}

class Row {
  constructor(choose) {
    this.decision = null;
    this.at = h("span", { class: "at" });
    this.to = h("span", { class: "to" });
    this.held = h("i");
    this.tokens = h("span", { class: "tokens" });
    this.button = h(
      "button",
      { type: "button", onclick: () => choose(this.decision.request) },
      this.at,
      this.to,
      h("span", { class: "prompt", "aria-hidden": "true" }, this.held),
      this.tokens,
    );
    this.element = h("li", {}, this.button);
  }

  take(decision) {
    this.decision = decision;
    setAttribute(this.element, "data-request", decision.request);
    setText(this.at, clock(decision.at));
    setText(this.to, decision.worker);
    setAttribute(this.to, "title", decision.worker);
    this.element.hidden = !shows(decision.model);
    this.mark(false);
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

/** Returns the decision as one or two sentences. */
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
  if (!decision.index_answered) parts.push("The index did not answer: this gateway used its own recent placements. ");
  if (decision.resumed) parts.push("It continues an answer whose worker was lost. ");
  if (!next) parts.push(decision.num_candidates > 1 ? "No other worker could take it." : "It is the only worker.");
  else if (policy !== "headstart") parts.push(`The policy is ${policy}.`);
  else parts.push(compared(next, chosen));
  return parts;
}

/** The cost also counts what a request does to others, so the cheapest worker may not be the quickest. */
function compared(next, chosen) {
  const laterS = untilFirstToken(next) - untilFirstToken(chosen);
  if (Math.abs(laterS) < 5e-4) return `${next.worker}, the next best, was as quick.`;
  if (laterS > 0) return `${next.worker}, the next best, would have taken ${seconds(laterS)} longer to the first token.`;
  return `${next.worker}, the next best, would have been ${seconds(-laterS)} quicker, but at the cost of other requests.`;
}

/** Returns the length of a candidate's bar: its cost where that is seconds, so that the lowest is the shortest. */
const length = (candidate, isCost) => (isCost ? (candidate.cost ?? 0) : candidate.guard ? 0 : untilFirstToken(candidate));

const untilFirstToken = (candidate) => candidate.wait_s + candidate.fetch_s + candidate.prefill_s;

const STAGES = [["queue", "wire", "between processes"], ["prefill", "wait", "waited"], ["first_token", "prefill", "prefill"], ["end", "answer", "answer"]];

/** Shows how long the request waited, was computed and was answered, as far as it has come. */
class Timeline {
  constructor(element) {
    this.element = element;
    this.text = h("span", { class: "muted" });
    this.parts = STAGES.map(([, name]) => h("i", { class: name }));
    element.append(h("span", { class: "stack", "aria-hidden": "true" }, ...this.parts), this.text);
  }

  show(times) {
    this.element.hidden = times.prefill === undefined;
    byId("timeline-empty").hidden = !this.element.hidden;
    const last = Math.max(1e-9, ...Object.values(times));
    let before = 0;
    const texts = [];
    STAGES.forEach(([stage, , word], index) => {
      const spent = times[stage] === undefined ? 0 : times[stage] - before;
      setStyle(this.parts[index], "width", `${((100 * spent) / last).toFixed(2)}%`);
      if (times[stage] === undefined) return;
      texts.push(`${word} ${seconds(spent)}`);
      before = times[stage];
    });
    setText(this.text, texts.join(", "));
  }
}

class CostRow {
  constructor(body) {
    this.worker = h("td", { class: "worker" });
    this.held = h("td", { class: "number" });
    this.guard = h("span", { class: "guard" });
    this.wait = h("i", { class: "wait" });
    this.fetch = h("i", { class: "fetch" });
    this.prefill = h("i", { class: "prefill" });
    this.others = h("i", { class: "others" });
    this.bar = h("span", { class: "stack", role: "img" }, this.wait, this.fetch, this.prefill, this.others);
    this.first = h("td", { class: "number wide" });
    this.cost = h("td", { class: "number" });
    this.element = h("tr", {}, this.worker, this.held, h("td", {}, this.guard, this.bar), this.first, this.cost);
    body.append(this.element);
  }

  /** Hides the row, for reuse by a decision with more candidates. */
  show(candidate, decision, most, isCost) {
    this.element.hidden = candidate === undefined;
    if (candidate === undefined) return;
    setAttribute(this.element, "class", candidate.worker === decision.worker ? "chosen" : "");
    setText(this.worker, candidate.worker);
    setAttribute(this.worker, "title", candidate.worker);
    const moved = candidate.moved_tokens ? ` + ${count(candidate.moved_tokens)}` : "";
    setText(this.held, count(candidate.matched_tokens) + moved);
    this.guard.hidden = !candidate.guard;
    this.bar.hidden = !this.guard.hidden;
    setText(this.guard, candidate.guard ?? "");
    let left = length(candidate, isCost);
    for (const [part, partS] of [[this.prefill, candidate.prefill_s], [this.fetch, candidate.fetch_s], [this.wait, candidate.wait_s], [this.others, left]]) {
      const shownS = Math.min(left, partS);
      setStyle(part, "width", `${((100 * shownS) / most).toFixed(2)}%`);
      left -= shownS;
    }
    const fetched = candidate.fetch_s ? `${seconds(candidate.fetch_s)} fetch, ` : "";
    const text = `Predicted: ${seconds(candidate.wait_s)} wait, ${fetched}${seconds(candidate.prefill_s)} prefill`;
    setAttribute(this.bar, "aria-label", text);
    setAttribute(this.bar, "title", text);
    setText(this.first, candidate.guard ? NONE : seconds(untilFirstToken(candidate)));
    setText(this.cost, candidate.cost === null || isCost ? seconds(candidate.cost) : count(candidate.cost));
  }
}
