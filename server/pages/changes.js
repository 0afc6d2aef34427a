// What has happened to workers and requests, and one sentence on whether all is well.

import { byId, h, setAttribute, setText } from "./dom.js";
import { onFilter, shows } from "./filter.js";
import { clock, count, plural } from "./format.js";

const LATELY_S = 300;
const TONES = { died: "bad", refused: "warn", failed: "bad", "not reached": "bad", "breaker opened": "bad", drains: "warn", forgotten: "warn" };
const BAD = { dead: "has been dead", broken: "has failed", refused: "has been refused", unreachable: "has been out of reach" };

export class Changes {
  constructor() {
    this.changes = [];
    onFilter(() => this.show(this.changes));
  }

  show(changes) {
    this.changes = changes;
    this.day = new Date().getDate();
    const shown = changes.filter((change) => shows(change.model)).reverse();
    byId("changes-empty").hidden = shown.length > 0;
    byId("changes").replaceChildren(...shown.map(line));
  }

  /** Says what is wrong, the worst first. */
  judge(snapshot, index) {
    if (this.day !== new Date().getDate()) this.show(this.changes); // times of yesterday get their day
    const bad = [];
    const warn = [];
    const { workers, at } = snapshot;
    const serving = workers.filter((worker) => worker.state === "serving");
    if (!serving.length) bad.push(workers.length ? "No worker serves" : "There is no worker");
    for (const worker of workers.filter((each) => BAD[each.state]).slice(0, 3))
      bad.push(`${worker.worker} ${BAD[worker.state]} since ${clock(worker.since)}`);
    const more = workers.filter((each) => BAD[each.state]).length - 3;
    if (more > 0) bad.push(`${plural(more, "more worker")} cannot serve`);
    const [state, tone] = index;
    if (tone === "bad" || tone === "warn") (tone === "bad" ? bad : warn).push(`The prefix index: ${state.toLowerCase()}`);
    const lately = this.changes.filter((each) => !each.worker && each.last > at - LATELY_S);
    bad.push(...turned(lately, "failed"));
    warn.push(...turned(lately, "refused"));
    for (const [model, number] of Object.entries(snapshot.workers_needed)) {
      const there = serving.filter((worker) => worker.model === model).length;
      if (number > there) warn.push(`${model} needs ${plural(number, "worker")} and has ${count(there)}`);
    }
    if (snapshot.draining) warn.push("This gateway drains");
    const all = [...bad, ...warn];
    const well = `All is well: ${count(serving.length)} of ${plural(workers.length, "worker")} serve, and no request failed or was refused lately`;
    setAttribute(byId("well-dot"), "class", `dot ${bad.length ? "bad" : warn.length ? "warn" : "good"}`);
    setText(byId("well-text"), `${all.length ? all.join(". ") : well}.`);
  }
}

/** Says how many requests failed or were refused, and for whom or why most of them. */
export function turned(changes, what) {
  const numbers = new Map();
  for (const { why, count: number } of changes.filter((each) => each.what === what))
    numbers.set(why, (numbers.get(why) ?? 0) + number);
  if (!numbers.size) return [];
  const sum = [...numbers.values()].reduce((one, other) => one + other);
  const [why] = [...numbers].reduce((one, other) => (other[1] > one[1] ? other : one));
  return [`${plural(sum, "request")} ${what} lately${numbers.size > 1 ? ", most" : ""}${why && `: ${why}`}`];
}

function line(change) {
  const what = h("span", { class: TONES[change.what] ?? "" }, change.what);
  const who = change.worker || (change.count === 1 ? "A request" : `${count(change.count)} requests`);
  const time = change.last - change.at >= 1 ? ` (until ${clock(change.last)})` : "";
  const why = change.why ? `: ${change.why}` : "";
  return h("li", {}, h("span", { class: "at" }, clock(change.at)), h("span", {}, `${who} `, what, `${why}${time}`));
}
