"""Load what to send: conversations in OpenAI's message format, or traces of only lengths and block ids.

A trace without text gets some: for each block as many single letters as it has tokens, chosen by its id. So equal
prefixes are equal text, and different ones differ. A letter after a space is one token in most tokenizers.
"""

from __future__ import annotations

import gzip
import json
import random
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Message = Mapping[str, Any]

CONVERSATION_BLOCK: Final = 512
"""Tokens of a block of the conversation trace, which does not state its block size."""
MAX_THINK_S: Final = 60.0
_SUFFIXES: Final = (".json", ".jsonl", ".json.gz", ".jsonl.gz")


class WorkloadError(ValueError):
    """A file that cannot be played; the message names it, the line and the field."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request. `think_s` is what the client waits before it, after the answer to the one before."""

    messages: Sequence[Message]
    max_tokens: int | None
    think_s: float = 0.0
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """Turns that follow each other; `start_s` is when the first was sent, where the recording has it."""

    name: str
    turns: Sequence[Turn]
    start_s: float | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How recordings are cut to the size of the server under test."""

    limit: int | None = None
    """Conversations to take."""
    min_turns: int = 1
    """Shorter conversations are left out."""
    max_turns: int | None = None
    """Turns of each conversation to play."""
    token_scale: float = 1.0
    """Scale of prompt and answer lengths, for traces without text."""


def load(source: Path, shape: Shape) -> list[Conversation]:
    """Every conversation of a file or folder, in order. Raises WorkloadError."""
    if not source.exists():
        raise WorkloadError(f"{source}: there is no such file or folder")
    paths = [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.name.endswith(_SUFFIXES))
    if not paths:
        raise WorkloadError(f"{source}: no file ends with {', '.join(_SUFFIXES)}")
    conversations: list[Conversation] = []
    for path in paths:
        for number, record in _records(path):
            if shape.limit is not None and len(conversations) == shape.limit:
                return conversations
            where = f"{path.name}:{number}"
            conversation = _conversation(record, where, shape)
            if len(conversation.turns) >= shape.min_turns:
                turns = conversation.turns[: shape.max_turns]
                conversations.append(Conversation(conversation.name, turns, conversation.start_s))
    if not conversations:
        raise WorkloadError(f"{source}: no conversation has {shape.min_turns} turn(s) to ask for")
    return conversations


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        try:
            if ".jsonl" in path.suffixes:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield number, json.loads(line)
                return
            document = json.load(lines)
        except ValueError as error:
            raise WorkloadError(f"{path}: not JSON: {error}") from error
    several = isinstance(document, list) and not (document and isinstance(document[0], dict) and "role" in document[0])
    yield from enumerate(document, 1) if several else [(1, document)]


def _conversation(record: Any, where: str, shape: Shape) -> Conversation:
    if isinstance(record, list):
        record = {"messages": record}
    if not isinstance(record, dict):
        raise WorkloadError(f"{where}: a conversation is an object or a list of messages, not {type(record).__name__}")
    try:
        if "messages" in record:
            return _messages(record, where)
        if "hash_ids" in record:
            return _conversation_trace(record, where, shape)
        if "requests" in record:
            return _agent_session(record, where, shape)
    except (KeyError, TypeError, AttributeError) as error:
        raise WorkloadError(f"{where}: {type(error).__name__} {error}") from error
    raise WorkloadError(f"{where}: neither `messages`, `hash_ids` nor `requests` is there")


def _messages(record: Mapping[str, Any], where: str) -> Conversation:
    """Each assistant message is one request, whose prompt is everything before it, as it was recorded."""
    messages: list[Message] = record["messages"]
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise WorkloadError(f"{where}: every message needs a `role`")
    asked = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    if messages and messages[-1]["role"] != "assistant":
        asked.append(len(messages))
    tools = record.get("tools") or ()
    return Conversation(where, [Turn(messages[:end], None, tools=tools) for end in asked])


def _conversation_trace(record: Mapping[str, Any], where: str, shape: Shape) -> Conversation:
    """Every line is a separate request. Its last block is partial unless the length is a multiple of the block size."""
    num_tokens = record["input_length"]
    full_ids = record["hash_ids"][: num_tokens // CONVERSATION_BLOCK]
    blocks = [_text(f"conversation/{block_id}", CONVERSATION_BLOCK * shape.token_scale) for block_id in full_ids]
    rest = num_tokens - len(full_ids) * CONVERSATION_BLOCK
    blocks.append(_text(f"rest/{where}", rest * shape.token_scale))
    turn = Turn(_prompt(blocks), _scaled(record["output_length"], shape))
    return Conversation(where, [turn], record["timestamp"] / 1000)


def _agent_session(record: Mapping[str, Any], where: str, shape: Shape) -> Conversation:
    """Block ids are the session's own; sessions with equal `tool_tokens` are taken to share their head."""
    size = record["block_size"]
    num_head = record["tool_tokens"] // size
    session = record["id"]
    names: dict[int, str] = {}
    turns: list[Turn] = []
    for request in record["requests"]:
        if "runs" not in request:
            continue
        block_ids = [first + i for first, length in request["runs"] for i in range(length)][: request["in"] // size]
        for place, block_id in enumerate(block_ids):
            head = f"tools/{record['tool_tokens']}/{place}"
            names.setdefault(block_id, head if place < num_head else f"session/{session}/{block_id}")
        blocks = [_text(names[block_id], size * shape.token_scale) for block_id in block_ids]
        think_s = min(MAX_THINK_S, float(request.get("think_time") or 0.0)) if turns else 0.0
        turns.append(Turn(_prompt(blocks), _scaled(request["out"], shape), think_s))
    return Conversation(where, turns)


def _prompt(blocks: Sequence[str]) -> list[Message]:
    return [{"role": "user", "content": " ".join(blocks)}]


def _text(name: str, num_letters: float) -> str:
    return " ".join(random.Random(name).choices(string.ascii_lowercase, k=max(1, round(num_letters))))


def _scaled(num_tokens: int, shape: Shape) -> int:
    return max(1, round(num_tokens * shape.token_scale))
