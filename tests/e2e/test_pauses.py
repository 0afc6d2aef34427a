"""A conversation that pauses keeps its blocks at a real worker, while other prompts fill its small pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.e2e.serving import Serve
from tests.e2e.test_breadth import bounded_tool
from tests.waiting import HANG_S

pytestmark = pytest.mark.e2e
CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
TOOL: Final = bounded_tool()
HINTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "nothing": (CHAT, {}),
    "a retention": (CHAT, {"prompt_cache_retention": "24h"}),
    "a ttl": (MESSAGES, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}),
    "a call": (CHAT, {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200}),
}


@pytest.fixture(scope="module")
def serve(tiny_model: Path) -> Iterator[Serve]:
    options = ["--num-workers", "1", "--model", str(tiny_model), "--worker-args", "--num-blocks 160"]
    with Serve(*options) as running:
        yield running


def num_cached(serve: Serve, path: str, text: str, **fields: Any) -> int:
    body = {"model": serve.model(), "messages": [{"role": "user", "content": text}], "max_tokens": 1, **fields}
    answer = httpx.post(f"{serve.url}{path}", json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-headstart-cached-tokens"])


@pytest.mark.parametrize("name", HINTS)
def test_a_paused_chain_outlives_other_prompts(serve: Serve, name: str) -> None:
    path, fields = HINTS[name]
    text = f"{name}: a prompt of several blocks. " * 20
    num_cached(serve, path, text, **fields)
    for number in range(20):
        num_cached(serve, CHAT, f"{number} unrelated to {name}, which others send. " * 30)
    found = num_cached(serve, path, text, **fields)
    assert found > 100 if fields else found < 40, found
