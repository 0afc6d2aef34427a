"""A newer peer sends values unknown to this version: only their feature is lost, never the peer.

The types of wire and registry list the places of such values, so new ones are tested automatically.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import is_dataclass, replace
from typing import Annotated, Any, Final, Literal, NewType, get_args, get_origin, get_type_hints

import aiohttp
import msgpack
import msgspec
import pytest
import torch
from starlette.requests import Request
from starlette.responses import Response

import cache.records
from cache.records import WorkerLoad, WorkerMember, WorkerState
from cache.redis_index import schema
from cache.redis_index.registry import Registry
from cache.redis_index.schema import Signer
from cache.types import GatewayId
from server.metrics import GatewayMetrics
from server.router.router import Router
from server.router.types import RouteRequest
from server.workers.client import WorkerClient
from server.workers.fleet import Fleet, NoIndex
from tests.server.gateway_app import gateway
from tests.server.request.failing_workers import MakeWorker
from tests.server.request.test_strangers import SECRET
from tests.server.scripted_worker import Script, ScriptedWorker, listening, script_of
from tests.server.test_app import chat, post
from tests.worker.live_worker import live_worker
from tests.worker.scheduler.arithmetic_runner import ArithmeticRunner
from tests.worker.scheduler.engine import generate
from worker import wire
from worker.common import proof
from worker.common.frames import FrameReader
from worker.kernels.device import DeviceStream
from worker.kv_transfer import peers

Place = tuple[str | int, ...]
"""The keys and indexes that lead to a value in a message."""
UNKNOWN: Final = ("of a newer version", "", "é\n\0" * 50)
MODULES: Final = (cache.records, schema, wire, proof, peers)
OPEN_LISTS: Final[dict[type, Place]] = {wire.Failed: (1,), WorkerMember: ("capabilities", 1)}
"""Texts of which a reader handles some, without a type that lists them."""


class _Example:
    """A message of a type, as its reader gets it, and the places of values that come from a list."""

    def __init__(self, kind: Any) -> None:
        self.places: list[Place] = []
        self.message = self._of(kind, ())

    def _of(self, kind: Any, at: Place, limits: Sequence[msgspec.Meta] = ()) -> Any:
        origin, args = get_origin(kind), get_args(kind)
        if origin is Annotated:
            if any(get_origin(each) is Literal for each in args[1:]):
                return self._of(next(each for each in args[1:] if get_origin(each) is Literal), at)
            return self._of(args[0], at, [each for each in args[1:] if isinstance(each, msgspec.Meta)])
        if origin is Literal or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
            self.places.append(at)
            return args[0] if origin is Literal else next(iter(kind)).value
        if origin in (typing.Union, types.UnionType):
            return self._of(next(each for each in args if each is not types.NoneType), at)
        if origin is tuple and args[-1:] != (...,):
            return [self._of(each, (*at, number)) for number, each in enumerate(args)]
        if origin in (tuple, list, Sequence, frozenset):
            return [self._of(args[0], (*at, 0))]
        if origin is dict:
            return {self._of(args[0], (*at, "a key")): self._of(args[1], (*at, "a value"))}
        if isinstance(kind, NewType):
            return self._of(kind.__supertype__, at)
        if is_message(kind):
            return self._of_fields(kind, at)
        if kind in (int, float):
            return kind(next((each.ge for each in limits if each.ge is not None), 1))
        return {str: "x", bytes: b"x" * 16, bool: False, Any: None}[kind]

    def _of_fields(self, kind: Any, at: Place) -> Any:
        config = getattr(kind, "__struct_config__", None)
        as_array = config is not None and config.array_like
        tag = [] if config is None or config.tag is None else [config.tag]
        assert as_array or not tag, "no message is a map with a tag"
        hints = get_type_hints(kind, include_extras=True)
        names = kind.__struct_fields__ if config is not None else tuple(kind.__dataclass_fields__)
        if as_array:
            return tag + [self._of(hints[name], (*at, number)) for number, name in enumerate(names, len(tag))]
        return {name: self._of(hints[name], (*at, name)) for name in names}


def is_message(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or is_dataclass(kind))


def messages() -> Iterator[type]:
    """Yield every type of message that a peer may send."""
    for module in MODULES:
        for kind in vars(module).values():
            if is_message(kind) and kind.__module__ == module.__name__ and not kind.__name__.startswith("_"):
                yield kind


def places(*kinds: type) -> list[Any]:
    """Return the places of values from a list in messages of these types, as parameters of a test."""
    found = [(kind, place) for kind in kinds for place in _Example(kind).places]
    found += [(kind, place) for kind, place in OPEN_LISTS.items() if kind in kinds]
    return [pytest.param(*each, id=".".join([each[0].__name__, *map(str, each[1])])) for each in found]


def with_value(message: Any, place: Place, value: str) -> Any:
    """Return the message with another value at the place."""
    if not place:
        return value
    key, *rest = place
    if isinstance(message, list | tuple):
        return [with_value(each, tuple(rest), value) if at == key else each for at, each in enumerate(message)]
    if key in ("a key", "a value"):
        return {value if key == "a key" else name: 1 for name in message}
    return {name: with_value(each, tuple(rest), value) if name == key else each for name, each in message.items()}


def test_the_places_are_found() -> None:
    assert {("prefill_order",), ("tiers", 0)} <= set(_Example(WorkerMember).places)
    assert _Example(wire.Finished).places == [(2,)]
    assert _Example(wire.GenerateRequest).places == [("sampling", "grammar", "kind")]
    assert _Example(wire.Started).places == [(2, "a key")]
    assert _Example(WorkerState).places == [("member", *place) for place in _Example(WorkerMember).places]


@pytest.mark.parametrize(("kind", "place"), places(*messages()))
@pytest.mark.parametrize("value", UNKNOWN, ids=["text", "empty", "long"])
def test_a_message_is_read_with_an_unknown_value(kind: type, place: Place, value: str) -> None:
    message = with_value(_Example(kind).message, place, value)
    wire.unpack(msgpack.packb(message), kind)


# --- members ----------------------------------------------------------------------------------------------------------


def newer(member: WorkerMember, place: Place, value: str) -> dict[str, Any]:
    """Return a member as a newer worker sends it."""
    example, fields = _Example(WorkerMember).message[place[0]], msgspec.to_builtins(member)
    own = fields[str(place[0])]
    return with_value(fields | {str(place[0]): [*own, *example] if isinstance(own, tuple) else example}, place, value)


@pytest.mark.parametrize(("kind", "place"), places(WorkerMember))
@pytest.mark.parametrize("value", UNKNOWN, ids=["text", "empty", "long"])
async def test_an_unknown_value_in_an_answer_costs_no_worker(
    make: MakeWorker, kind: type, place: Place, value: str
) -> None:
    """The worker still gets requests."""
    worker = make()

    async def state(http: Request) -> Response:
        member = newer(worker.member(), place, value)
        return Response(wire.pack({"member": member, "load": WorkerLoad()}))

    worker._state = state  # type: ignore[method-assign]
    client = WorkerClient()
    async with listening(worker.app()) as url:
        worker.url = url
        fleet = Fleet(NoIndex(), client.state, targets=[url])
        await fleet.poll()
        placement = await Router(NoIndex(), fleet, GatewayId("g"), GatewayMetrics()).place(
            RouteRequest("r", "tiny", 100, ())
        )
        assert placement.worker.worker_id == worker.worker_id
        client.close()


@pytest.mark.parametrize(("kind", "place"), places(WorkerMember))
@pytest.mark.parametrize("value", UNKNOWN, ids=["text", "empty", "long"])
@pytest.mark.parametrize("secret", [b"", SECRET])
def test_an_unknown_value_in_the_registry_costs_no_worker(
    make: MakeWorker, kind: type, place: Place, value: str, secret: bytes
) -> None:
    """The worker is still a candidate."""
    member = replace(make().member(), url="http://w0")
    signer, events = Signer(secret, "headstart", 0), list[str]()
    record = msgspec.json.encode(newer(member, place, value))
    numbers = {"set_version": 1, "batch": 1, "deadline_ms": 2000, "written_ms": 1, "num_entries": 7}
    state = signer.sign_state(member.worker_id, schema.encode_state(member, WorkerLoad(), (5,), **numbers))
    registry = Registry(events.append, signer)
    registry.refresh([(b"w0", signer.sign_member(member.worker_id, record))], [(b"w0", state)])
    workers = registry.workers(None)
    (candidate,) = registry.candidates(workers, [3], [()], [state], 1000)
    assert (candidate.member.worker_id, candidate.matched_blocks, events) == ("w0", 3, [])


# --- answers ----------------------------------------------------------------------------------------------------------


class Newer(msgspec.Struct, array_like=True, tag=len(wire.FRAMES)):
    """A frame that a newer worker sends."""

    anything: Any = None


def sends_at(worker: ScriptedWorker, kind: type, place: Place, value: str) -> Script:
    """Answer as usual, with an unknown value in each frame of `kind`; a Failed comes where End would."""

    async def behave(request: wire.GenerateRequest) -> AsyncIterator[Any]:
        async for frame in worker.answer(request):
            if kind is wire.Failed and isinstance(frame, wire.Finished):
                yield with_value(_Example(kind).message, place, value)
                return
            if type(frame) is kind:
                fields, top = msgspec.to_builtins(frame), int(place[0])
                fields[top] = _Example(kind).message[top]
                yield with_value(fields, place, value)
            else:
                yield frame

    return behave


def streamed(raw: bytes) -> tuple[str, str]:
    """Return the text of a stream's choice, and its finish reason."""
    chunks = [json.loads(line[6:]) for line in raw.split(b"\n\n")[:-2]]
    choices = [chunk["choices"][0] for chunk in chunks]
    return "".join(each["delta"].get("content", "") for each in choices), choices[-1]["finish_reason"]


