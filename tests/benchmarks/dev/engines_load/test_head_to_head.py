"""The head to head gives every router the same text, and sizes the engines' pools by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.dev.engines_load.head_to_head import Result, as_text, figures, num_blocks
from benchmarks.dev.engines_load.routers import routers
from benchmarks.replay_load.client import Outcome
from benchmarks.replay_load.workload import Conversation, Turn
from tests import smollm2

CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "find", "arguments": "{}"}}]}
FOUND = {"role": "tool", "tool_call_id": "1", "name": "find", "content": "nothing"}


def _conversation(*messages: dict[str, Any]) -> Conversation:
    return Conversation("c", [Turn(messages, None)])


def test_calls_and_their_results_become_text() -> None:
    (turn,) = as_text(_conversation({"role": "user", "content": "Find it"}, CALL, FOUND)).turns
    assert [message["role"] for message in turn.messages] == ["user", "assistant", "user"]
    assert '"find"' in turn.messages[1]["content"]
    assert turn.messages[2]["content"] == "nothing"


def test_shared_blocks_count_once() -> None:
    tokenizer = smollm2.tokenizer()
    system = {"role": "system", "content": "word " * 320}
    one, other = ({"role": "user", "content": f"{name} " * 64} for name in ("red", "blue"))
    alone = num_blocks([_conversation(system, one)], tokenizer)
    assert alone >= 12
    assert alone < num_blocks([_conversation(system, one), _conversation(system, other)], tokenizer) < 2 * alone


def test_figures_are_medians_of_the_rounds() -> None:
    outcomes = [[Outcome("c", 1, 0.0, ttft_s=ttft_s)] for ttft_s in (0.3, 0.1, 0.2)]
    found = figures({"headstart": [Result(each, 1.0, 10.0 * i) for i, each in enumerate(outcomes)]})
    values = {figure.name: figure.value for figure in found}
    assert values == {"headstart.ttft_mean_s": 0.2, "headstart.ttft_p99_s": 0.2, "headstart.cached_tokens": 10.0}


def test_each_router_has_a_name_of_its_own() -> None:
    names = [router.name for router in routers(Path())]
    assert names[0] == "headstart"
    assert len(set(names)) == len(names) == 5
