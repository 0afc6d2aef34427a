"""Answers that engines write: equal to those of the engine by itself, cached, aborted and resumed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from tests.server.sse_grammar import events
from tests.vllm.comparable import same
from tests.vllm.engines import MODEL
from tests.vllm.fleet import LONG_S, Adapter, VllmFleet, found, promised, running
from tests.vllm.test_cache import STORY
from tests.waiting import wait_until

ABORT_S: Final = 1.0
IDS: Final = frozenset({"id", "created", "created_at", "item_id", "completed_at", "signature"})
CACHE: Final = frozenset(
    {
        *("cached_tokens", "created_cache_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
        *("cache_write_tokens", "cached_tokens_per_turn", "input_tokens_per_turn", "input_tokens"),
    }
)
"""Fields that depend on what an engine has computed before."""
CHAT: Final = "/v1/chat/completions"
PARAMETERS: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Final = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NAMED: Final = {"type": "function", "function": {"name": "get_weather"}}
CALLED: Final = {"name": "get_weather", "arguments": '{"city": "Rome"}'}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


CHATS: Final[tuple[dict[str, Any], ...]] = (
    {"messages": user("What is the capital of France?")},
    {"messages": [{"role": "system", "content": "Be brief."}, *user("Größe, 日本語, 🙂 and a\ttab?")]},
    {"messages": [*user("Hi"), {"role": "assistant", "content": "Hello!"}, *user("Who are you?")]},
    {"messages": user("Weather in Rome?"), "tools": [TOOL]},
    {"messages": user("Weather in Rome?"), "tools": [TOOL], "tool_choice": "required", "max_tokens": 40},
    {
        "messages": user("Rome?"),
        "tools": [TOOL],
        "tool_choice": NAMED,
    },
    {
        "messages": [
            *user("Weather?"),
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": CALLED}]},
            {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        ],
        "tools": [TOOL],
    },
    {"messages": user("Count"), "n": 2, "seed": 7, "temperature": 1.0},
    {"messages": user("Count"), "logprobs": True, "top_logprobs": 2},
    {"messages": user("Count to ten"), "stop": ["5"], "max_tokens": 40},
    {"messages": user("Count"), "return_token_ids": True},
    {"messages": user("Count"), "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {
        "messages": [*user("Count"), {"role": "assistant", "content": "1, 2"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    {"messages": [*user("Count"), {"role": "assistant", "content": "1, 2"}], "echo": True},
    {"messages": user("JSON"), "response_format": {"type": "json_object"}, "max_tokens": 30},
    {"messages": user("Hi"), "seed": 5, "temperature": 1.0},
    {"messages": user("Hi"), "min_tokens": 5, "ignore_eos": True, "presence_penalty": 1.0},
    {"messages": user("Hi"), "truncate_prompt_tokens": 5},
    {"messages": user("Hi"), "temperature": -1},
    {"messages": user("word " * 3000)},
    {"messages": []},
    {"messages": "text"},
)
OTHERS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("/v1/completions", {"prompt": "Once upon a time"}),
    ("/v1/completions", {"prompt": "Once", "n": 2, "seed": 7, "temperature": 1.0}),
    ("/v1/completions", {"prompt": "Once", "logprobs": 2}),
    ("/v1/completions", {"prompt": "Once", "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": [1, 2, 3], "return_token_ids": True}),
    ("/v1/completions", {"prompt": ""}),
)


def ask(fleet: VllmFleet, path: str, body: dict[str, Any], timeout_s: float = LONG_S) -> httpx.Response:
    url, headers = fleet.gateway.url, fleet.headers("red")
    return httpx.post(url + path, json={"model": MODEL} | body, headers=headers, timeout=timeout_s)


def scrubbed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: scrubbed(item) for name, item in value.items() if name not in IDS | CACHE}
    return [scrubbed(item) for item in value] if isinstance(value, list) else value


def joined(found_events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join deltas that follow each other. vLLM makes one of several tokens when its client reads slowly."""
    result: list[dict[str, Any]] = []
    for event in sorted(found_events, key=index_of):
        event.pop("sequence_number", None)
        before = result[-1] if result else {}
        if not joins(before, event):
            result.append(event)
            continue
        if "choices" in event:
            ours, theirs = before["choices"][0], event["choices"][0]
            for name in ("text", "token_ids", "finish_reason", "stop_reason"):
                if name in theirs and theirs[name] is not None:
                    is_part = name in ("text", "token_ids") and ours.get(name) is not None
                    ours[name] = ours[name] + theirs[name] if is_part else theirs[name]
            for name, part in theirs.get("delta", {}).items():
                ours["delta"][name] += part
            if theirs.get("logprobs"):
                for name, parts in theirs["logprobs"].items():
                    ours["logprobs"][name] = parts and ours["logprobs"][name] + parts
            before |= {name: value for name, value in event.items() if name != "choices"}
        elif isinstance(event["delta"], str):
            before["delta"] += event["delta"]
        else:
            before["delta"]["text"] += event["delta"]["text"]
    return result


def index_of(event: dict[str, Any]) -> int:
    """Return the place of an event's choice. The usage comes last, and events of other APIs keep their order."""
    choices = event.get("choices", [{"index": 0}])
    return int(choices[0]["index"]) if choices else len(CHATS)


def joins(before: dict[str, Any], event: dict[str, Any]) -> bool:
    """Return whether an event adds plain text to the one before."""
    if "choices" not in event or "choices" not in before:
        same = before.get("type") == event.get("type")
        kinds = [each["delta"].get("type") for each in (before, event) if isinstance(each.get("delta"), dict)]
        return same and (isinstance(event.get("delta"), str) or kinds == ["text_delta", "text_delta"])
    if not before["choices"] or not event["choices"]:
        return False
    ours, theirs = before["choices"][0], event["choices"][0]
    if "text" in theirs:
        return bool(ours["index"] == theirs["index"])
    is_plain = set(ours["delta"]) == {"content"} >= set(theirs["delta"])
    return is_plain and bool(ours["index"] == theirs["index"])


