"""Breadth against real processes: streamed against unstreamed text, and bounds of hard grammars and many schemas."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from tests.e2e.serving import SMALL_POOL, Serve
from tests.server.api.test_tools import WEATHER
from tests.server.sse_grammar import check_chat, check_completion, events
from tests.server.test_second_decoding import check_answer
from tests.waiting import HANG_S

pytestmark = pytest.mark.e2e
MODEL = "tiny"

TEXTS = [
    "Say 🎉🎊 and 👩‍👩‍👧 once more",
    "请用中文写一首关于春天的诗",
    "日本語で🍣について書いてください",
    "한국어 문장 하나",
    "e\u0301 and ﷽ and \u202eback\u202c",
    "Plain words, then a\nnew line\tand a tab.",
]


@pytest.fixture(scope="module")
def serve(tiny_model: Path) -> Iterator[Serve]:
    # Some bodies bring no max_tokens, and a random model all but never ends by itself: a short length bounds them.
    worker_args = f"--served-model-name {MODEL} --max-model-len 768 {SMALL_POOL}"
    with Serve(
        "--model", str(tiny_model), "--num-workers", "1", "--threads", "1", "--worker-args", worker_args
    ) as running:
        yield running


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def ok(serve: Serve, path: str, body: dict[str, Any]) -> Any:
    answer = serve.post(path, body)
    assert answer.status_code == 200, (body, answer.text)
    return answer


def cold(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with a salt of its own, so that nothing of it is cached.

    A sample from a random model's flat logits depends on their last bits, and those on the prefill's chunks.
    """
    return body | {"cache_salt": secrets.token_hex(8)}