@pytest.mark.parametrize(("kind", "place"), places(*wire.FRAMES))
@pytest.mark.parametrize("value", UNKNOWN, ids=["text", "empty", "long"])
async def test_an_answer_with_an_unknown_value_is_whole_or_an_error(
    make: MakeWorker, kind: type, place: Place, value: str
) -> None:
    worker = make()
    async with gateway(worker) as target:
        whole = json.loads((await post(target.url, chat()))[2])["choices"]
        for stream in (False, True):
            worker.behave = sends_at(worker, kind, place, value)
            status, _, raw = await post(target.url, chat(stream=stream, max_tokens=64))
            if status == 200 and not stream:
                assert json.loads(raw)["choices"] == whole
            elif status == 200:
                is_cut = b'"error"' in raw
                assert is_cut or streamed(raw) == (whole[0]["message"]["content"], whole[0]["finish_reason"])
            else:
                assert status >= 500
                assert json.loads(raw)["error"]["message"]
            worker.behave = None
            status, _, raw = await post(target.url, chat(max_tokens=65))
            assert (status, json.loads(raw)["choices"]) == (200, whole)
        assert target.router.failed == [], "its circuit breaker is closed"


async def test_an_unknown_finish_reason_is_no_answer(make: MakeWorker) -> None:
    """The text may be cut anywhere. Another worker goes on with it; without one the client gets an error."""
    first, second = make(), make()
    async with gateway(first, second) as target:
        whole = json.loads((await post(target.url, chat()))[2])["choices"]
        tokens, finished = wire.Tokens(0, tuple(first.reply[:3])), wire.Finished(0, "of a newer version")
        cut = script_of(wire.Started(0), tokens, finished, wire.End(0.0, 0.0, 0.0))
        first.behave = cut
        status, _, raw = await post(target.url, chat())
        assert (status, json.loads(raw)["choices"]) == (200, whole)
        assert second.received[-1].choices[0].output_ids == tuple(first.reply[:3])
        second.behave = cut
        status, _, raw = await post(target.url, chat())
        assert (status, json.loads(raw)["error"]["code"]) == (503, "worker_lost"), raw


