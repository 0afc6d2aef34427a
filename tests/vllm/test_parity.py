"""Bodies from the engine's own schema: behind adapter and gateway they have the answers of the engine by itself."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx
import pytest

from tests.vllm import horizon
from tests.vllm.bodies import FUNCTION, Bodies
from tests.vllm.comparable import comparable, error_of
from tests.vllm.engines import MODEL
from tests.vllm.fleet import LONG_S, VllmFleet

pytestmark = pytest.mark.vllm
SEED: Final = 1
PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
NUM_BODIES: Final = 15
"""The number for each path."""
NUM_CHATS: Final = 25
REFUSED: Final = ("kv_transfer_params", "ec_transfer_params", "previous_response_id", "background", "use_beam_search")
"""Fields that the table of docs/architecture/engine_text.md lists as refused."""
CITIES: Final = ("Rome", "São Paulo", "東京", "Oslo", "a\nb", "🙂", "<x>", '"quoted"')
THOUGHTS: Final = ("", "I look it up.", "Zuerst prüfe ich es.\nDann …", "a < b", "考える")


def is_refused(path: str, body: Mapping[str, Any]) -> bool:
    """Return whether the gateway refuses a body that an engine may take."""
    if path == "/v1/messages" and body.get("thinking") == {"type": "disabled"}:
        return True  # by the engine's own /render, whose parser refuses this effort
    prompts = body.get("prompt")
    has_several = isinstance(prompts, list) and len(prompts) > 1 and not isinstance(prompts[0], int)
    return has_several or any(body.get(name) for name in REFUSED)


class Pair:
    """An engine by itself, and the same engine behind adapter and gateway. Both begin with an empty cache."""

    def __init__(self, fleet: VllmFleet) -> None:
        self._fleet = fleet
        self._client = httpx.Client(timeout=LONG_S)
        self.parts: list[str] = []
        """The fields of the latest whole answer to a chat."""

    def _ask(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        for engine in self._fleet.engines:
            engine.request("/reset_prefix_cache", {})
        return self._client.post(url, json={"model": MODEL} | body, headers=headers)

    def difference(self, path: str, body: Mapping[str, Any]) -> str:
        """Return what differs, or an empty text."""
        by_itself = self._ask(self._fleet.engines[0].url + path, body, {})
        behind = self._ask(self._fleet.text_gateway.url + path, body, self._fleet.headers("red"))
        if is_refused(path, body):
            return "" if behind.status_code == 400 else f"{path} {body}\nis not refused: {behind.text}"
        if by_itself.status_code == 200:
            want, got = comparable(by_itself), comparable(behind)
            if "messages" in body and "choices" in want[1]:
                self.parts = [name for name, part in want[1]["choices"][0]["message"].items() if part]
        else:
            want, got = error_of(by_itself), error_of(behind)
            if path == "/v1/messages":  # its errors have no field for the parameter
                want, got = want[:2], got[:2]
        return "" if want == got else f"{path} {json.dumps(body, ensure_ascii=False)}\n{want}\n{got}"


@pytest.fixture(scope="module")
def pair(horizon_fleet: VllmFleet) -> Pair:
    return Pair(horizon_fleet)


@pytest.mark.parametrize("path", PATHS)
def test_bodies_of_the_schema(horizon_fleet: VllmFleet, pair: Pair, path: str) -> None:
    """Streamed or not, every field is equal but ids and times; errors have the engine's status, text and field."""
    openapi = horizon_fleet.engines[0].request("/openapi.json")
    bodies = [
        each | {"stream": stream} for each in Bodies(openapi, SEED).of(path, NUM_BODIES) for stream in (False, True)
    ]
    differences = [found for body in bodies if (found := pair.difference(path, body))]
    print(*differences, sep="\n")
    print(f"{path}: {len(bodies)} answers, {sum(is_refused(path, body) for body in bodies)} refused on purpose")
    assert not differences


def chats() -> Iterator[dict[str, Any]]:
    """Yield chats whose answers have reasoning, calls, both or several calls."""
    chance = random.Random(SEED)
    for number in range(NUM_CHATS):
        cities = chance.sample(CITIES, chance.choice((1, 1, 2)))
        thought = chance.choice(THOUGHTS)
        answer = horizon.THINK.format(thought) if thought else ""
        if chance.random() < 0.3:
            answer += f"The weather in {cities[0]} is fine."
        if chance.random() < 0.7:
            answer += horizon.calls([("get_weather", {"city": city}) for city in cities])
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"{number}: weather in {cities[0]}?"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "structured_outputs": {"choice": [answer or "Yes."]},
            "temperature": 0,
            "max_tokens": chance.choice((200, 200, 200, 20)),
        }
        if chance.random() < 0.2:
            body |= {"n": 2, "temperature": 1.0, "seed": number}
        if chance.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 2}
        if chance.random() < 0.2:
            body |= {"include_reasoning": False}
        if chance.random() < 0.2:
            body |= {"return_token_ids": True}
        if chance.random() < 0.1:
            body |= {"parallel_tool_calls": False}
        yield body


def test_calls_and_reasoning(pair: Pair) -> None:
    kinds: Counter[str] = Counter()
    differences = []
    for chat in chats():
        options = {"stream": True, "stream_options": {"include_usage": True}}
        differences += [pair.difference(PATHS[0], chat | {"stream": False}), pair.difference(PATHS[0], chat | options)]
        kinds.update(pair.parts)
    differences = [each for each in differences if each]
    print(*differences, sep="\n")
    print(f"answers with {dict(kinds)}")
    assert not differences
    assert min(kinds[name] for name in ("reasoning", "content", "tool_calls")) >= NUM_CHATS // 10
