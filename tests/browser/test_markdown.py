"""The chat page in a real Chromium, with answers that are made to hurt it: nothing is lost, nothing becomes markup."""

from __future__ import annotations

import json
import mimetypes
import random
from typing import Any

import pytest

from server.ops.app import FOLDER, SECURITY_HEADERS

SITE = "http://chat.test"
ALLOWED = [
    "A",
    "BLOCKQUOTE",
    "BR",
    "BUTTON",
    "CODE",
    "DEL",
    "DIV",
    "EM",
    "H3",
    "HR",
    "LI",
    "OL",
    "P",
    "PRE",
    "STRONG",
    "TABLE",
    "TBODY",
    "TD",
    "TH",
    "THEAD",
    "TR",
    "UL",
]
ATTRIBUTES = ["class", "href", "rel", "start", "tabindex", "target", "type"]
MAX_PART = 32768
HOSTILE = {
    "quotes": ">" * 2500,
    "quotes with spaces": "> " * 2500 + "end",
    "brackets": "[" * 40_000,
    "images": "![" * 20_000,
    "links": "[a](" * 10_000,
    "backticks": "a`b``c```" * 5_000,
    "stars": "**a *b " * 6_000,
    "lists": "\n".join(" " * depth + "- x" for depth in range(300)),
    "a list in a line": "- " * 5_000,
    "numbers in a line": "1. " * 5_000,
    "one line": "x" * 1_000_000,
    "words": "some words " * 90_000,
    "an open fence": "```\n" + "code\n" * 60_000,
    "a table": "|a|b|\n|-|-|\n" + "|x|y|\n" * 5_000,
    "definitions": "[a]: b\n" * 10_000,
    "empty lines": "\n" * 100_000 + "end",
    "surrogates": "\U0001f600" * 40_000,
    "carriage returns": "a\r\rb\r\n\nc\n\r" * 6_000,
}
MARKUP = """<script>window.hit = 1</script> <img src=x onerror="window.hit = 1"> <svg/onload=hit=1>

<b>bold</b> &lt;i&gt; <!-- c --> <style>*{display:none}</style>

[a](javascript:window.hit=1) [b](JaVaScRiPt:x) [c](data:text/html,x) [d](vbscript:x) [e](//host) [f](/drain) [g](file:///x)
![h](http://chat.test/x.png) <javascript:x> <https://good.test/?a="b> javascript:x ftp://x.y //a.b

[i](https://good.test "title\\" onclick=\\"x") [j](mailto:a@b.c) [k]

[k]: javascript:window.hit=1

<details open ontoggle=window.hit=1>
```html" onload="x
</code></pre><script>window.hit = 1</script>
```
"""
GROW = """async ({ text, step }) => {
  const { default: MarkdownIt } = await import("/pages/markdown-it.js");
  const { Markdown } = await import("/pages/markdown.js");
  const sizes = []; let inline = 0;
  const { parse } = MarkdownIt.prototype, { ParserInline } = MarkdownIt;
  const parseInline = ParserInline.prototype.parse;
  MarkdownIt.prototype.parse = function (part, env) {
    sizes.push(part.length);
    return parse.call(this, part, env);
  };
  ParserInline.prototype.parse = function (part, ...rest) {
    inline = Math.max(inline, part.length);
    return parseInline.call(this, part, ...rest);
  };
  const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  try {
    const box = document.createElement("div"), view = new Markdown(box);
    let looks = 0, changed = 0;
    for (let length = step; length < text.length + step; length += step) {
      const kept = [...box.childNodes].slice(0, -200);
      view.show(text.slice(0, length));
      looks += 1;
      changed += kept.filter((node, index) => box.childNodes[index] !== node).length;
    }
    for (let before = -1; before !== sizes.length; await frame()) before = sizes.length;
    const elements = [...box.querySelectorAll("*")];
    return {
      looks, changed, parses: sizes.length, largest: Math.max(...sizes), inline,
      tags: [...new Set(elements.map(({ tagName }) => tagName))],
      attributes: [...new Set(elements.flatMap((element) => element.getAttributeNames()))],
      links: elements.map((element) => element.getAttribute("href")).filter(Boolean),
      text: box.textContent,
    };
  } finally { MarkdownIt.prototype.parse = parse; ParserInline.prototype.parse = parseInline; }
}"""


