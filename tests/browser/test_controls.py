"""Controls of both pages, and answers that are rare, at an API that is scripted."""

from __future__ import annotations

import json
import mimetypes
from typing import Any, Final

from server.ops.app import FOLDER, SECURITY_HEADERS

SITE: Final = "http://pages.example"
REFUSAL: Final = {"status": 401, "json": {"error": {"message": "The ops key is needed."}}}


class Scripted:
    """A page as the ops port serves it, the answers of its API by path, and the keys that came."""

    def __init__(self, browser: Any, page: str, answers: dict[str, dict[str, Any] | None]) -> None:
        """An answer that is None never comes."""
        self.answers, self.keys = answers, list[str | None]()
        context = browser.new_context()
        context.route(f"{SITE}/**", self._serve)
        self.page = context.new_page()
        self.page.goto(f"{SITE}/{page}")

    def _serve(self, route: Any) -> None:
        path = route.request.url.removeprefix(f"{SITE}/")
        if path in self.answers:
            self.keys.append(route.request.headers.get("authorization"))
            if (answer := self.answers[path]) is not None:
                route.fulfill(**answer)
            return
        file = FOLDER / path.removeprefix("pages/")
        file = file if file.suffix else file.with_suffix(".html")
        if not file.exists():
            route.abort()
            return
        kind = mimetypes.guess_type(file.name)[0] or "text/plain"
        route.fulfill(body=file.read_bytes(), headers={**SECURITY_HEADERS, "content-type": kind})


def chat(browser: Any, answer: dict[str, Any] | None) -> Any:
    models = {"json": {"data": [{"id": "tiny"}]}}
    page = Scripted(browser, "chat", {"chat/api/v1/models": models, "chat/api/v1/chat/completions": answer}).page
    page.locator("#model option").first.wait_for(state="attached")
    page.fill("#prompt", "Why?")
    page.keyboard.press("Enter")
    return page


def test_a_chat_that_is_deleted_in_its_answer_is_gone(browser: Any) -> None:
    page = chat(browser, None)
    page.locator("#stop").wait_for()
    page.click("#conversations .remove")
    page.locator("#send").wait_for()
    assert "Why?" not in page.locator("#conversations").inner_text()
    assert page.evaluate("localStorage.getItem('headstart.conversations')") == "[]"


def test_reasoning_is_shown_in_either_field(browser: Any) -> None:
    for name in ("reasoning", "reasoning_content"):
        chunks = [{"choices": [{"delta": {name: "Because."}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]
        body = "".join(f"data: {text}\n\n" for text in [*map(json.dumps, chunks), "[DONE]"])
        page = chat(browser, {"content_type": "text/event-stream", "body": body})
        page.locator(".assistant .body", has_text="Because.").wait_for(timeout=5000)


def test_enter_gives_the_key_and_escape_does_not(browser: Any) -> None:
    scripted = Scripted(browser, "dashboard", {"history": REFUSAL})
    page, dialog = scripted.page, scripted.page.locator("#key-dialog")
    dialog.wait_for()
    page.fill("#key-input", "wrong")
    with page.expect_response("**/history", timeout=5000):
        page.keyboard.press("Enter")
    dialog.wait_for()
    assert scripted.keys == [None, "Bearer wrong"]
    page.keyboard.press("Escape")
    page.locator("#day-text", has_text="does not answer").wait_for(timeout=5000)
    assert scripted.keys == [None, "Bearer wrong"]
    assert not dialog.is_visible()


def test_a_clock_that_was_set_back_hides_no_other_minute(browser: Any) -> None:
    """Rows of a time that has not come are left out."""
    sums = ["answered", "wrong", "refused", "failed", "left", "prompt_tokens", "cached_tokens", "output_tokens"]
    columns = ["at", "model", *sums, "queue_s", "wire_s", "prefill_s", "prefill_saved_s", "errors", "first_tokens"]
    rows = [[at, "m", 1, *[0] * 11, {}, []] for at in (6000, 7200)]
    report = {"now": 6030.0, "columns": columns, "first_token_bounds_s": [], "rows": rows, "reasons": []}
    page = Scripted(browser, "dashboard", {"history": {"json": report}}).page
    page.locator("#day-text", has_text="1 request,").wait_for(timeout=5000)


def test_a_second_tab_loses_no_chat_of_the_first(browser: Any) -> None:
    chunks = [{"choices": [{"delta": {"content": "Yes."}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]
    body = "".join(f"data: {text}\n\n" for text in [*map(json.dumps, chunks), "[DONE]"])
    models = {"json": {"data": [{"id": "tiny"}]}}
    answers = {"chat/api/v1/models": models, "chat/api/v1/chat/completions": {"body": body}}
    first = Scripted(browser, "chat", answers).page
    second = first.context.new_page()
    second.goto(first.url)
    for page, text in ((first, "One?"), (second, "Two?"), (first, "Three?")):
        page.locator("#model option").first.wait_for(state="attached")
        page.click("#new")
        page.fill("#prompt", text)
        page.keyboard.press("Enter")
        page.locator(".assistant .body", has_text="Yes.").wait_for(timeout=5000)
        page.locator("#send").wait_for()
    stored = json.loads(first.evaluate("localStorage.getItem('headstart.conversations')"))
    assert [each["title"] for each in stored] == ["Three?", "Two?", "One?"]
