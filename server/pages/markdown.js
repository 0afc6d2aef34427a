// The Markdown that models write, built as elements: the model's own markup stays text.

import { h } from "./dom.js";

const FENCE = /^\s*(```+|~~~+)/;
const HEADING = /^\s{0,3}(#{1,6})\s+/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^\s{0,3}>\s?/;
const ITEM = /^(\s*)([-*+]|\d+[.)])\s+(?=\S)/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^\s*][^*]*)\*|~~([^~]+)~~|\[([^\]]+)\]\(([^)\s]+)\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?])/g;

/** Returns the elements of a text; an open fence is code up to the end. */
export function render(text) {
  return blocks(text.split("\n"));
}

function blocks(lines) {
  const elements = [];
  for (let at = 0; at < lines.length; ) {
    const [element, next] = block(lines, at);
    if (element) elements.push(element);
    at = next;
  }
  return elements;
}

/** Returns the element that begins at this line, and the line after it. */
function block(lines, at) {
  const line = lines[at];
  if (line.trim() === "") return [null, at + 1];
  if (FENCE.test(line)) return fence(lines, at);
  if (HEADING.test(line)) return [h("h3", {}, ...inline(line.replace(HEADING, "").replace(/\s#+\s*$/, ""))), at + 1];
  if (RULE.test(line)) return [h("hr"), at + 1];
  if (QUOTE.test(line)) {
    const end = endOf(lines, at, (next) => QUOTE.test(next));
    return [h("blockquote", {}, ...blocks(lines.slice(at, end).map((quoted) => quoted.replace(QUOTE, "")))), end];
  }
  if (ITEM.test(line)) return list(lines, at);
  if (isTable(lines, at)) return table(lines, at);
  const end = endOf(lines, at + 1, (next, index) => next.trim() !== "" && !begins(next) && !isTable(lines, index));
  return [h("p", {}, ...withBreaks(lines.slice(at, end))), end];
}

const begins = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
const isTable = (lines, at) => lines[at].includes("|") && TABLE_LINE.test(lines[at + 1] ?? "") && (lines[at + 1] ?? "").includes("-");

function endOf(lines, at, belongs) {
  let end = at;
  while (end < lines.length && belongs(lines[end], end)) end += 1;
  return end;
}

function fence(lines, at) {
  const mark = FENCE.exec(lines[at])[1];
  const end = endOf(lines, at + 1, (line) => !line.trim().startsWith(mark));
  const code = lines.slice(at + 1, end).join("\n");
  return [h("div", { class: "code" }, copyButton(code), h("pre", { tabindex: "0" }, h("code", {}, code))), end + 1];
}

/** Returns a list with the lists and paragraphs in its items; they are indented deeper than its marks. */
function list(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const isOwn = (line) => ITEM.test(line) && ITEM.exec(line)[1].length <= indent.length + 1;
  const items = [];
  let next = at;
  while (next < lines.length && isOwn(lines[next]) && /\d/.test(ITEM.exec(lines[next])[2]) === ordered) {
    const begin = next;
    next = endOf(lines, next + 1, (line, index) => {
      if (line.trim() === "") return /^\s+\S/.test(lines[index + 1] ?? "") && !isOwn(lines[index + 1]);
      return !isOwn(line) && (/^\s/.test(line) || (!begins(line) && lines[index - 1].trim() !== ""));
    });
    const inner = lines.slice(begin + 1, next);
    const depth = Math.min(...inner.filter((line) => /^\s+\S/.test(line)).map((line) => /^\s*/.exec(line)[0].length), 9);
    const rest = inner.map((line) => line.slice(Math.min(depth, /^\s*/.exec(line)[0].length)));
    const [first, ...others] = blocks([lines[begin].replace(ITEM, ""), ...rest]);
    items.push(h("li", {}, ...(first?.tagName === "P" ? first.childNodes : [first]), ...others));
    while (lines[next]?.trim() === "" && isOwn(lines[next + 1] ?? "")) next += 1;
  }
  return [h(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {}, ...items), next];
}

function table(lines, at) {
  const end = endOf(lines, at + 2, (line) => line.includes("|"));
  const sides = cells(lines[at + 1]).map((line) => (/^:?-+:$/.test(line) ? (line.startsWith(":") ? "center" : "right") : null));
  const row = (tag) => (line) =>
    h("tr", {}, ...cells(line).map((text, index) => h(tag, { class: sides[index] }, ...inline(text))));
  const body = lines.slice(at + 2, end).map(row("td"));
  const element = h("table", {}, h("thead", {}, row("th")(lines[at])), h("tbody", {}, ...body));
  return [h("div", { class: "table", tabindex: "0" }, element), end];
}

const cells = (line) =>
  line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replace("\\|", "|"));

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

function withBreaks(lines) {
  return lines.flatMap((line, position) => (position ? [h("br"), ...inline(line)] : inline(line)));
}

function inline(text) {
  const parts = [];
  let last = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > last) parts.push(text.slice(last, match.index));
    const [whole, code, strong, em, gone, label, target, url] = match;
    if (code !== undefined) parts.push(h("code", {}, code));
    else if (strong !== undefined) parts.push(h("strong", {}, ...inline(strong)));
    else if (em !== undefined) parts.push(h("em", {}, ...inline(em)));
    else if (gone !== undefined) parts.push(h("del", {}, gone));
    else if (label !== undefined && !/^https?:\/\//.test(target)) parts.push(whole);
    else parts.push(h("a", { href: target ?? url, target: "_blank", rel: "noopener noreferrer" }, label ?? url));
    last = match.index + match[0].length;
  }
  parts.push(text.slice(last));
  return parts;
}