def content(answer: httpx.Response) -> Any:
    """Return status and content, without what differs between two answers of one engine."""
    if answer.status_code != 200:
        error = answer.json().get("error", answer.json())
        return answer.status_code, error["message"]
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in answer.text.splitlines() if line and not line.startswith(":")]
        return joined([scrubbed(json.loads(line[6:])) for line in lines if line.startswith("data: {")])
    return scrubbed(answer.json())


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_the_engine(fleet: VllmFleet, stream: bool) -> None:
    """Every field but ids, times and the cache's is equal, in every event; errors have the engine's words."""
    engine = fleet.engines[0]
    differing = []
    for path, fields in (*((CHAT, chat) for chat in CHATS), *OTHERS):
        body = {"model": MODEL, "temperature": 0, "stream": stream, "max_tokens": 12} | fields
        if not stream:
            body.pop("stream_options", None)
        by_itself = httpx.post(engine.url + path, json=body, timeout=LONG_S)
        behind = ask(fleet, path, body)
        if not same(content(by_itself), content(behind)):
            differing.append((path, fields, content(by_itself), content(behind)))
    for each in differing:
        print(*each, sep="\n")
    assert not differing


def test_second_turns_are_cached(fleet: VllmFleet) -> None:
    """Every turn finds what the index has promised."""
    messages, counts = user(f"{secrets.token_hex(8)} {STORY} Who says that?"), []
    for _ in range(3):
        body = {"messages": messages, "max_tokens": 12, "temperature": 0, "stream": True}
        answer = ask(fleet, CHAT, body | {"stream_options": {"include_usage": True}})
        counts.append((promised(answer), found(answer)))
        deltas = [choice["delta"] for event in events(answer.content)[:-1] for choice in event["choices"]]
        text = "".join(delta.get("content") or "" for delta in deltas)
        messages = [*messages, {"role": "assistant", "content": text}, *user("And then?")]
        adapter = fleet.adapter_of(answer)
        wait_until(lambda adapter=adapter: adapter.published() > 0)  # type: ignore[misc]
    print(f"promised and found: {counts}")
    assert counts[0] == (0, 0)
    assert all(ours == theirs > 0 for ours, theirs in counts[1:])


def test_other_tenants_find_nothing(fleet: VllmFleet) -> None:
    body = {"messages": user(f"{secrets.token_hex(8)} {STORY}"), "max_tokens": 2}
    ask(fleet, CHAT, body)
    url = fleet.gateway.url + CHAT
    other = httpx.post(url, json={"model": MODEL} | body, headers=fleet.headers("blue"), timeout=LONG_S)
    assert found(other) == 0


def stream(fleet: VllmFleet, path: str, body: dict[str, Any]) -> Any:
    body = {"model": MODEL, "stream": True, "temperature": 0, "max_tokens": 400} | body
    if path == CHAT:  # Messages at vLLM have no such field, and end at max_tokens all the same with this model
        body["ignore_eos"] = True
    url, headers = fleet.gateway.url, fleet.headers("red")
    return httpx.stream("POST", url + path, json=body, headers=headers, timeout=LONG_S)


def data_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_a_client_that_leaves(fleet: VllmFleet, path: str) -> None:
    """The engine aborts an answer without a reader within a second."""
    with stream(fleet, path, {"messages": user(secrets.token_hex(8))}) as response:
        next(data_of(response))
        engine = fleet.adapter_of(response).engine
        assert running(engine) == 1
    fleet.stopwatch().wait_until(lambda: running(engine) == 0, ABORT_S, "aborted")


def lose(fleet: VllmFleet, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of an answer whose adapter is killed after some of them, and started again."""
    collected: list[dict[str, Any]] = []
    victim: Adapter | None = None
    try:
        with stream(fleet, path, body) as response:
            for event in data_of(response):
                collected.append(event)
                if len(collected) == 4:  # the shortest call has seven
                    victim = fleet.adapter_of(response)
                    victim.kill()
    finally:
        if victim is not None:
            victim.start()
            fleet.wait_ready()
    assert victim is not None, collected
    return collected


def texts(found_events: list[dict[str, Any]]) -> str:
    return "".join(c["delta"].get("content") or "" for event in found_events for c in event.get("choices", ()))


def test_plain_streams_survive_their_worker(fleet: VllmFleet) -> None:
    """A chat goes on at the other engine, with each token once, one id, and the usage of the whole."""
    body = {"messages": user(f"{secrets.token_hex(4)} Tell me of the sea."), "max_tokens": 40}
    body["stream_options"] = {"include_usage": True}
    with stream(fleet, CHAT, body) as response:
        undisturbed = list(data_of(response))
    lost = lose(fleet, CHAT, body)
    assert texts(lost) == texts(undisturbed)
    assert len({event["id"] for event in lost}) == 1
    counts = [{k: v for k, v in each[-1]["usage"].items() if k.endswith("_tokens")} for each in (lost, undisturbed)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"n": 2, "temperature": 1.0}),
        (CHAT, {"tools": [TOOL], "tool_choice": NAMED}),
        ("/v1/messages", {"stop_sequences": ["never said"]}),
    ],
)
def test_other_streams_end_with_an_error(fleet: VllmFleet, path: str, fields: dict[str, Any]) -> None:
    last = lose(fleet, path, {"messages": user(f"{secrets.token_hex(4)} Tell me of the sea.")} | fields)[-1]
    assert "error" in last, last
