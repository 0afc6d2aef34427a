"""The recorded workloads, as requests whose blocks are already hashed: all sessions, or the even or odd `half` of them.

Most traces name blocks by id, not by content; where there is text, its blocks get ids too. One id becomes a block of
one token, for the real hash chain and allocator. Sizes in tokens are kept next to it.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from cache.hashing import hash_chain
from cache.types import HASH_BYTES, BlockHash

DATA: Final = Path(__file__).parents[3] / "tests" / "data"
ROOT: Final = BlockHash(b"\0" * HASH_BYTES)
CONVERSATION: Final = "mooncake_conversation_first40min.jsonl.gz"
TOOL_CHAT: Final = "taubench_airline_text_dev.jsonl.gz"
SWE_AGENT: Final = "swe_agent_text_dev.jsonl.gz"
CODING_AGENT: Final = "cc_agent_sessions_devhalf.jsonl.gz"
_BUCKET_S: Final = 3.0
_REST: Final = 1 << 31
"""Ids of at least this name the last, partial block of a request."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """`block_ids` stand for the prompt's full blocks and, last, for its unshared rest."""

    number: int
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: Sequence[int]
    chain: Sequence[BlockHash]
    """The hash of every entry of `block_ids`."""
    hashes: Sequence[BlockHash]
    """Hashes of only the full blocks, which a router sees."""
    answer_ids: Sequence[int] = ()
    """The full blocks after `block_ids` that the answer fills, where answers are kept (`variants`)."""