def chat_texts(serve: Serve, body: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return content and tool calls of every choice; assert that the stream has the same."""
    choices = ok(serve, "/v1/chat/completions", cold(body)).json()["choices"]
    whole = [
        (
            choice["message"]["content"] or "",
            [
                (call["function"]["name"], call["function"]["arguments"])
                for call in choice["message"].get("tool_calls") or []
            ],
            choice["finish_reason"],
        )
        for choice in sorted(choices, key=lambda choice: int(choice["index"]))
    ]
    raw = ok(serve, "/v1/chat/completions", cold(body) | {"stream": True}).content
    contents = check_chat(raw, num_choices=len(choices))
    calls: list[dict[int, list[str]]] = [{} for _ in choices]
    finishes = [""] * len(choices)
    for chunk in events(raw)[:-1]:
        [choice] = chunk["choices"]
        for part in choice["delta"].get("tool_calls") or []:
            call = calls[choice["index"]].setdefault(part["index"], ["", ""])
            call[0] += part["function"].get("name") or ""
            call[1] += part["function"].get("arguments") or ""
        finishes[choice["index"]] = choice["finish_reason"] or finishes[choice["index"]]
    streamed = [
        (content, [(name, arguments) for _, (name, arguments) in sorted(parts.items())], finish)
        for content, parts, finish in zip(contents, calls, finishes, strict=True)
    ]
    assert streamed == whole, body
    return [(content, calls) for content, calls, _ in whole]


def completion_texts(serve: Serve, body: dict[str, Any]) -> list[str]:
    """Return the text of every choice; assert that the stream has the same."""
    choices = ok(serve, "/v1/completions", cold(body)).json()["choices"]
    whole = [str(choice["text"]) for choice in sorted(choices, key=lambda choice: int(choice["index"]))]
    raw = ok(serve, "/v1/completions", cold(body) | {"stream": True}).content
    assert check_completion(raw, num_choices=len(whole)) == whole, body
    return whole


def compare_stop(serve: Serve, rng: random.Random, body: dict[str, Any]) -> None:
    """A stop string out of the middle of an answer, wherever its tokens begin and end."""
    body = body | {"prompt": body["messages"][0]["content"]}
    del body["messages"]
    [text] = completion_texts(serve, body)
    begin = rng.randrange(len(text) // 2)
    stop = text[begin : begin + rng.randint(2, 12)]
    if "\ufffd" in stop:
        stop = text[begin]
    assert completion_texts(serve, body | {"stop": [stop, "never\u2603"]}) == [text[: text.index(stop)]], body


def compare_streams(serve: Serve, *, num_prompts: int, seed: int) -> None:
    rng = random.Random(seed)
    for turn in range(num_prompts):
        text = " ".join(rng.choices(TEXTS, k=rng.randint(1, 3)))
        body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 40}
        body |= {"seed": rng.randrange(2**31), "temperature": 1.0}
        match turn % 5:
            case 0:
                assert len(chat_texts(serve, body)) == 1
            case 1:
                assert len({content for content, _ in chat_texts(serve, body | {"n": 3})}) == 3
            case 2:
                compare_stop(serve, rng, body)
            case 3:
                schema = rng.choice(SCHEMAS)
                chat_texts(serve, body | {"response_format": schema_format(schema), "n": 2})
            case _:
                tools = {"tools": [bounded_tool()], "tool_choice": "required", "max_tokens": 200}
                [(_, calls)] = chat_texts(serve, body | tools)
                assert calls, "a call is required"


def bounded_tool() -> dict[str, Any]:
    """The weather tool with arguments that even a random model gets done with."""
    city = {"type": "string", "enum": ["Köln", "東京", "🏙️"]}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    return {**WEATHER, "function": {**WEATHER["function"], "parameters": parameters}}


def test_streams_say_the_same(serve: Serve) -> None:
    compare_streams(serve, num_prompts=5, seed=5)


@pytest.mark.deep
def test_many_streams_say_the_same(serve: Serve) -> None:
    compare_streams(serve, num_prompts=200, seed=6)


def record(**properties: Any) -> dict[str, Any]:
    """A closed object: an open one may go on for as long as a random model likes."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: list[dict[str, Any]] = [
    record(value={"enum": ["red", "grün", "青", "🎉", 7, None]}),
    record(values={"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3}),
    {**record(first={"$ref": "#/$defs/leaf"}), "$defs": {"leaf": {"type": "integer", "minimum": -20, "maximum": 317}}},
]


TREE = {"$ref": "#/$defs/node", "$defs": {"node": record(leaf={"type": "boolean"})}}
TREE["$defs"]["node"]["properties"]["children"] = {  # type: ignore[index]
    "type": "array",
    "items": {"$ref": "#/$defs/node"},
    "maxItems": 2,
}
ENDLESS = {"$ref": "#/$defs/node", "$defs": {"node": record(next={"$ref": "#/$defs/node"})}}
HARD: dict[str, dict[str, Any]] = {
    "recursive": {"response_format": schema_format(TREE)},
    "endless": {"response_format": schema_format(ENDLESS)},
    "nested repeats": {"structured_outputs": {"regex": "(((a+)+)+)+b"}},
    "many states": {"structured_outputs": {"regex": "(a|b)*a(a|b){5000}"}},
    "pattern": {"response_format": schema_format(record(text={"type": "string", "pattern": "^((a|aa)+)+c$"}))},
    "long repeat": {"structured_outputs": {"regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"}},
}


@pytest.mark.parametrize("name", HARD)
def test_hard_grammars_take_bounded_time(serve: Serve, name: str) -> None:
    epochs = serve.epochs()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Go."}], "max_tokens": 100, "seed": 1}
    answer = serve.post("/v1/chat/completions", body | HARD[name])
    check_answer(answer.status_code, answer.content, json.dumps(HARD[name]).encode())
    assert answer.status_code in (200, 400)
    if name == "recursive":
        [choice] = answer.json()["choices"]
        if choice["finish_reason"] == "stop":
            Draft202012Validator(TREE).validate(json.loads(choice["message"]["content"]))
    assert serve.epochs() == epochs, "no worker died of a grammar"


def send_schemas(serve: Serve, numbers: range) -> int:
    """As many different schemas; by how many bytes the worker has grown."""
    worker = serve.child("worker")
    before = worker.memory_info().rss
    with httpx.Client(base_url=serve.url, timeout=HANG_S) as client, ThreadPoolExecutor(8) as threads:

        def ask(number: int) -> None:
            schema = record(**{f"field_{number}": {"type": "string", "pattern": f"^[a-z]{{1,{number % 50 + 1}}}$"}})
            body = {"model": MODEL, "messages": [{"role": "user", "content": "Go."}], "max_tokens": 2}
            answer = client.post("/v1/chat/completions", json=body | {"response_format": schema_format(schema)})
            assert answer.status_code == 200, answer.text

        list(threads.map(ask, numbers))
    return worker.memory_info().rss - before


@pytest.mark.deep
def test_many_schemas_take_bounded_memory(serve: Serve) -> None:
    epochs = serve.epochs()
    grown = send_schemas(serve, range(2000)), send_schemas(serve, range(2000, 3000))
    assert grown[0] < 256 << 20
    assert grown[1] < 128 << 20, "what is kept is bounded: the last thousand takes the place of the first"
    assert serve.epochs() == epochs
