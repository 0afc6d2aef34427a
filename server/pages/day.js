// The last day of this gateway: four charts of 60 columns, their sums as a sentence, and who had no answer.

import { byId, h, setText } from "./dom.js";
import { onFilter, shows } from "./filter.js";
import { count, minute, percent, plural, seconds } from "./format.js";
import { callOps } from "./key.js";

const COLUMNS = 60;
const REFRESH_MS = 15_000;
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 72;
const OUTCOMES = ["answered", "wrong", "refused", "failed", "left"];

const requests = (sums) => OUTCOMES.reduce((sum, name) => sum + sums[name], 0);
/** Requests that came to a worker, or waited for one. */
const placed = (sums) => sums.answered + sums.failed + sums.left;
const CHARTS = {
  "day-requests": { parts: OUTCOMES, of: (sums) => OUTCOMES.map((name) => sums[name]), show: count },
  "day-wait": {
    parts: ["wait", "wire", "prefill"],
    of: (sums) => [sums.queue_s, sums.wire_s, sums.prefill_s].map((value) => value / Math.max(1, placed(sums))),
    show: seconds,
  },
  "day-first": { parts: ["first"], of: (sums, bounds) => [within(0.95, sums.first_tokens, bounds) ?? 0], show: seconds },
  "day-saved": { parts: ["saved"], of: (sums) => [sums.prefill_saved_s], show: seconds },
};

export class Day {
  constructor(onReasons, onRequest) {
    this.hours = 1;
    this.onReasons = onReasons;
    this.onRequest = onRequest;
    onFilter(() => this.draw());
    for (const button of byId("day-hours").querySelectorAll("button"))
      button.addEventListener("click", () => this.choose(button));
  }

  choose(chosen) {
    for (const button of byId("day-hours").querySelectorAll("button"))
      button.setAttribute("aria-pressed", String(button === chosen));
    this.hours = Number(chosen.value);
    this.draw();
  }

  async run() {
    for (;;) {
      try {
        this.report = await callOps("history");
        this.onReasons(this.report.reasons);
        this.draw();
      } catch {
        setText(byId("day-text"), "The gateway does not answer.");
      }
      await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
    }
  }

  draw() {
    if (!this.report) return;
    const columnS = (this.hours * 3600) / COLUMNS;
    const end = (Math.floor(this.report.now / columnS) + 1) * columnS;
    const { columns: names, rows, first_token_bounds_s: bounds } = this.report;
    const columns = Array.from({ length: COLUMNS }, () => empty(names));
    const all = empty(names);
    for (const row of rows.map((values) => Object.fromEntries(names.map((name, index) => [name, values[index]])))) {
      const column = COLUMNS - 1 - Math.floor((end - 1 - row.at) / columnS);
      if (!columns[column] || !shows(row.model)) continue; // also where the clock was set back
      add(columns[column], row);
      add(all, row);
    }
    const times = columns.map((_, index) => end - (COLUMNS - index) * columnS);
    for (const [id, chart] of Object.entries(CHARTS)) bars(byId(id), columns, times, chart, bounds);
    setText(byId("day-text"), sentence(all, this.hours));
    for (const from of document.querySelectorAll(".day-from")) setText(from, minute(times[0]));
    this.showErrors();
  }

  /** Shows who had no answer: reasons with a request in the time that is shown. */
  showErrors() {
    const since = this.report.now - this.hours * 3600;
    const reasons = this.report.reasons.filter((each) => each.last_at >= since && shows(each.model));
    const row = (each) => {
      const open = { class: "button small plain mono", type: "button", title: `Show ${each.last_id}`, onclick: () => this.onRequest(each.last_id) };
      return h(
        "tr",
        {},
        h("td", {}, each.reason, h("span", { class: "muted" }, each.model ? ` ${each.model}` : "")),
        h("td", {}, [each.tenant, each.key].filter(Boolean).join(", ") || "no valid key"),
        h("td", { class: "number" }, count(each.requests)),
        h("td", {}, h("button", open, minute(each.last_at))),
      );
    };
    byId("errors").replaceChildren(...reasons.map(row));
    byId("errors-table").hidden = !reasons.length;
    byId("errors-empty").hidden = reasons.length > 0;
    setText(byId("errors-time"), `${time(this.hours)}; numbers since the start`);
  }
}

