"""The dashboard and the chat page in a real Chromium, over a real `headstart serve`.

`make test-browser ARGS="--screenshots docs/images"` writes the pictures of the docs again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import Serve
from tests.waiting import wait_until

axe_api = pytest.importorskip("axe_playwright_python.sync_playwright", reason="make test-browser installs it")

WIDE, PHONE, NARROW = {"width": 1360, "height": 900}, {"width": 390, "height": 844}, {"width": 320, "height": 640}
ANSWERED_MS = 180_000


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    with Serve() as running:
        yield running


class Pages:
    """Both pages, and the errors and warnings of their consoles."""

    def __init__(self, browser: Any, serve: Serve) -> None:
        context = browser.new_context(viewport=WIDE)
        self.problems: list[str] = []
        self.chat, self.dashboard = context.new_page(), context.new_page()
        for page in (self.chat, self.dashboard):
            page.on("console", self._on_console)
            page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.dashboard.goto(f"{serve.ops_url}/dashboard")
        self.chat.goto(f"{serve.ops_url}/chat")

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def limit_answers(self, num_tokens: int) -> None:
        self.chat.click("#settings summary")
        self.chat.fill("#max-tokens", str(num_tokens))
        self.chat.press("#max-tokens", "Tab")
        self.chat.click("#settings summary")

    def ask(self, text: str) -> None:
        """Send a message, and return while it is being answered."""
        self.chat.fill("#prompt", text)
        self.chat.keyboard.press("Enter")
        self.chat.wait_for_selector("#stop:visible")

    def wait_answered(self) -> None:
        self.chat.wait_for_selector("#send:visible", timeout=ANSWERED_MS)

    def cached(self, num_answers: int) -> list[int]:
        # No wait_for_function: at its second look, the page's policy forbids it to evaluate a text.
        self.chat.locator("[data-cached]").nth(num_answers - 1).wait_for()
        return [int(e.get_attribute("data-cached")) for e in self.chat.query_selector_all("[data-cached]")]

    def worker_row(self, worker: str, state: str = "") -> Any:
        return self.dashboard.wait_for_selector(f'tr[data-worker="{worker}"]{state}', timeout=ANSWERED_MS)


@pytest.fixture(scope="module")
def pages(browser: Any, serve: Serve) -> Pages:
    return Pages(browser, serve)


def test_the_second_turn_finds_the_first_cached(pages: Pages) -> None:
    pages.limit_answers(40)
    for text in ("What is the capital of France?", "And which river runs through it?"):
        pages.ask(text)
        pages.wait_answered()
    first, second = pages.cached(2)
    assert first == 0
    assert second >= 16


def test_both_workers_and_the_decisions_are_on_the_dashboard(pages: Pages) -> None:
    for worker in ("worker-0", "worker-1"):
        assert worker in pages.worker_row(worker).inner_text()
    assert len(pages.dashboard.query_selector_all("#decisions li")) >= 2
    assert re.search(r"worker-\d", pages.dashboard.inner_text("#verdict"))
    pages.dashboard.locator("#timeline", has_text=re.compile(r"waited .*, prefill .*, answer ")).wait_for()


def test_a_decision_is_found_by_a_requests_id(pages: Pages, serve: Serve) -> None:
    """By the link of an answer, and by typing."""
    link = pages.chat.query_selector(".facts a.worker").get_attribute("href")
    page = pages.dashboard.context.new_page()
    page.goto(f"{serve.ops_url}/{link}")
    page.wait_for_selector("#follow:visible")
    assert re.search(r"waited .*, prefill .*, answer ", page.inner_text("#timeline"))
    page.fill("#find-id", "req_unknown")
    page.press("#find-id", "Enter")
    page.wait_for_selector("#find-problem:visible")
    assert "req_unknown" in page.inner_text("#find-problem")
    page.close()


def converse(serve: Serve, topic: str) -> None:
    """Hold two turns under a system prompt that all conversations share."""
    client = serve.client()
    messages: list[Any] = [{"role": "system", "content": "You are a guide. Answer in one short sentence. " * 6}]
    for question in (f"Tell me about {topic}.", "And what else?"):
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(
            model="SmolLM2-135M-Instruct", messages=messages, max_tokens=20, temperature=0
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


def num_tokens(row: str) -> int:
    match = re.search(r"([\d,]+) tokens", row)
    assert match is not None, row
    return int(match[1].replace(",", ""))


def test_the_tree_shows_shared_prefixes_and_who_holds_them(pages: Pages, serve: Serve) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(converse, [serve] * 4, ["Rome", "Oslo", "Lima", "Cairo"]))
    branch = pages.dashboard.wait_for_selector("[data-prefix] [data-prefix]", timeout=ANSWERED_MS)
    root = pages.dashboard.locator("[data-prefix]", has=pages.dashboard.locator("[data-prefix]")).first
    assert 0 < num_tokens(root.inner_text()) < num_tokens(branch.inner_text()), "a branch is longer than its root"
    holders = [chip.inner_text() for chip in branch.query_selector_all(".chip")]
    assert holders
    assert set(holders) <= set(root.locator(".chip").all_inner_texts()) <= {"worker-0", "worker-1"}
    pages.dashboard.focus("#prefixes-scroll")
    assert pages.dashboard.evaluate("document.activeElement.id") == "prefixes-scroll", "by keyboard too"
    pages.dashboard.evaluate("document.activeElement.blur()")


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(pages: Pages, scheme: str, viewport: dict[str, int]) -> None:
    for page in (pages.dashboard, pages.chat):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size(viewport)
        violations = axe_api.Axe().run(page).response["violations"]
        page.set_viewport_size(WIDE)
        assert [v["id"] for v in violations if v["impact"] in ("serious", "critical")] == []


def test_the_figures_survive_a_reload(pages: Pages) -> None:
    """The last minute is whole, though no page was open for a moment."""
    pages.dashboard.reload()
    pages.dashboard.locator("#hit", has_text=re.compile(r"[0-9]+.%")).wait_for()
    pages.dashboard.locator("#day-text", has_text=re.compile(r"[1-9][0-9]* requests?, 0 refused")).wait_for()
    assert pages.dashboard.locator("#day-requests g").count() == 60
    assert float(pages.dashboard.locator("#day-requests .answered").last.get_attribute("width")) > 0
    pages.dashboard.click("#day-hours button[value='24']")
    assert "In the last 24 hours" in pages.dashboard.inner_text("#day-text")


def test_the_headline_says_for_whom_it_is_not_well(pages: Pages) -> None:
    rows = [{"what": "refused", "why": why, "count": n} for why, n in (("queue_full", 1), ("rate, tenant acme", 9))]
    read = "async (rows) => (await import('/pages/changes.js')).turned(rows, 'refused')"
    assert pages.dashboard.evaluate(read, rows) == ["10 requests refused lately, most: rate, tenant acme"]


CUT = """() => {
  const scrolls = (e) => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  const isHidden = (e) => e.closest(".visually-hidden, svg, [hidden]") || !e.getClientRects().length;
  return [...document.querySelectorAll("main .panel, main .tile, main .summary")].flatMap((panel) => {
    const edge = panel.getBoundingClientRect();
    return [...panel.querySelectorAll("*")].filter((e) => {
      if (isHidden(e)) return false;
      for (let up = e.parentElement; up !== panel; up = up.parentElement) if (scrolls(up)) return false;
      const box = e.getBoundingClientRect();
      const isOver = e.tagName === "TH" && e.scrollWidth > e.clientWidth + 1;
      return isOver || box.right > edge.right + 1 || box.left < edge.left - 1;
    }).map((e) => `${panel.querySelector("h2")?.textContent}: ${e.tagName} ${e.className} ${e.textContent}`);
  });
}"""
"""Returns what is outside of its panel, or covers its neighbour, and cannot be scrolled to."""

MARKDOWN = """\
| model | tokens |
|:--|--:|
| a \\| b | **12** |

