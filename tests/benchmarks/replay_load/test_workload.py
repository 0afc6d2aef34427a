"""Workloads: recorded prompts, and text that keeps the prefixes of traces that have none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.replay_load.workload import Shape, WorkloadError, load
from tests.e2e.serving import trace_path

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
]


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


def test_every_assistant_message_is_a_request(tmp_path: Path) -> None:
    """The messages before it are the prompt."""
    (conversation,) = load(write(tmp_path / "chat.jsonl", {"messages": CHAT}), Shape())
    assert [turn.messages for turn in conversation.turns] == [CHAT[:2], CHAT[:4]]


def test_a_conversation_that_waits_for_an_answer_asks_for_it(tmp_path: Path) -> None:
    (conversation,) = load(write(tmp_path / "chat.json", CHAT[:4]), Shape())
    assert [len(turn.messages) for turn in conversation.turns] == [2, 4]


def test_a_folder_of_every_form(tmp_path: Path) -> None:
    write(tmp_path / "a.json", {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]})
    write(tmp_path / "b.json", [CHAT, {"messages": CHAT}])
    (tmp_path / "deep").mkdir()
    with gzip.open(tmp_path / "deep" / "c.jsonl.gz", "wt") as lines:
        lines.write(json.dumps({"messages": CHAT}) + "\n\n" + json.dumps(CHAT))
    (tmp_path / "notes.txt").write_text("not a conversation")
    conversations = load(tmp_path, Shape())
    assert [c.name for c in conversations] == ["a.json:1", "b.json:1", "b.json:2", "c.jsonl.gz:1", "c.jsonl.gz:3"]
    assert conversations[0].turns[0].tools
    assert len(load(tmp_path, Shape(limit=2))) == 2
    assert [len(c.turns) for c in load(tmp_path, Shape(max_turns=1))] == [1] * 5


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{", "not JSON"),
        ('"text"', "chat.json:1: a conversation is an object or a list of messages"),
        ('{"turns": []}', "neither `messages`, `hash_ids` nor `requests`"),
        ('{"messages": [{"content": "who?"}]}', "every message needs a `role`"),
        ('{"messages": [{"role": "system", "content": "alone"}], "x": 1}', ""),
        ('{"requests": [{"runs": [[0, 2]]}]}', "KeyError"),
    ],
)
def test_what_cannot_be_played_is_named(text: str, names: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(text)
    if not names:
        assert len(load(path, Shape())) == 1
        return
    with pytest.raises(WorkloadError) as raised:
        load(path, Shape())
    assert names in str(raised.value)


def test_nothing_to_play(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no such file"):
        load(tmp_path / "absent", Shape())
    with pytest.raises(WorkloadError, match="no file ends with"):
        load(tmp_path, Shape())
    with pytest.raises(WorkloadError, match="3 turn"):
        load(write(tmp_path / "chat.json", CHAT), Shape(min_turns=3))


def prompt(messages: object) -> str:
    assert isinstance(messages, list)
    (message,) = messages
    return str(message["content"])


def test_the_conversation_trace(tmp_path: Path) -> None:
    """Its prompts keep their lengths and shared prefixes."""
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1536, "output_length": 8, "hash_ids": [0, 1, 3]},
    ]
    one, two = load(write(tmp_path / "trace.jsonl", *lines), Shape())
    first, second = prompt(one.turns[0].messages).split(), prompt(two.turns[0].messages).split()
    assert (len(first), one.start_s, one.turns[0].max_tokens) == (1100, 0.0, 50)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1100]
    assert 1536 <= len(second) <= 1537
    (small, _) = load(tmp_path / "trace.jsonl", Shape(token_scale=0.1))
    assert len(prompt(small.turns[0].messages).split()) == pytest.approx(110, abs=3)


def test_agent_sessions_share_their_head_and_grow(tmp_path: Path) -> None:
    requests = [
        {"in": 256, "out": 9, "runs": [[1, 4]], "think_time": 5},
        {"type": "subagent", "requests": []},
        {"in": 384, "out": 9, "runs": [[1, 5], [9, 1]], "think_time": 100},
    ]
    session = {"block_size": 64, "tool_tokens": 128, "requests": requests}
    ours, theirs = load(write(tmp_path / "s.jsonl", {"id": "a", **session}, {"id": "b", **session}), Shape())
    first, second = (prompt(turn.messages).split() for turn in ours.turns)
    other = prompt(theirs.turns[0].messages).split()
    assert [turn.think_s for turn in ours.turns] == [0.0, 60.0]
    assert second[:256] == first
    assert other[:128] == first[:128]
    assert other[128:192] != first[128:192]


@pytest.mark.parametrize(
    "name", ["taubench_airline_text_dev", "mooncake_conversation_first40min", "cc_agent_sessions_devhalf"]
)
def test_the_recorded_workloads_load(name: str) -> None:
    conversations = load(trace_path(f"{name}.jsonl.gz"), Shape(limit=3, token_scale=0.1))
    assert len(conversations) == 3
    assert all(turn.messages for conversation in conversations for turn in conversation.turns)
