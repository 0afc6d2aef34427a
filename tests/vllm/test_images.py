"""Images at a real engine: cached with their prompts and with no others, and every promise kept."""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import httpx
import pytest

from tests.server.api.seeing_engine import CHAT, MESSAGES, RESPONSES, body_of, data_url, part_of, png
from tests.vllm import vision
from tests.vllm.conftest import run_fleet
from tests.vllm.engines import MODEL
from tests.vllm.fleet import BLOCK_SIZE, LONG_S, VllmFleet, found, promised
from tests.vllm.replay import batches
from tests.vllm.test_cache import STORY
from tests.waiting import wait_until

HOST: Final = "localhost"
WORDS: Final = ("cat", "dog", "moon", "sea", "What is this?", "A long story, told by nobody.", "2,048", "Rome")


@pytest.fixture(scope="module")
def images() -> Iterator[ThreadingHTTPServer]:
    """A server with one image. Its `requests` are the user agents that have asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.requests.append(self.headers["user-agent"])  # type: ignore[attr-defined]
            image = png(9)
            self.send_response(200 if self.path == "/a.png" else 404)
            self.send_header("content-length", str(len(image)))
            self.end_headers()
            self.wfile.write(image)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, images: ThreadingHTTPServer
) -> Iterator[VllmFleet]:
    folder = tmp_path_factory.mktemp("vision")
    options = vision.options(vision.write_model(folder / "model"))
    args = ("--image-hosts", f"{HOST}:{images.server_port}")
    yield from run_fleet(VllmFleet(folder, 1, options, args), request)


def ask(fleet: VllmFleet, path: str, body: dict[str, Any], tenant: str = "red") -> httpx.Response:
    url = fleet.gateway.url
    return httpx.post(url + path, json=body | {"model": MODEL}, headers=fleet.headers(tenant), timeout=LONG_S)


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": 2}
    return body_of(CHAT, *parts, **options) | fields


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def counts(fleet: VllmFleet, body: dict[str, Any], tenant: str = "red") -> tuple[int, int]:
    """Return the tokens of a chat that were promised, and those that were found, after all events so far."""
    [adapter] = fleet.adapters
    replay = adapter.engine.options.replay
    wait_until(lambda: not batches(replay, adapter.counted("batch")), what="the adapter has all events")
    answer = ask(fleet, CHAT, body, tenant)
    assert answer.status_code == 200, answer.text
    return promised(answer), found(answer)


def test_images_are_cached_with_their_prompts(fleet: VllmFleet) -> None:
    """The second turn finds the first, another image what is before it, and another tenant nothing."""
    begin, end = f"{secrets.token_hex(8)} {STORY}", f" {STORY} What is it?"
    parts = [text(begin), part_of(CHAT, data_url(png(1, (60, 40)))), text(end)]
    other = [text(begin), part_of(CHAT, data_url(png(2, (60, 40)))), text(end)]
    first = counts(fleet, chat(*parts))
    second = chat(*parts)
    second["messages"] += [{"role": "assistant", "content": "A cat."}, {"role": "user", "content": "And then?"}]
    again = counts(fleet, second)
    with_other = counts(fleet, chat(*other))
    of_other = counts(fleet, second, "blue")
    print(f"promised and found: {first} {again} {with_other} {of_other}")
    assert first == of_other == (0, 0)
    assert again[0] == again[1] > with_other[1] + vision.NUM_TOKENS - BLOCK_SIZE
    assert with_other[0] == with_other[1] > 0


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_other_apis_find_what_is_promised(fleet: VllmFleet, path: str) -> None:
    kind = "input_text" if path == RESPONSES else "text"
    begin = {"type": kind, "text": f"{secrets.token_hex(8)} {STORY}"}
    length = {"max_output_tokens": 2} if path == RESPONSES else {"max_tokens": 2}
    cached = []
    for colour, tenant in ((1, "red"), (1, "red"), (2, "red"), (1, "blue")):
        body = body_of(path, begin, part_of(path, data_url(png(colour, (60, 40)))), {"type": kind, "text": STORY})
        answer = ask(fleet, path, body | length | {"temperature": 0}, tenant)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        engine = usage.get("cache_read_input_tokens") or usage.get("input_tokens_details", {}).get("cached_tokens") or 0
        cached.append((int(answer.headers["x-headstart-cached-tokens"]), engine))
    print(f"{path}: promised and found: {cached}")
    assert all(ours == theirs for ours, theirs in cached)
    assert cached[0] == cached[3] == (0, 0)
    assert cached[1][0] > cached[2][0] > 0


def random_chats(rng: random.Random, num_prompts: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield prompts, of which many begin as one before, up to any part of it."""
    before: list[list[dict[str, Any]]] = [[]]
    for _ in range(num_prompts):
        parts = list(rng.choice(before))
        parts = parts[: rng.randint(0, len(parts))]
        for _ in range(rng.randint(1, 6)):
            if rng.random() < 0.3 and sum(part["type"] == "image_url" for part in parts) < 6:
                parts.append(part_of(CHAT, data_url(png(rng.randrange(3), (30, rng.choice((20, 30)))))))
            else:
                parts.append(text(" ".join(rng.choices(WORDS, k=rng.randint(1, 12)))))
        before = [*before[-20:], parts]
        yield chat(*parts), rng.choice(("red", "red", "blue"))


@pytest.mark.parametrize("num_prompts", [200, pytest.param(500, marks=pytest.mark.deep, id="five_hundred")])
def test_promises_are_kept_for_random_prompts(fleet: VllmFleet, num_prompts: int) -> None:
    """The pool is small, so blocks are evicted all the time."""
    rng = random.Random(secrets.randbits(32))
    pairs = [counts(fleet, body, tenant) for body, tenant in random_chats(rng, num_prompts)]
    num_equal = sum(ours == theirs for ours, theirs in pairs)
    num_found = sum(theirs > 0 for _, theirs in pairs)
    print(f"{num_equal} of {len(pairs)} promises equal, {num_found} found something; {pairs}")
    assert all(ours <= theirs for ours, theirs in pairs)
    assert num_equal >= 0.95 * len(pairs)
    assert num_found > 50


def test_engines_fetch_images_of_allowed_hosts(fleet: VllmFleet, images: ThreadingHTTPServer) -> None:
    """The gateway never does. What the engine cannot fetch is named."""
    seen: list[str] = images.requests  # type: ignore[attr-defined]
    url = f"http://{HOST}:{images.server_port}"
    body = chat(text(f"{secrets.token_hex(8)} {STORY}"), part_of(CHAT, f"{url}/a.png"), text(STORY))
    assert counts(fleet, body) == (0, 0)
    ours, theirs = counts(fleet, body)
    assert ours == theirs > 0
    assert len(seen) == 4, "each for its prompt and for its answer"
    for wrong in (f"{url}/elsewhere", f"http://127.0.0.1:{images.server_port}/a.png"):
        answer = ask(fleet, CHAT, chat(text("Hi"), part_of(CHAT, wrong)))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[1].image_url")