1. One
   - inner

   ```
   x = 1
   ```
2. Two

> quoted [page](https://example.com/a_b) [bad](javascript:alert(1)) <b>text</b>
"""


def test_markdown_becomes_elements(pages: Pages) -> None:
    markup = pages.chat.evaluate(
        "async (text) => { const { Markdown } = await import('/pages/markdown.js');"
        " const box = document.createElement('div'); new Markdown(box).show(text); return box.innerHTML; }",
        MARKDOWN,
    )
    assert '<td>a | b</td><td class="right"><strong>12</strong></td>' in markup
    assert re.search(
        r'<li><p>One</p><ul><li>inner</li></ul><div class="code">.*x = 1.*</div></li><li><p>Two</p></li>', markup
    )
    assert '<blockquote><p>quoted <a href="https://example.com/a_b"' in markup
    assert "[bad](javascript:alert(1)) &lt;b&gt;text" in markup


def test_a_phone_needs_no_sideways_scrolling(pages: Pages, screenshots: Path | None) -> None:
    """And nothing is cut in any panel. Also takes the pictures of both pages, on request."""
    pages.dashboard.wait_for_selector("#why:visible")
    pages.dashboard.locator("body", has_text=re.compile(r"of [0-9,]+ tokens answered in the last minute")).wait_for()
    for name, page in (("dashboard", pages.dashboard), ("chat", pages.chat)):
        for scheme, size in (("light", WIDE), ("dark", WIDE), ("phone", PHONE)):
            page.emulate_media(color_scheme="light" if scheme == "phone" else scheme)
            page.set_viewport_size(size)
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= size["width"]
            assert page.evaluate(CUT) == [], (name, scheme)
            if screenshots is not None:
                page.evaluate("scrollTo(0, 0)")
                page.screenshot(path=screenshots / f"{name}-{scheme}.png", full_page=scheme != "phone")
        page.set_viewport_size(NARROW)
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"], name
        assert page.evaluate(CUT) == [], name
        page.set_viewport_size(WIDE)


def test_a_stream_goes_on_when_its_worker_is_killed(pages: Pages, serve: Serve) -> None:
    pages.limit_answers(400)
    num_answers = len(pages.cached(2))
    pages.ask("Tell me a long story about a ship that sails around the world.")
    pages.chat.locator(".message.writing .body", has_text=re.compile(".{40}", re.DOTALL)).wait_for()
    decision = pages.dashboard.inner_text("#verdict")
    found = re.search(r"worker-\d", decision)
    assert found is not None, decision
    before, epochs = pages.chat.inner_text("body"), serve.epochs()
    serve.child(found[0]).kill()
    pages.worker_row(found[0], ".dead")
    pages.dashboard.locator("#changes li", has_text=re.compile(rf"{found[0]} died")).wait_for()
    pages.wait_answered()
    assert len(pages.cached(num_answers + 1)) == num_answers + 1
    assert len(pages.chat.inner_text("body")) > len(before)
    wait_until(lambda: serve.epochs().get(found[0], epochs[found[0]]) != epochs[found[0]], what="it has restarted")


def test_a_worker_is_drained_by_button(pages: Pages, serve: Serve) -> None:
    serve.wait_ready(2)
    pages.worker_row("worker-1", ".serving")
    pages.dashboard.click('tr[data-worker="worker-1"] button:has-text("Drain")')
    pages.dashboard.click("#confirm-go")
    assert "Draining" in pages.worker_row("worker-1", ".draining").inner_text()


def test_the_browser_console_has_no_errors(pages: Pages) -> None:
    assert pages.problems == []
