// The Markdown that models write, as elements. markdown-it reads it; no text becomes markup here.

import { h } from "./dom.js";
import MarkdownIt from "./markdown-it.js";

const MAX_PART = 32768;
const MAX_INLINE = 4096;
const TAGS = { h1: "h3", h2: "h3", h4: "h3", h5: "h3", h6: "h3", s: "del" };
const ALLOWED = new Set("p h3 blockquote ul ol li table thead tbody tr th td strong em del a".split(" "));
const NEWLINE = /\r\n?|\n/g;

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true }).disable("image");
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.validateLink = (url) => /^(https?:\/\/|mailto:)/i.test(url);
// Marks within a paragraph take more than linear time, so a long one stays as it is.
parser.core.ruler.at("inline", ({ md, env, tokens, Token }) => {
  for (const { type, content, children } of tokens) {
    if (type !== "inline") continue;
    if (content.length <= MAX_INLINE) md.inline.parse(content, md, env, children);
    else children.push(Object.assign(new Token("text", "", 0), { content }));
  }
});

/** An answer in an element. Blocks before the last one stay as they are, so each look at a growing text costs the same. */
export class Markdown {
  #box;
  #text = "";
  #read = 0;
  #kept = 0;
  #frame = 0;

  constructor(box) {
    this.#box = box;
  }

  /** Shows a text, of which the last one was the beginning. A long rest follows in the next frames. */
  show(text) {
    this.#text = text;
    cancelAnimationFrame(this.#frame);
    while (this.#box.childNodes.length > this.#kept) this.#box.lastChild.remove();
    const part = this.#text.slice(this.#read, this.#read + MAX_PART);
    const isLast = this.#read + MAX_PART >= text.length;
    const tokens = parser.parse(part, {});
    const last = tokens.findLastIndex(({ level, nesting, map }) => level === 0 && nesting >= 0 && map);
    const isDeep = tokens.some(({ level }) => level >= parser.options.maxNesting - 1);
    const begin = last > 0 ? offset(part, tokens[last].map[0]) : 0;
    // A line without its end may still belong to the block before it.
    if (begin && !isDeep && (!isLast || part.includes("\n", begin))) {
      this.#box.append(...elements(tokens.slice(0, last)));
      this.#keep(begin);
      if (isLast) this.#box.append(...elements(tokens.slice(last)));
    } else if (isLast && !isDeep) {
      this.#box.append(...elements(tokens));
    } else {
      // The parser leaves out what is nested too deep.
      const end = isLast ? part.length : part.lastIndexOf("\n") + 1 || part.length;
      this.#box.append(h("div", { class: "plain" }, part.slice(0, end).trimEnd()));
      if (!isLast) this.#keep(end);
    }
    if (!isLast) this.#frame = requestAnimationFrame(() => this.show(this.#text));
  }

  #keep(length) {
    this.#read += length;
    this.#kept = this.#box.childNodes.length;
  }
}

/** Returns where a line begins. */
function offset(text, line) {
  const pattern = new RegExp(NEWLINE);
  for (let at = 0; at < line; at += 1) pattern.exec(text);
  return pattern.lastIndex;
}

function elements(tokens) {
  const parents = [h("div")];
  for (const token of tokens) {
    const parent = parents.at(-1);
    if (token.hidden) continue;
    if (token.nesting < 0) parents.pop();
    else if (token.nesting > 0) {
      const element = elementOf(token);
      parent.append(element.tagName === "TABLE" ? h("div", { class: "table", tabindex: "0" }, element) : element);
      parents.push(element);
    } else if (token.type === "inline") parent.append(...elements(token.children));
    else if (token.type === "fence" || token.type === "code_block") parent.append(code(token.content.replace(/\n$/, "")));
    else if (token.type === "code_inline") parent.append(h("code", {}, token.content));
    else if (["hr", "br"].includes(token.tag)) parent.append(h(token.tag));
    else parent.append(token.content);
  }
  return parents[0].childNodes;
}

function elementOf(token) {
  const tag = TAGS[token.tag] ?? token.tag;
  const link = tag === "a" ? { href: token.attrGet("href"), target: "_blank", rel: "noopener noreferrer" } : {};
  const side = { "text-align:right": "right", "text-align:center": "center" }[token.attrGet("style")];
  return h(ALLOWED.has(tag) ? tag : "span", { class: side, start: token.attrGet("start"), ...link });
}

function code(text) {
  return h("div", { class: "code" }, copyButton(text), h("pre", { tabindex: "0" }, h("code", {}, text)));
}

/** Returns a button that copies a text, and shows for a moment that it did. */
export function copyButton(text) {
  const copy = async (event) => {
    const button = event.currentTarget;
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  return h("button", { class: "button small plain copy", type: "button", onclick: copy }, "Copy");
}
