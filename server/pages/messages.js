// The thread: messages, with the cost of each answer below it.

import { h, setStyle } from "./dom.js";
import { count, rate, seconds } from "./format.js";
import { Markdown, copyButton } from "./markdown.js";

const ENDS = { length: "stopped at the token limit", aborted: "stopped by you" };
const IDEAS = ["What is the capital of France?", "Explain what a KV cache is, in three sentences.", "Write a haiku about waiting."];

export class MessageView {
  constructor(message, retry) {
    this.message = message;
    this.retry = retry;
    this.body = h("div", { class: "body" });
    this.markdown = new Markdown(this.body);
    this.facts = h("div", { class: "facts" });
    this.element = h(
      "article",
      { class: `message ${message.role}` },
      h("p", { class: "who" }, message.role === "user" ? "You" : "Model"),
      this.body,
      this.facts,
    );
    this.show();
  }

  show() {
    if (this.message.role === "user") this.body.textContent = this.message.content;
    else this.markdown.show(this.message.content);
    this.facts.replaceChildren(...factsOf(this.message, this.retry));
    this.facts.hidden = !this.facts.childElementCount;
  }

  set writing(writing) {
    this.element.classList.toggle("writing", writing);
  }
}

function factsOf({ content, facts, error, final, role }, retry) {
  if (role === "user") return [];
  const parts = [];
  const span = (text, name) => h("span", name ? { class: name } : {}, text);
  if (facts?.worker) {
    const why = { class: "worker", href: `dashboard#${facts.request}`, title: "Why this worker" };
    parts.push(facts.request ? h("a", why, facts.worker) : span(facts.worker, "worker"));
  }
  if (facts && facts.prompt !== null) {
    const held = h("i");
    setStyle(held, "width", `${((100 * facts.cached) / Math.max(1, facts.prompt)).toFixed(1)}%`);
    const bar = h("span", { class: "prompt", "aria-hidden": "true" }, held);
    const text = h("span", { "data-cached": String(facts.cached) }, `${count(facts.cached)} of ${count(facts.prompt)} prompt tokens from cache`);
    parts.push(h("span", { class: "hit" }, bar, text));
  }
  if (facts?.ttftS) parts.push(span(`first token after ${seconds(facts.ttftS)}`));
  if (facts?.perS) parts.push(span(`${rate(facts.perS)} tokens per second`));
  if (facts && ENDS[facts.end]) parts.push(span(ENDS[facts.end], "cut"));
  if (error) parts.push(span(error, "failed"));
  if (facts?.end && content) parts.push(copyButton(content));
  if ((error && !final) || facts?.end === "aborted") {
    parts.push(h("button", { class: "button small plain", type: "button", onclick: retry }, "Try again"));
  }
  return parts;
}

export function welcome(ask) {
  const ideas = IDEAS.map((idea) => h("li", {}, h("button", { class: "button", type: "button", onclick: () => ask(idea) }, idea)));
  return h(
    "div",
    { class: "welcome" },
    h("h2", {}, "Ask something, then ask again"),
    h(
      "p",
      {},
      "A second message repeats the conversation so far, so it goes to the worker that already holds it. ",
      "Each answer shows its worker, and how much of its prompt came from the cache.",
    ),
    h("ul", {}, ...ideas),
  );
}
