// The dashboard: shows one stream of events from the gateway.

import { byId, setAttribute, setText } from "./dom.js";
import { Changes } from "./changes.js";
import { Day } from "./day.js";
import { Decisions } from "./decisions.js";
import { offer } from "./filter.js";
import { askForKey, headers } from "./key.js";
import { Prefixes } from "./prefixes.js";
import { readEvents } from "./sse.js";
import { Tiles, indexState } from "./tiles.js";
import { Usage } from "./usage.js";
import { Workers } from "./workers.js";

const SILENT_MS = 4000;
const FIRST_RETRY_MS = 500;
const MAX_RETRY_MS = 8000;

const announce = (text) => setText(byId("announce"), text);
const notice = byId("notice");

function warn(text) {
  notice.hidden = !text;
  setText(notice, text);
}

const tiles = new Tiles();
const workers = new Workers(announce, warn);
const decisions = new Decisions((name) => workers.flash(name));
const prefixes = new Prefixes();
const changes = new Changes();
const usage = new Usage();

const on = {
  hello(hello) {
    tiles.begin(hello.history);
    decisions.begin(hello.policy, hello.decisions);
    byId("grafana").hidden = !hello.grafana_url;
    if (hello.grafana_url) byId("grafana").href = hello.grafana_url;
    setText(byId("about"), `Headstart ${hello.version} \u00b7 gateway ${hello.gateway} \u00b7 policy ${hello.policy}`);
  },
  snapshot(snapshot) {
    offer(new Set(snapshot.workers.map((worker) => worker.model)));
    tiles.show(snapshot.at, snapshot.traffic, snapshot.index);
    workers.show(snapshot.workers, snapshot.workers_needed, snapshot.objective_s);
    changes.judge(snapshot, indexState(snapshot.index));
    decisions.setRate(snapshot.traffic.decisions_per_s);
    if (snapshot.draining) link("Draining", "warn");
  },
  decisions(news) {
    decisions.add(news.decisions, news.found, news.times);
  },
  changes(news) {
    changes.show(news.changes);
  },
  prefixes(tree) {
    prefixes.show(tree);
    usage.show(tree.usage);
  },
};

function link(text, tone) {
  setText(byId("link"), text);
  setAttribute(byId("link-dot"), "class", `dot ${tone}`);
}

/** Follows one connection to its end, and throws the reason. */
async function follow() {
  const abort = new AbortController();
  let silence = 0;
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => abort.abort(new Error("it has gone silent")), SILENT_MS);
  };
  heard();
  try {
    const response = await fetch("events", { headers: headers(), signal: abort.signal });
    if (response.status === 401 && (await askForKey("The gateway requires its ops key."))) return true;
    if (!response.ok) throw new Error(`it answered ${response.status}`);
    for await (const { event, data } of readEvents(response)) {
      heard();
      if (event === "hello") {
        link("Live", "good");
        warn("");
      }
      on[event]?.(JSON.parse(data));
    }
    throw new Error("it has closed the connection");
  } finally {
    clearTimeout(silence);
  }
}

async function run() {
  let retryMs = FIRST_RETRY_MS;
  for (;;) {
    const began = performance.now();
    try {
      await follow();
      continue;
    } catch (error) {
      link("Disconnected", "bad");
      const reason = error instanceof TypeError ? "it cannot be reached" : error.message;
      warn(`No connection to the gateway: ${reason}. The data shown is out of date. Trying again; is the gateway running?`);
    }
    if (performance.now() - began > 5000) retryMs = FIRST_RETRY_MS;
    await new Promise((resolve) => setTimeout(resolve, retryMs));
    retryMs = Math.min(MAX_RETRY_MS, 2 * retryMs);
  }
}

/** The chat page links to the decision about an answer. */
function findNamed() {
  const id = decodeURIComponent(location.hash.slice(1));
  if (id.length > 1 && id !== "main") decisions.find(id);
}

addEventListener("hashchange", findNamed);
findNamed();
byId("key").addEventListener("click", () => askForKey());
run();
new Day((reasons) => usage.count(reasons), (id) => decisions.find(id)).run();
