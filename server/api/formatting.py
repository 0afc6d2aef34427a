"""The shared parts of responses: JSON in parts, the head of each chunk, and log probabilities."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, ClassVar, Final

import msgspec
from starlette.responses import Response

from server.errors import ApiError
from server.http.stream import DONE, PING, sse
from server.request.choice import ChoiceDelta, GenerationSpec, TokenEntry
from server.request.request import Generation
from server.request.response import ResponseStream
from server.request_context import CURRENT
from server.schema.fields import SamplingFields
from server.text.detokenizer import TokenBytes
from server.text.output_parser import OutputParser, OutputRules
from worker.wire import TokenLogprobs

MIN_LOGPROB: Final = -9999.0
"""JSON has no infinity."""

encode_json = msgspec.json.Encoder().encode


class LazyJson(dict[str, Any]):
    """A JSON object that is written field by field. It may hold iterators, which become arrays, and lazy objects."""


def json_parts(value: object) -> Iterator[bytes]:
    """Write a value as JSON. A `LazyJson` or an iterator is written in small parts."""
    if isinstance(value, LazyJson):
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


class ResponseFormatter(ABC):
    """The writer of one response in its route's shapes. Stateful: one formatter, one response."""

    ping: ClassVar[bytes] = PING
    """The keep-alive of a silent stream."""
    shows_output = True
    """False: what was generated is not part of the answer, nor of its usage."""

    @abstractmethod
    def body(self, response: ResponseStream, choices: Sequence[ChoiceDelta]) -> Iterable[bytes]:
        """Write the unstreamed response, in parts where it may be long."""

    def events(self, response: ResponseStream, deltas: Sequence[ChoiceDelta]) -> bytes | Iterator[bytes]:
        """Write the server-sent events of new deltas, in parts if they may be long; may be empty."""
        return b""

    def last_events(self, response: ResponseStream) -> bytes:
        """Write everything after the last delta."""
        return b""

    def error_event(self, error: ApiError) -> bytes:
        """Write the last event of a stream that fails; no [DONE] follows."""
        return sse(encode_json({"error": error.fields()}))


class ChunkFormatter(ResponseFormatter):
    """The common part of chats and completions: the fields of every chunk, and the usage at the end."""

    prompt_per_choice: ClassVar[bool]
    """The fields of a prompt are shown in each of its choices, not in the response."""

    def __init__(self, kind: str, request: SamplingFields, spec: GenerationSpec, num_top: int | None) -> None:
        """`num_top`: the best tokens shown at each position; None: no log probabilities are asked for."""
        options = request.stream_options
        self._head = {"id": spec.request_id, "object": kind, "created": int(time.time()), "model": request.model}
        self._token_bytes = spec.model.tokenizer.token_bytes
        self._num_top = num_top
        self._num_prompt_logprobs = request.prompt_logprobs
        self._token_ids = bool(request.return_token_ids)
        self._include_usage = options is not None and bool(options.include_usage)
        self._usage_in_chunks = self._include_usage and options is not None and bool(options.continuous_usage_stats)

    def body(self, response: ResponseStream, choices: Sequence[ChoiceDelta]) -> Iterable[bytes]:
        is_short = len(choices) == 1 and self._num_top is None and self._num_prompt_logprobs is None
        written = self._choices(response, choices)
        fields = self._fields(response)
        fields["choices"] = list(written) if is_short else written
        fields["usage"] = self._usage(response)
        if not self.prompt_per_choice:
            self._add_prompt(fields, response.first)
        return (encode_json(fields),) if is_short else json_parts(LazyJson(fields))

    def last_events(self, response: ResponseStream) -> bytes:
        if not self._include_usage:
            return DONE
        return sse(encode_json({**self._fields(response), "choices": [], "usage": self._usage(response)})) + DONE

    @abstractmethod
    def _choices(self, response: ResponseStream, choices: Sequence[ChoiceDelta]) -> Iterator[dict[str, Any]]:
        """Yield the items of an unstreamed response's `choices`."""

    def _whole_choice(self, choice: ChoiceDelta, **fields: Any) -> LazyJson:
        """Return an item of an unstreamed response's `choices`."""
        item = LazyJson(fields)
        if choice.stop_reason is not None:
            item["stop_reason"] = choice.stop_reason
        if self._token_ids:
            item["token_ids"] = choice.token_ids if self.shows_output else []
        return item

    def _add_prompt(self, fields: dict[str, Any], generation: Generation) -> None:
        prompt_ids = generation.spec.prompt_ids
        if self._num_prompt_logprobs is not None:
            positions, num_top = generation.prompt_logprobs, self._num_prompt_logprobs
            fields["prompt_logprobs"] = prompt_logprobs(self._token_bytes, prompt_ids, positions, num_top)
        if self._token_ids:
            fields["prompt_token_ids"] = list(prompt_ids)

    def _fields(self, response: ResponseStream) -> dict[str, Any]:
        worker = response.first.worker
        fingerprint = None if worker is None else system_fingerprint(worker.namespace, worker.numerics)
        return {**self._head, "system_fingerprint": fingerprint}

    def _chunk_fields(self, response: ResponseStream, choices: object) -> dict[str, Any]:
        fields = self._fields(response)
        fields["choices"] = choices
        if self._include_usage:
            fields["usage"] = self._usage(response) if self._usage_in_chunks else None
        return fields

    def _usage(self, response: ResponseStream) -> dict[str, Any]:
        return response.usage()