async def test_frames_of_a_newer_version_are_passed_over(make: MakeWorker) -> None:
    worker = make()
    async with gateway(worker) as target:
        whole = json.loads((await post(target.url, chat()))[2])["choices"]

        async def behave(request: wire.GenerateRequest) -> AsyncIterator[Any]:
            yield Newer()
            async for frame in worker.answer(request):
                yield frame
                if not isinstance(frame, wire.End):
                    yield Newer({"a": [frame]})

        worker.behave = behave
        for _ in range(3):
            status, _, raw = await post(target.url, chat())
            assert (status, json.loads(raw)["choices"]) == (200, whole)
        assert target.router.failed == []


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", UNKNOWN, ids=["text", "empty", "long"])
async def test_a_request_with_an_unknown_value_goes_to_another_worker(value: str) -> None:
    """A refusal as `unsupported` makes the gateway try another one, which may be of a newer version."""
    runner = ArithmeticRunner(129, 4, stream=DeviceStream(torch.device("cpu")))
    sent = msgpack.unpackb(wire.pack_request(generate(range(4), 2)))
    example = _Example(wire.GenerateRequest)
    async with live_worker(runner, 129, 4, max_num_batched_tokens=64, max_num_seqs=16) as worker:
        for place in example.places:
            top, *rest = place
            message = sent | {top: _merged(sent[top], example.message[top], rest[0]) if rest else None}
            body = msgpack.packb(with_value(message, place, value))
            async with aiohttp.ClientSession() as session, session.post(worker.url + "/generate", data=body) as answer:
                (failed,) = FrameReader().feed(await answer.read())
            assert isinstance(failed, wire.Failed)
            assert (answer.status, failed.code, failed.retryable) == (503, "unknown_grammar", True)
        status, answer_ = await worker.generate(generate(range(4), 2))
        assert status == 200
        assert isinstance(answer_.last, wire.End)


def _merged(own: dict[str, Any], example: dict[str, Any], key: str | int) -> dict[str, Any]:
    return own | {str(key): example[str(key)]}
