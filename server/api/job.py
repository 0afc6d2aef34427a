"""What the endpoints have in common: a checked, tokenised request and the way its answer is written.

body --decode--> request --prepare--> Job --Answer--> deltas --Presenter--> bytes
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from server.errors import ApiError
from server.request.answer import Answer, CollectedChoice
from server.request.choice import ChoiceDelta
from server.request.spec import GenerationSpec
from server.schema.fields import SamplingFields
from server.schema.parts import StreamOptions

encode_json = msgspec.json.Encoder().encode


class Spread(dict[str, Any]):
    """A JSON object that is written field by field: it holds iterators, which become arrays, or other such objects."""


def json_parts(value: object) -> Iterator[bytes]:
    """A value as JSON, in parts that take little time each where it is a `Spread` or an iterator."""
    if isinstance(value, Spread):
        mark = b"{"
        for key, item in value.items():
            yield mark + encode_json(key) + b":"
            yield from json_parts(item)
            mark = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, Iterator):
        mark = b"["
        for item in value:
            yield mark
            yield from json_parts(item)
            mark = b","
        yield b"[]" if mark == b"[" else b"]"
    else:
        yield encode_json(value)


class Presenter(Protocol):
    """Writes one request's answer in its endpoint's shapes. Stateful: one presenter, one answer."""

    def body(self, answer: Answer, choices: Sequence[CollectedChoice]) -> Iterator[bytes]:
        """The unstreamed answer, in parts that take little time each."""

    def events(self, answer: Answer, batch: Sequence[ChoiceDelta]) -> bytes | Iterator[bytes]:
        """Server-sent events for what is new; may be empty. In parts where they are long."""

    def last_events(self, answer: Answer) -> bytes:
        """Everything after the last delta, [DONE] included."""

    def error_event(self, error: ApiError) -> bytes:
        """The last event of an answer that broke in mid-stream; no [DONE] follows."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request ready to run."""

    specs: tuple[GenerationSpec, ...]
    presenter: Presenter
    stream: bool


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every object of one answer repeats."""

    id: str
    object: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, answer: Answer) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": system_fingerprint(answer),
        }


def answer_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"


def system_fingerprint(answer: Answer) -> str | None:
    """Equal fingerprint, seed and parameters give equal tokens: the model's namespace and the worker's numerics."""
    worker = answer.first.worker
    if worker is None:
        return None
    return "fp_" + blake2b(f"{worker.namespace}/{worker.numerics}".encode(), digest_size=6).hexdigest()


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """What the client wants on its chunks."""

    include_usage: bool
    continuous_usage: bool
    token_ids: bool


def stream_format(request: SamplingFields) -> StreamFormat:
    options = request.stream_options or StreamOptions()
    include_usage = bool(options.include_usage)
    return StreamFormat(
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.continuous_usage_stats),
        token_ids=bool(request.return_token_ids),
    )