const WORDS = { wrong: "bad requests of clients", left: "left by their clients" };
const NO_SUMS = ["at", "model", "errors", "first_tokens"];
const empty = (names) => ({
  ...Object.fromEntries(names.filter((name) => !NO_SUMS.includes(name)).map((name) => [name, 0])),
  first_tokens: [],
});

function add(sums, row) {
  for (const name of Object.keys(sums)) if (typeof sums[name] === "number") sums[name] += row[name];
  row.first_tokens.forEach((number, index) => {
    sums.first_tokens[index] = (sums.first_tokens[index] ?? 0) + number;
  });
}

/** Returns the time within which this part of the streams had a first token: interpolated, as Prometheus does. */
function within(part, counts, bounds) {
  let rank = part * counts.reduce((sum, number) => sum + number, 0);
  if (!rank) return null;
  for (const [index, number] of counts.entries()) {
    const lower = index ? bounds[index - 1] : 0;
    if (rank <= number) return index < bounds.length ? lower + ((bounds[index] - lower) * rank) / number : lower;
    rank -= number;
  }
  return bounds.at(-1);
}

const time = (hours) => (hours === 1 ? "in the last hour" : `in the last ${hours} hours`);

/** Returns the requests that neither had an answer nor are to blame on the fleet, where there are any. */
const others = (sums) => ["wrong", "left"].map((name) => (sums[name] ? `, ${count(sums[name])} ${WORDS[name]}` : "")).join("");

function sentence(sums, hours) {
  const number = requests(sums);
  const when = time(hours).replace("in", "In");
  if (!number) return `${when}: no requests.`;
  const cached = percent(sums.prompt_tokens ? sums.cached_tokens / sums.prompt_tokens : null);
  return (
    `${when}: ${plural(number, "request")}, ${count(sums.refused)} refused, ${count(sums.failed)} failed${others(sums)}. ` +
    `${cached} of the prompt tokens came from a cache, which saved ${seconds(sums.prefill_saved_s)} of prefill; ` +
    `${seconds(sums.prefill_s)} were computed. Requests waited ${seconds(sums.queue_s / Math.max(1, placed(sums)))} on average.`
  );
}

/** Draws a column of stacked bars for each time, the largest of all at full height. */
function bars(svg, columns, times, { parts, of, show }, bounds) {
  const values = columns.map((sums) => of(sums, bounds));
  const heights = values.map((stack) => stack.reduce((sum, value) => sum + value, 0));
  const top = Math.max(1e-9, ...heights);
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const step = WIDTH / COLUMNS;
  const groups = values.map((stack, index) => {
    const group = document.createElementNS(SVG, "g");
    const title = group.appendChild(document.createElementNS(SVG, "title"));
    title.textContent = `${minute(times[index])}: ${parts.map((part, at) => `${show(stack[at])} ${WORDS[part] ?? part}`).join(", ")}`;
    let y = HEIGHT;
    stack.forEach((value, at) => {
      const height = (HEIGHT * value) / top;
      y -= height;
      const bar = group.appendChild(document.createElementNS(SVG, "rect"));
      const place = { x: index * step, y, width: step - 2, height, class: parts[at] };
      for (const [name, amount] of Object.entries(place)) bar.setAttribute(name, amount);
    });
    return group;
  });
  svg.replaceChildren(...groups);
  setText(byId(`${svg.id}-top`), top < 1e-6 ? "" : `up to ${show(top)}, at ${minute(times[heights.indexOf(top)])}`);
}
