// The last day of this gateway: three charts of 60 columns, and their sums as a sentence.

import { byId, setText } from "./dom.js";
import { clock, count, percent, plural, seconds } from "./format.js";
import { callOps } from "./key.js";

const COLUMNS = 60;
const REFRESH_MS = 60_000;
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 72;
const OUTCOMES = ["answered", "refused", "failed"];

/** Requests whose first token was waited for: those that left or failed count as well. */
const requests = (sums) => sums.answered + sums.refused + sums.failed + sums.left;
const CHARTS = {
  "day-requests": { parts: OUTCOMES, of: (sums) => OUTCOMES.map((name) => sums[name]), show: count },
  "day-wait": {
    parts: ["wait", "prefill"],
    of: (sums) => [sums.queue_s, sums.prefill_s].map((value) => value / Math.max(1, requests(sums))),
    show: seconds,
  },
  "day-saved": { parts: ["saved"], of: (sums) => [sums.prefill_saved_s], show: seconds },
};

export class Day {
  constructor() {
    this.hours = 1;
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
    const columns = Array.from({ length: COLUMNS }, empty);
    const all = empty();
    for (const [at, ...values] of this.report.rows) {
      const column = COLUMNS - 1 - Math.floor((end - 1 - at) / columnS);
      if (column < 0) continue;
      this.report.columns.slice(1).forEach((name, index) => {
        columns[column][name] += values[index];
        all[name] += values[index];
      });
    }
    const times = columns.map((_, index) => end - (COLUMNS - index) * columnS);
    for (const [id, chart] of Object.entries(CHARTS)) bars(byId(id), columns, times, chart);
    setText(byId("day-text"), sentence(all, this.hours));
    setText(byId("day-from"), clock(times[0]).slice(0, 5));
  }
}

const empty = () =>
  Object.fromEntries([...OUTCOMES, "left", "prompt_tokens", "cached_tokens", "output_tokens", "queue_s", "prefill_s", "prefill_saved_s"].map((name) => [name, 0]));

function sentence(sums, hours) {
  const number = requests(sums);
  const time = hours === 1 ? "In the last hour" : `In the last ${hours} hours`;
  if (!number) return `${time}: no requests.`;
  const cached = percent(sums.prompt_tokens ? sums.cached_tokens / sums.prompt_tokens : null);
  return (
    `${time}: ${plural(number, "request")}, ${count(sums.refused)} refused, ${count(sums.failed)} failed. ` +
    `${cached} of the prompt tokens came from a cache, which saved ${seconds(sums.prefill_saved_s)} of prefill; ` +
    `${seconds(sums.prefill_s)} were computed. Requests waited ${seconds(sums.queue_s / number)} on average.`
  );
}

/** Draws a column of stacked bars for each time, the largest of all at full height. */
function bars(svg, columns, times, { parts, of, show }) {
  const values = columns.map(of);
  const top = Math.max(1e-9, ...values.map((stack) => stack.reduce((sum, value) => sum + value, 0)));
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const step = WIDTH / COLUMNS;
  const groups = values.map((stack, index) => {
    const group = document.createElementNS(SVG, "g");
    const title = group.appendChild(document.createElementNS(SVG, "title"));
    title.textContent = `${clock(times[index]).slice(0, 5)}: ${parts.map((part, at) => `${show(stack[at])} ${part}`).join(", ")}`;
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
  setText(byId(`${svg.id}-top`), top < 1e-6 ? "" : `up to ${show(top)}`);
}