def make_request(number: int, num_prompt_tokens: int, num_output_tokens: int, full_blocks: list[int]) -> TraceRequest:
    """Return a request; its number makes the rest of its prompt its own."""
    block_ids = [*full_blocks, _REST | number]
    chain = hash_chain(ROOT, block_ids, 1)
    return TraceRequest(number, num_prompt_tokens, num_output_tokens, block_ids, chain, chain[:-1])


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """Requests of which each is sent `think_s` after the answer to the one before; the first at `start_s`."""

    start_s: float
    requests: Sequence[TraceRequest]
    think_s: Sequence[float]
    conversation: int
    """Its number: an open loop has a session for each request of a conversation."""
    key: str = ""
    """The name of the conversation that the client sends; empty: none."""
    children: Sequence[Session] = ()
    """Sessions that begin with its last answer, whatever their `start_s`."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    sessions: Sequence[Session]
    block_size: int
    num_requests: int
    num_distinct_blocks: int
    prefill_tokens_per_s: float
    """The rate of one worker, as the reference simulation chose it for this workload."""


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") as lines:
        for line in lines:
            yield json.loads(line)


class Trace(Protocol):
    """A recorded or made workload, for any number of workers."""

    def workload(self, *, num_workers: int, load: float, seed: int) -> Workload: ...


class ConversationTrace:
    """Mooncake's conversations: open loop, every request a session of its own."""

    BLOCK_SIZE: Final = 512
    PREFILL_TOKENS_PER_S: Final = 8000.0

    def __init__(self, path: Path, half: int | None = None) -> None:
        """Conversations differ in their second block: the first may be a shared system prompt."""
        self._times_s: list[float] = []
        self._requests: list[TraceRequest] = []
        self._conversations: list[int] = []
        distinct: set[int] = set()
        conversations: dict[int, int] = {}
        for number, line in enumerate(_lines(path)):
            conversation = conversations.setdefault(line["hash_ids"][:2][-1], len(conversations))
            if half is not None and conversation % 2 != half:
                continue
            distinct.update(line["hash_ids"])
            num_tokens = line["input_length"]
            block_ids = line["hash_ids"][: num_tokens // self.BLOCK_SIZE]
            self._requests.append(make_request(number, num_tokens, line["output_length"], block_ids))
            self._conversations.append(conversation)
            self._times_s.append(line["timestamp"] / 1000)
        first_s = min(self._times_s)
        self._times_s = [time_s - first_s for time_s in self._times_s]
        self._num_distinct = len(distinct)

    def workload(self, *, num_workers: int, load: float, seed: int) -> Workload:
        """Return the requests with arrivals spread within their 3 s buckets, and the clock scaled to `load`.

        `load` is gross input tokens over what the fleet can prefill.
        """
        rng = random.Random(seed)
        times_s = [time_s + rng.uniform(0.0, _BUCKET_S) for time_s in self._times_s]
        num_tokens = sum(request.num_prompt_tokens for request in self._requests)
        duration_s = num_tokens / (load * num_workers * self.PREFILL_TOKENS_PER_S)
        scale = duration_s / (max(times_s) - min(times_s))
        order = sorted(range(len(times_s)), key=times_s.__getitem__)
        sessions = [Session(times_s[i] * scale, (self._requests[i],), (0.0,), self._conversations[i]) for i in order]
        return Workload(sessions, self.BLOCK_SIZE, len(sessions), self._num_distinct, self.PREFILL_TOKENS_PER_S)


class CodingAgentTrace:
    """Coding-agent sessions: closed loop, the next request leaves `think` after the answer.

    Block ids are local to a session. That sessions with equal `tool_tokens` share their head is an assumption.
    """

    BLOCK_SIZE: Final = 512
    PREFILL_TOKENS_PER_S: Final = 2500.0
    MAX_THINK_S: Final = 60.0
    MAX_PROMPT_TOKENS: Final = 128_000
    MAX_TURNS: Final = 40
    START_S: Final = 2400.0

    def __init__(self, path: Path, half: int | None = None) -> None:
        numbers = count()
        self._sessions: list[tuple[list[TraceRequest], list[float]]] = []
        for line in islice(_lines(path), half, None, 1 if half is None else 2):
            requests, think_s = self._session(line, numbers)
            if requests:
                self._sessions.append((requests, think_s))
        self._num_distinct = len(
            {block_hash for requests, _ in self._sessions for request in requests for block_hash in request.hashes}
        )

    def _session(self, line: dict[str, Any], numbers: Iterator[int]) -> tuple[list[TraceRequest], list[float]]:
        group = self.BLOCK_SIZE // line["block_size"]
        names: dict[tuple[int, ...], int] = {}
        head = line["tool_tokens"] // self.BLOCK_SIZE
        base = zlib.crc32(str(line["id"]).encode())
        requests: list[TraceRequest] = []
        think_s: list[float] = []
        for turn in line["requests"]:
            if "runs" not in turn or len(requests) == self.MAX_TURNS:
                continue
            if turn["in"] > self.MAX_PROMPT_TOKENS:
                break
            local = [first + i for first, length in turn["runs"] for i in range(length)]
            num_full = min(turn["in"] // self.BLOCK_SIZE, len(local) // group)
            block_ids = []
            for i in range(num_full):
                if i < head:
                    block_ids.append(name_block("tools", line["tool_tokens"], i))
                else:
                    key = tuple(local[i * group : (i + 1) * group])
                    block_ids.append(name_block("session", base, names.setdefault(key, len(names))))
            requests.append(make_request(next(numbers), turn["in"], turn["out"], block_ids))
            think_s.append(min(self.MAX_THINK_S, float(turn.get("think_time") or 0.0)))
        return requests, think_s

    def workload(self, *, num_workers: int, load: float, seed: int) -> Workload:
        """Sessions begin at random within 40 minutes; `load` does not apply to a closed loop."""
        rng = random.Random(seed)
        sessions = [
            Session(rng.uniform(0.0, self.START_S), requests, think_s, number, f"agent-{number}")
            for number, (requests, think_s) in enumerate(self._sessions)
        ]
        sessions.sort(key=lambda session: session.start_s)
        return Workload(
            sessions,
            self.BLOCK_SIZE,
            sum(len(session.requests) for session in sessions),
            self._num_distinct,
            self.PREFILL_TOKENS_PER_S,
        )


class ToolChatTrace:
    """Recorded conversations with tools (tau-bench, airline), as text: closed loop, tokenised for SmolLM2.

    Every prompt begins with the same policy. A conversation ends before the first prompt that exceeds the context.
    """

    BLOCK_SIZE: Final = 16
    PREFILL_TOKENS_PER_S: Final = 8000.0
    OUTPUT_TOKENS: Final = 64
    MAX_PROMPT_TOKENS: Final = 8192
    START_S: Final = 30.0

    def __init__(self, path: Path, half: int | None = None) -> None:
        numbers = count()
        self._sessions: list[list[TraceRequest]] = []
        for prompts in _text_prompts(path, half):
            requests = []
            for ids, _, _ in prompts:
                if len(ids) > self.MAX_PROMPT_TOKENS:
                    break
                size = self.BLOCK_SIZE
                blocks = [_name_of(ids[i : i + size]) for i in range(0, len(ids) - size, size)]
                requests.append(make_request(next(numbers), len(ids), self.OUTPUT_TOKENS, blocks))
            self._sessions.append(requests)
        self._num_distinct = len({h for requests in self._sessions for request in requests for h in request.hashes})

    def workload(self, *, num_workers: int, load: float, seed: int) -> Workload:
        """All conversations begin within half a minute; `load` does not apply to a closed loop."""
        rng = random.Random(seed)
        sessions = [
            Session(rng.uniform(0.0, self.START_S), requests, (0.0,) * len(requests), number, f"chat-{number}")
            for number, requests in enumerate(self._sessions)
        ]
        sessions.sort(key=lambda session: session.start_s)
        num_requests = sum(map(len, self._sessions))
        return Workload(sessions, self.BLOCK_SIZE, num_requests, self._num_distinct, self.PREFILL_TOKENS_PER_S)


class SweAgentTrace:
    """Recorded steps of a coding agent, as text: closed loop, tokenised for SmolLM2.

    Trajectories are few, so each is replayed several times. Copies share only the system prompt.
    """

    BLOCK_SIZE: Final = 16
    PREFILL_TOKENS_PER_S: Final = 2500.0
    COPIES_PER_WORKER: Final = 4
    MIN_THINK_S: Final = 1.0
    MAX_THINK_S: Final = 10.0
    """A tool runs between two steps."""
    START_S: Final = 600.0

    def __init__(self, path: Path, half: int | None = None) -> None:
        self._trajectories = list(_text_prompts(path, half))

    def workload(self, *, num_workers: int, load: float, seed: int) -> Workload:
        """Sessions begin at random within ten minutes; `load` does not apply to a closed loop."""
        rng = random.Random(seed)
        numbers = count()
        sessions: list[Session] = []
        for copy in range(self.COPIES_PER_WORKER * num_workers):
            for trajectory in self._trajectories:
                requests = [self._request(next(numbers), prompt, copy) for prompt in trajectory]
                think_s = [rng.uniform(self.MIN_THINK_S, self.MAX_THINK_S) for _ in requests]
                start_s, number = rng.uniform(0.0, self.START_S), len(sessions)
                sessions.append(Session(start_s, requests, think_s, number, f"agent-{number}"))
        sessions.sort(key=lambda session: session.start_s)
        listed = [request for session in sessions for request in session.requests]
        num_distinct = len({block_hash for request in listed for block_hash in request.hashes})
        return Workload(sessions, self.BLOCK_SIZE, len(listed), num_distinct, self.PREFILL_TOKENS_PER_S)

    def _request(self, number: int, prompt: TextPrompt, copy: int) -> TraceRequest:
        size, ids = self.BLOCK_SIZE, prompt.token_ids
        blocks = [_name_of(ids[i : i + size]) for i in range(0, len(ids) - size, size)]
        head = prompt.num_system_tokens // size
        if head < len(blocks):
            blocks[head] = name_block("copy", copy, blocks[head])
        return make_request(number, len(ids), prompt.num_output_tokens, blocks)


class TextPrompt(NamedTuple):
    token_ids: Sequence[int]
    num_output_tokens: int
    """Tokens of the recorded answer."""
    num_system_tokens: int


def _text_prompts(path: Path, half: int | None) -> Iterator[list[TextPrompt]]:
    """Yield the prompts of each recorded conversation."""
    from benchmarks.dev.gateway_load.processes import make_bundle
    from server.text.template_sandbox import RenderClock, TemplateEnvironment

    bundle, tokenizer = make_bundle()
    template = TemplateEnvironment().from_string(bundle.chat_template or "")

    def encoded(messages: Sequence[dict[str, Any]], *, complete: bool = False) -> list[int]:
        texts = [{**message, "content": message.get("content") or ""} for message in messages]
        RenderClock(float("inf")).begin({"messages": texts})
        return tokenizer.encode(template.render(messages=texts, add_generation_prompt=not complete)).ids

    for record in islice(_lines(path), half, None, 1 if half is None else 2):
        messages = record["messages"]
        num_system_tokens = len(encoded(messages[:1], complete=True))
        yield [
            TextPrompt(
                encoded(messages[:at]),
                len(tokenizer.encode(message["content"] or "").ids),
                num_system_tokens,
            )
            for at, message in enumerate(messages)
            if at and message["role"] == "assistant"
        ]


def name_block(kind: str, group: int, number: int) -> int:
    """Return a token id below `_REST`, the same in every process, for a block that a trace names."""
    return _digest(f"{kind}/{group}/{number}".encode())


def _name_of(token_ids: Sequence[int]) -> int:
    """The same for a block whose tokens are known."""
    return _digest(b"".join(token_id.to_bytes(4, "little") for token_id in token_ids))


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") % _REST