class ItemFormatter(ResponseFormatter):
    """The common part of messages and responses: a list of items, whose steps are events. Only the last may be open."""

    def __init__(self, spec: GenerationSpec, rules: OutputRules, *, streams: bool) -> None:
        self._id = spec.request_id
        self._rules = rules
        self._streams = streams
        self._parser = OutputParser(rules)
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        self._texts: list[str] = []
        """The pieces of the open item's text."""
        self._call_ids: list[str] = []
        """Those that an engine has given, of calls that come next."""
        self._events: list[bytes] = []
        """Events that are not sent yet."""

    def body(self, response: ResponseStream, choices: Sequence[ChoiceDelta]) -> tuple[bytes]:
        self._add(choices[0])
        return (encode_json(self._answer(response)),)

    def events(self, response: ResponseStream, deltas: Sequence[ChoiceDelta]) -> bytes:
        self._start(response)
        for delta in deltas:
            self._add(delta)
        return self._take_events()

    @abstractmethod
    def _start(self, response: ResponseStream) -> None:
        """Emit the events before the first item, once."""

    @abstractmethod
    def _add(self, delta: ChoiceDelta) -> None:
        """Add the items of more output."""

    @abstractmethod
    def _answer(self, response: ResponseStream) -> dict[str, Any]:
        """Return the answer up to now."""

    def _emit(self, name: str, /, **fields: Any) -> None:
        if self._streams:
            self._events.append(sse(encode_json({"type": name, **fields}), name))

    def _take_events(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)


def json_response(value: object) -> Response:
    return Response(encode_json(value), media_type="application/json")


def response_id(prefix: str) -> str:
    """Return the answer's id, with the digits of the request's id unless a client chose that one."""
    return prefix + CURRENT.get().unique_id


@lru_cache
def system_fingerprint(namespace: str, numerics: str) -> str:
    """Hash the model's namespace and the worker's numerics: with equal seed and parameters, tokens are equal."""
    return "fp_" + blake2b(f"{namespace}/{numerics}".encode(), digest_size=6).hexdigest()


def token_text(token_bytes: TokenBytes, token_id: int) -> str:
    return token_bytes[token_id].decode("utf-8", "replace")


def json_logprob(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB  # also for NaN


def chat_logprobs(token_bytes: TokenBytes, entries: Iterable[TokenEntry], num_top: int) -> Iterator[dict[str, Any]]:
    """Yield the items of `choices[].logprobs.content` of a chat."""
    for entry in entries:
        top = [_chat_token(token_bytes, token_id, logprob) for token_id, logprob in entry.logprobs.top[:num_top]]
        yield {**_chat_token(token_bytes, entry.token_id, entry.logprobs.logprob), "top_logprobs": top}


def _chat_token(token_bytes: TokenBytes, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(token_bytes, token_id),
        "logprob": json_logprob(logprob),
        "bytes": list(token_bytes[token_id]),
    }


def prompt_logprobs(
    token_bytes: TokenBytes, prompt_ids: Sequence[int], positions: Iterable[TokenLogprobs | None], num_top: int
) -> Iterator[dict[str, Any] | None]:
    """Yield vLLM's `prompt_logprobs`: by token id, the prompt's own token and the best; null for the first."""
    for token_id, logprobs in zip(prompt_ids, positions, strict=False):
        if logprobs is None:
            yield None
            continue
        ranked = {id_: (value, rank) for rank, (id_, value) in enumerate(logprobs.top[:num_top], 1)}
        ranked.setdefault(token_id, (logprobs.logprob, logprobs.rank))
        yield {
            str(id_): {
                "logprob": json_logprob(value),
                "rank": rank or None,
                "decoded_token": token_text(token_bytes, id_),
            }
            for id_, (value, rank) in ranked.items()
        }
