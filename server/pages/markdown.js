// A small part of Markdown, built as elements: the model's own markup stays text.

import { h } from "./dom.js";

/** Returns the elements of a text: paragraphs, headings, lists and fenced code, open fences included. */
export function render(text) {
  const elements = [];
  const lines = text.split("\n");
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    if (/^\s*```/.test(line)) {
      let end = at + 1;
      while (end < lines.length && !/^\s*```\s*$/.test(lines[end])) end += 1;
      elements.push(h("pre", { tabindex: "0" }, h("code", {}, lines.slice(at + 1, end).join("\n"))));
      at = end + 1;
    } else if (/^#{1,6}\s/.test(line)) {
      elements.push(h("h3", {}, ...inline(line.replace(/^#+\s+/, ""))));
      at += 1;
    } else if (isItem(line)) {
      const ordered = /^\s*\d/.test(line);
      const items = [];
      while (at < lines.length && (isItem(lines[at]) || (/^\s+\S/.test(lines[at]) && items.length))) {
        if (isItem(lines[at])) items.push(lines[at].replace(/^\s*([-*+]|\d+[.)])\s+/, ""));
        else items[items.length - 1] += ` ${lines[at].trim()}`;
        at += 1;
      }
      const start = ordered ? /\d+/.exec(line)[0] : null;
      elements.push(h(ordered ? "ol" : "ul", start ? { start } : {}, ...items.map((item) => h("li", {}, ...inline(item)))));
    } else if (line.trim() === "") {
      at += 1;
    } else {
      const paragraph = [];
      while (at < lines.length && lines[at].trim() !== "" && !/^\s*```|^#{1,6}\s/.test(lines[at]) && !isItem(lines[at])) {
        paragraph.push(lines[at]);
        at += 1;
      }
      elements.push(h("p", {}, ...withBreaks(paragraph)));
    }
  }
  return elements;
}

const isItem = (line) => /^\s*([-*+]|\d+[.)])\s+\S/.test(line);

function withBreaks(lines) {
  return lines.flatMap((line, position) => (position ? [h("br"), ...inline(line)] : inline(line)));
}

function inline(text) {
  const parts = [];
  let last = 0;
  for (const match of text.matchAll(/`([^`]+)`|\*\*([^*]+)\*\*|\*([^\s*][^*]*)\*/g)) {
    if (match.index > last) parts.push(text.slice(last, match.index));
    if (match[1] !== undefined) parts.push(h("code", {}, match[1]));
    else if (match[2] !== undefined) parts.push(h("strong", {}, match[2]));
    else parts.push(h("em", {}, match[3]));
    last = match.index + match[0].length;
  }
  parts.push(text.slice(last));
  return parts;
}
