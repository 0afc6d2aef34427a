// The tiles at the top: the whole fleet in the last minute.

import { byId, setAttribute, setText } from "./dom.js";
import { NONE, count, percent, plural, rate, seconds } from "./format.js";
import { Spark } from "./spark.js";

const SPARKS = { "hit-spark": ["hit_rate", percent], "ttft-spark": ["ttft_p50_s", seconds], "tokens-spark": ["output_tokens_per_s", rate], "open-spark": ["in_flight", count] };

export class Tiles {
  constructor() {
    this.sparks = Object.entries(SPARKS).map(([id, [column, show]]) => [new Spark(byId(id), show), column]);
  }

  begin(history) {
    for (const [spark, column] of this.sparks) {
      const index = history.columns.indexOf(column);
      spark.reset(history.rows.map((row) => [row[0], row[index]]));
    }
  }

  show(at, traffic, index) {
    for (const [spark, column] of this.sparks) spark.add(at, traffic[column]);
    setText(byId("hit"), percent(traffic.hit_rate));
    setText(
      byId("hit-more"),
      traffic.prompt_tokens ? `of ${count(traffic.prompt_tokens)} tokens answered in the last minute` : "no prompts answered in the last minute",
    );
    setText(byId("ttft"), seconds(traffic.ttft_p50_s));
    setText(
      byId("ttft-more"),
      traffic.ttft_p95_s === null ? "no streamed answers in the last minute" : `median; 95 % within ${seconds(traffic.ttft_p95_s)}`,
    );
    unit(byId("tokens"), rate(traffic.output_tokens_per_s), "per second");
    setText(byId("tokens-more"), `${rate(traffic.prompt_tokens_per_s)} prompt tokens per second`);
    setText(byId("open"), count(traffic.in_flight));
    setText(byId("open-more"), `${rate(traffic.decisions_per_s)} decisions per second`);
    this.showIndex(index);
  }

  showIndex(index) {
    const [state, tone, more] = indexState(index);
    setText(byId("index"), state);
    setAttribute(byId("index-dot"), "class", `dot ${tone}`);
    setText(byId("index-more"), more);
  }
}

function unit(element, value, text) {
  if (element.firstChild?.nodeValue === `${value} `) return;
  const small = document.createElement("small");
  small.textContent = value === NONE ? "" : text;
  element.replaceChildren(`${value} `, small);
}

/** Returns the state of the index in words, the worst problem first. */
export function indexState(index) {
  const cut = index.shards.filter((shard) => !shard.connected);
  const open = index.shards.filter((shard) => shard.breaker_open);
  const accuracy = `Hits predicted for the last ${plural(index.num_requests, "request")}: precision ${percent(index.precision)}, recall ${percent(index.recall)}`;
  if (!index.shards.length) return ["Not used", "", "No Redis: routing by this gateway\u2019s own estimates"];
  if (cut.length === index.shards.length) return ["Unreachable", "bad", `No Redis at ${cut[0].redis}. Routing by own estimates`];
  if (open.length) return ["Breaker open", "bad", "Redis is too slow to answer lookups in time. Routing by own estimates"];
  if (cut.length) return ["Degraded", "warn", `${cut.length} of ${index.shards.length} shards unreachable`];
  if (index.blind) return ["Blind", "bad", index.reason];
  if (index.precision === null && index.recall === null) {
    const none = index.num_requests ? "No cached token was predicted or found yet" : "No prompt has been compared with it yet";
    return ["Not judged yet", "", none];
  }
  return ["Healthy", "good", accuracy];
}
