from __future__ import annotations

import subprocess
import sys

import msgpack
import pytest
from msgspec.structs import replace

from cache.hashing import MediaStart
from tests.members import make_member
from worker import wire
from worker.common.frames import FrameReader, PackedPositions
from worker.common.proof import gateway_token
from worker.wire import ChoiceState, GenerateRequest, SamplingParams, TokenLogprobs

REQUEST = GenerateRequest(
    request_id="r",
    gateway_id="g",
    epoch="e",
    root=b"\x01" * 16,
    prompt_ids=[1, 2, 2**32 - 1],
    choices=(ChoiceState(0, 7, (3, 4)),),
    sampling=SamplingParams(max_tokens=5, logit_bias=((1, -2.0),), grammar=wire.Grammar("regex", "a+")),
)

FRAMES: list[wire.Frame] = [
    wire.Started(16),
    wire.Started(16, None, 0.25),
    wire.Tokens(0, (5, 6)),
    wire.Tokens(1, (5,), (TokenLogprobs(-0.5, ((5, -0.5), (6, -1.0))),)),
    wire.PromptLogprobs((None, TokenLogprobs(-1.0))),
    wire.Finished(0, "stop", 2),
    wire.End(0.1, 0.2, 0.3),
    wire.Failed("overloaded", "queue full", True),
    wire.Failed("invalid_request", "not negative", False, param="temperature"),
    wire.Embedding(b"\x00\x00\x80?"),
]


@pytest.mark.parametrize("embed", [None, wire.Embed(), wire.Embed(64)])
def test_request_round_trip(embed: wire.Embed | None) -> None:
    request = replace(REQUEST, embed=embed, media=(MediaStart("a", 3),))
    assert wire.unpack_request(wire.pack_request(request)) == request


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 10_000])
def test_frames_survive_any_cut(cut: int) -> None:
    stream = b"".join(map(wire.pack, FRAMES))
    reader = FrameReader()
    got = [frame for i in range(0, len(stream), cut) for frame in reader.feed(stream[i : i + cut])]
    assert got == FRAMES
    assert reader._unpacker is None, "between frames a stream takes no memory"


def test_without_a_secret_there_is_no_token() -> None:
    assert gateway_token(b"") == ""
    assert len({gateway_token(secret) for secret in (b"", b"one", b"two")}) == 3


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03"])
def test_unpack_request_refuses(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.unpack_request(data)


@pytest.mark.parametrize("protocol", [None, 0, wire.PROTOCOL_VERSION + 1])
def test_another_protocol_is_refused_by_name(protocol: int | None) -> None:
    message = msgpack.unpackb(wire.pack_request(REQUEST)) | {"protocol": protocol}
    with pytest.raises(wire.WireError, match="protocol: the gateway speaks"):
        wire.unpack_request(msgpack.packb(message))
    del message["protocol"]
    with pytest.raises(wire.WireError, match="protocol"):
        wire.unpack_request(msgpack.packb(message))


def test_a_frame_without_end_is_refused() -> None:
    unending, piece = FrameReader(), b"x" * (1 << 20)
    unending.feed(b"\x94\x05\xdb\xff\xff\xff\xff")
    for _ in range(wire.MAX_FRAME_BYTES // len(piece) - 1):
        unending.feed(piece)
    with pytest.raises(wire.WireError):
        unending.feed(2 * piece)


@pytest.mark.parametrize(
    "data",
    [
        b"\x05",
        b"\x91\xff",
        b"\x91\xa1x",
        b"\x90",
        b"\x92\x00\xa1x",
        b"\xc1",
        wire.pack((1, "0", (5,), None)),
        wire.pack((1, 0, "56", None)),
    ],
)
def test_frame_reader_refuses(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        list(FrameReader().feed(data))


@pytest.mark.parametrize(
    ("newest", "oldest", "shared"),
    [(1, 0, 1), (1, 1, 1), (2, 1, 1), (99, 1, 1), (2, 0, None), (2, 2, None), (0, 0, None), (-1, 0, None)],
)
def test_neighbouring_versions_speak_the_newest_that_both_know(newest: int, oldest: int, shared: int | None) -> None:
    assert wire.shared_protocol(make_member(protocol=newest, oldest_protocol=oldest)) == shared


def test_fields_of_a_newer_peer_are_ignored() -> None:
    message = msgpack.unpackb(wire.pack_request(REQUEST)) | {"colour": "red"}
    message["sampling"]["flavour"] = 3
    assert wire.unpack_request(msgpack.packb(message)) == REQUEST
    for frame in FRAMES:
        longer = [*msgpack.unpackb(wire.pack(frame)), *([None] * 4)]
        assert FrameReader().feed(msgpack.packb(longer)) == [frame], frame


@pytest.mark.parametrize("message", [[len(wire.FRAMES)], [99, 1], [2**63, {"a": [None]}]])
def test_frames_of_a_newer_worker_are_passed_over(message: list[object]) -> None:
    newer = msgpack.packb(message)
    stream = newer + newer.join(map(wire.pack, FRAMES)) + newer
    for size in (1, 3, len(stream)):
        assert read(stream, size) == FRAMES


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000, 1 << 20])
def test_long_prompt_logprobs_are_read_as_they_arrive(size: int) -> None:
    positions = (None, *(TokenLogprobs(-0.5, ((number, -0.25),) * 3) for number in range(700)))
    parts = [wire.PromptLogprobs(positions[start : start + 256]) for start in range(0, 701, 256)]
    frames: list[wire.Frame] = [wire.Started(3), *parts, wire.Tokens(0, (1, 2)), wire.End(0.1, 0.2, 0.3)]
    data = b"".join(map(wire.pack, frames))
    assert read(data, size) == frames


def test_packed_positions_are_those_of_the_last_worker() -> None:
    """A worker that takes a request over sends the logprobs of its prompt again."""
    positions = (None, *(TokenLogprobs(-0.5, ((number, -0.25),)) for number in range(9)))
    packed = PackedPositions()
    for part in (positions[:4], positions[4:6], positions[:7], positions[7:]):
        packed.add(part)
    assert tuple(packed) == positions


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("rest", [b"\x92\xc1", b"\x91\x91\xa1x", b"\x91\x05", b"\xc1"])
def test_invalid_prompt_logprobs_are_refused(rest: bytes, size: int) -> None:
    with pytest.raises(wire.WireError):
        read(b"\x92\x03" + rest + b"\x05" * 40, size)


def read(data: bytes, size: int) -> list[wire.Frame]:
    """Read data that arrives in pieces of `size` bytes."""
    reader = FrameReader()
    return [frame for start in range(0, len(data), size) for frame in reader.feed(data[start : start + size])]


FIRST_USES = """
import sys, threading, types
from worker.wire import pack, unpack
sys.setswitchinterval(1e-6)
for number in range(200):
    module = sys.modules[f"m{number}"] = types.ModuleType(f"m{number}")
    exec('''
from __future__ import annotations
from msgspec import Struct
class Part(Struct, frozen=True):
    ids: tuple[int, ...] = ()
    names: dict[str, str] | None = None
class Whole(Struct, frozen=True):
    parts: tuple[Part, ...] = ()
''', module.__dict__)
    data, start = pack({"parts": [{"ids": [1]}]}), threading.Barrier(8)
    def use(kind=module.Whole):
        start.wait()
        assert unpack(data, kind).parts[0].ids == (1,)
    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_threads_unpack_a_new_kind_of_message_at_once() -> None:
    """Without the lock, the process ends by SIGSEGV within about fifteen kinds."""
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
