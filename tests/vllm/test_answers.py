"""Clients get the answers of a real vLLM through the gateway, with the texts of a Headstart worker."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
from jsonschema import Draft202012Validator

from tests.e2e.serving import READY, SMALL_POOL, Serve
from tests.server.api.test_tools import WEATHER
from tests.server.sse_grammar import check_chat, check_completion, events
from tests.vllm.engines import MODEL
from tests.vllm.fleet import LONG_S, VllmFleet

CAPITAL: Final = [{"role": "user", "content": "What is the capital of France?"}]
PERSON: Final = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "is_tall": {"type": "boolean"}},
    "required": ["name", "is_tall"],
    "additionalProperties": False,
}
PROMPTS: Final = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
)
TIE: Final = 1e-3
"""Two log probabilities this close may be ordered either way by the rounding of another summation order."""


def texts(fleet: VllmFleet, body: dict[str, Any]) -> list[str]:
    """Return the text of every choice; assert that the stream has the same, and the finish reasons."""
    whole = fleet.complete(body).json()
    choices = sorted(whole["choices"], key=lambda choice: int(choice["index"]))
    is_chat = "messages" in body
    found = [str(choice["message"]["content"] if is_chat else choice["text"]) for choice in choices]
    raw = fleet.complete(body | {"stream": True, "stream_options": {"include_usage": True}}).content
    check = check_chat if is_chat else check_completion
    assert check(raw, num_choices=len(choices), include_usage=True, by_engine=True) == found
    reasons: dict[int, str] = {}
    usage: dict[str, Any] = {}
    for event in events(raw)[:-1]:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    assert reasons == {choice["index"]: choice["finish_reason"] for choice in choices}
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    return found


def test_chat(fleet: VllmFleet) -> None:
    [text] = texts(fleet, {"messages": CAPITAL, "max_tokens": 10})
    assert "Paris" in text


def test_completion(fleet: VllmFleet) -> None:
    [text] = texts(fleet, {"prompt": PROMPTS[0]})
    assert "Paris" in text


def test_stop_strings(fleet: VllmFleet) -> None:
    """A stop string is cut off, wherever its tokens begin and end."""
    body = {"prompt": PROMPTS[1], "max_tokens": 12}
    [text] = texts(fleet, body)
    stop = text[5:9]
    assert texts(fleet, body | {"stop": [stop, "never"]}) == [text[: text.index(stop)]]
    assert fleet.complete(body | {"stop": stop}).json()["choices"][0]["finish_reason"] == "stop"


def test_seeds(fleet: VllmFleet) -> None:
    body = {"prompt": PROMPTS[3], "temperature": 1.5, "max_tokens": 8}
    one, other = texts(fleet, body | {"seed": 1}), texts(fleet, body | {"seed": 2})
    assert texts(fleet, body | {"seed": 1}) == one != other


def test_several_choices(fleet: VllmFleet) -> None:
    found = texts(fleet, {"prompt": PROMPTS[3], "n": 3, "temperature": 1.5, "seed": 7, "max_tokens": 8})
    assert len(set(found)) == 3


def test_logprobs(fleet: VllmFleet) -> None:
    """Each token's own log probability, and the best ones in order; the greedy token is the best."""
    body = {"messages": CAPITAL, "logprobs": True, "top_logprobs": 3, "max_tokens": 4}
    for position in fleet.complete(body).json()["choices"][0]["logprobs"]["content"]:
        best = [entry["logprob"] for entry in position["top_logprobs"]]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert math.isclose(position["logprob"], best[0], abs_tol=TIE)
        assert position["token"] == position["top_logprobs"][0]["token"]
        assert sum(map(math.exp, best)) <= 1.0 + TIE


def test_prompt_logprobs(fleet: VllmFleet) -> None:
    answer = fleet.complete({"prompt": PROMPTS[0], "echo": True, "logprobs": 1, "max_tokens": 1})
    logprobs = answer.json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert all(logprob < 0.0 for logprob in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]).startswith(PROMPTS[0])


def test_json_schema(fleet: VllmFleet) -> None:
    form = {"name": "person", "strict": True, "schema": PERSON}
    body = {"messages": CAPITAL, "response_format": {"type": "json_schema", "json_schema": form}, "max_tokens": 40}
    [text] = texts(fleet, body)
    Draft202012Validator(PERSON).validate(json.loads(text))


def test_tools(fleet: VllmFleet) -> None:
    body = {"messages": CAPITAL, "tools": [WEATHER], "max_tokens": 60, "temperature": 0}
    body |= {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    alone = fleet.engines[0].request("/v1/chat/completions", {"model": MODEL, "cache_salt": "alone"} | body)
    choice = fleet.complete(body).json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == alone["choices"][0]["message"]["tool_calls"][0]["function"]
    streamed = ""
    for event in events(fleet.complete(body | {"stream": True}).content)[:-1]:
        for part in event["choices"][0]["delta"].get("tool_calls") or []:
            streamed += part["function"].get("arguments") or ""
    assert streamed == call["function"]["arguments"]


@pytest.mark.parametrize(
    "fields",
    [{"typical_p": 0.5}, {"guided_grammar": 'start: "a"'}],
    ids=lambda fields: next(iter(fields)),
)
def test_what_no_engine_can_do_is_refused(fleet: VllmFleet, fields: dict[str, Any]) -> None:
    answer = fleet.post("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 2} | fields)
    assert answer.status_code == 400, answer.text


@pytest.fixture(scope="module")
def own() -> Iterator[Serve]:
    serve = Serve("--num-workers", "1", "--threads", "1", "--worker-args", SMALL_POOL)
    try:
        serve.wait_for_line(READY, LONG_S)
        yield serve
    finally:
        serve.stop()


def test_same_text_as_our_own_worker(fleet: VllmFleet, own: Serve) -> None:
    """Greedy ids in float32 are equal up to a tie: there both have the two tokens within its rounding."""
    model = own.model()
    served = set()
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 2, "return_token_ids": True}
        want = own.post("/v1/completions", body | {"model": model}).json()["choices"][0]
        # At the same time and with different salts: some go to either engine, also when one is slower.
        with ThreadPoolExecutor(6) as pool:
            salted = [body | {"cache_salt": f"{prompt} {number}"} for number in range(6)]
            answers = list(pool.map(fleet.complete, salted))
        for answer in answers:
            served.add(answer.headers["x-headstart-worker"])
            assert_same(answer.json()["choices"][0], want)
    assert len(served) == len(fleet.adapters), "both engines have answered"


def assert_same(found: dict[str, Any], want: dict[str, Any]) -> None:
    pairs = zip(found["token_ids"], want["token_ids"], strict=True)
    first = next((position for position, (one, other) in enumerate(pairs) if one != other), None)
    if first is None:
        assert found["text"] == want["text"]
        return
    for choice in (found, want):
        best, second = sorted(choice["logprobs"]["top_logprobs"][first].values(), reverse=True)[:2]
        assert best - second < TIE, (found["text"], want["text"], first)