class Site:
    """The files of the chat page as the ops port serves them, and an API with one answer."""

    def __init__(self, context: Any) -> None:
        self.answer = ""
        self.problems: list[str] = []
        context.route(f"{SITE}/**", self._serve)
        self.page = context.new_page()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.goto(f"{SITE}/chat")

    def _serve(self, route: Any) -> None:
        path = route.request.url.removeprefix(SITE)
        if path == "/chat/api/v1/models":
            return route.fulfill(json={"data": [{"id": "tiny"}]})
        if path == "/chat/api/v1/chat/completions":
            size = max(1, len(self.answer) // 50)
            parts = [self.answer[at : at + size] for at in range(0, len(self.answer), size)]
            chunks = [{"choices": [{"delta": {"content": part}}]} for part in parts]
            lines = [*map(json.dumps, chunks), json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}]})]
            body = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
            return route.fulfill(content_type="text/event-stream", body=body)
        file = FOLDER / ("chat.html" if path == "/chat" else path.rpartition("/")[2])
        kind = mimetypes.guess_type(file.name)[0] or "text/plain"
        return route.fulfill(body=file.read_bytes(), headers={**SECURITY_HEADERS, "content-type": kind})

    def grow(self, text: str, step: int) -> dict[str, Any]:
        """Show a text that grows, as frames do, and return what it became."""
        found: dict[str, Any] = self.page.evaluate(GROW, {"text": text, "step": step})
        return found


@pytest.fixture(scope="module")
def site(browser: Any) -> Site:
    context = browser.new_context()
    context.set_default_timeout(180_000)
    return Site(context)


def assert_bounded(found: dict[str, Any], text: str) -> None:
    assert found["largest"] <= MAX_PART
    assert found["inline"] <= 4096
    assert found["changed"] == 0
    assert found["parses"] <= found["looks"] + 3 * (len(text) // MAX_PART + 1)
    assert set(found["tags"]) <= set(ALLOWED)
    assert set(found["attributes"]) <= set(ATTRIBUTES)
    assert all(link.lower().startswith(("http://", "https://", "mailto:")) for link in found["links"])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_costs_a_bounded_part_a_frame(site: Site, name: str) -> None:
    text = HOSTILE[name]
    found = site.grow(text, max(1, len(text) // 40))
    assert_bounded(found, text)
    letters = [letter for letter in ("x", "end", "code", "words", "\U0001f600") if letter in text]
    assert all(found["text"].count(letter) == text.count(letter) for letter in letters), "some of it is not shown"
    assert "\ufffd" not in found["text"]


def test_markup_of_a_model_stays_text(site: Site) -> None:
    for step in (7, 100_000):
        found = site.grow(MARKUP, step)
        assert_bounded(found, MARKUP * 100)
        assert "<script>window.hit = 1</script>" in found["text"]
        assert "<b>bold</b>" in found["text"]
        assert {link.partition(":")[0] for link in found["links"]} == {"http", "https", "mailto"}
    assert site.page.evaluate("window.hit ?? null") is None


def test_random_texts_are_elements_of_the_list(site: Site) -> None:
    pieces = [
        *"*_`[]()!<>#-|~\\\n\n \"'&:=+1.",
        "http://a.b",
        "javascript:x",
        "<img onerror=hit=1>",
        "```",
        "> ",
        "word",
    ]
    for seed in range(40):
        drawn = random.Random(seed)
        text = "".join(drawn.choices(pieces, k=400))
        assert_bounded(site.grow(text, 97), text * 100)
    assert site.page.evaluate("window.hit ?? null") is None


def test_a_text_in_steps_is_as_the_whole(site: Site) -> None:
    parts = ["# Head\n\n", "a *b*\nc\n\n", "- x\n- y\n\n  z\n\n", "> q\n\n", "```py\nx = 1\n\ny\n```\n\n"]
    parts += ["|a|\n|-|\n|1|\n\n", "1. one\n"]
    html = """async (steps) => {
      const { Markdown } = await import("/pages/markdown.js");
      const box = document.createElement("div"), view = new Markdown(box);
      let all = "";
      for (const step of steps) view.show((all += step));
      return box.innerHTML;
    }"""
    for seed in range(40):
        text = "".join(random.Random(seed).choices(parts, k=12))
        assert site.page.evaluate(html, list(text)) == site.page.evaluate(html, [text])


@pytest.mark.parametrize("name", ["quotes", "brackets", "a table", "words"])
def test_the_answer_is_stored_and_shown_again(site: Site, name: str) -> None:
    site.answer = HOSTILE[name]
    site.page.click("#new")
    site.page.fill("#prompt", name)
    site.page.keyboard.press("Enter")
    site.page.locator(".facts", has_text="Copy").last.wait_for()
    stored = site.page.evaluate("JSON.parse(localStorage['headstart.conversations'])[0].messages[1].content")
    assert stored == site.answer
    site.page.reload()
    site.page.locator(".message .body").last.wait_for()
    assert site.problems == []
