"""Answers that engines write: equal to those of the engine by itself, and resumed."""

from __future__ import annotations

import secrets
from typing import Any, Final

import httpx
import pytest

from tests.vllm.engines import MODEL
from tests.vllm.fleet import LONG_S, VllmFleet
from tests.vllm.test_engine_lost import tokens
from tests.vllm.test_parity import Pair

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


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_the_engine(fleet: VllmFleet, stream: bool) -> None:
    """Every field but ids and times is equal, in every event; errors have the engine's words."""
    with httpx.Client(timeout=LONG_S) as client:
        pair = Pair(fleet, client)
        differences = []
        for path, fields in (*((CHAT, chat) for chat in CHATS), *OTHERS):
            body = {"temperature": 0, "stream": stream, "max_tokens": 12} | fields
            if not stream:
                body.pop("stream_options", None)
            differences.append(pair.difference(path, body))
    differences = [each for each in differences if each]
    print(*differences, sep="\n")
    assert not differences


def test_plain_streams_survive_their_worker(fleet: VllmFleet) -> None:
    """A chat goes on at the other engine, with each token once, one id, and the usage of the whole."""
    body: dict[str, Any] = {"model": MODEL, "stream": True, "temperature": 0, "ignore_eos": True, "max_tokens": 40}
    body |= {"messages": user(f"{secrets.token_hex(4)} Tell me of the sea.")}
    body |= {"stream_options": {"include_usage": True}}

    def events_of(num_before_kill: int) -> list[dict[str, Any]]:
        collected, victim = [], None
        url, headers = fleet.gateway.url + CHAT, fleet.headers("red")
        with httpx.stream("POST", url, json=body, headers=headers, timeout=LONG_S) as response:
            for event in tokens(response):
                collected.append(event)
                if len(collected) == num_before_kill:
                    victim = fleet.adapter_of(response)
                    victim.kill()
        if victim is not None:
            victim.start()
            fleet.wait_ready()
        return collected

    undisturbed, lost = events_of(0), events_of(4)
    assert texts(lost) == texts(undisturbed)
    assert len({event["id"] for event in lost}) == 1
    counts = [{k: v for k, v in each[-1]["usage"].items() if k.endswith("_tokens")} for each in (lost, undisturbed)]
    assert counts[0] == counts[1]


def texts(found_events: list[dict[str, Any]]) -> str:
    return "".join(c["delta"].get("content") or "" for event in found_events for c in event.get("choices", ()))
