from __future__ import annotations

import pytest

from worker import wire
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
    wire.Tokens(0, (5, 6)),
    wire.Tokens(1, (5,), (TokenLogprobs(-0.5, ((5, -0.5), (6, -1.0))),)),
    wire.PromptLogprobs((None, TokenLogprobs(-1.0))),
    wire.Finished(0, "stop", 2),
    wire.End(0.1, 0.2, 0.3),
    wire.Failed("overloaded", "queue full", True),
]


def test_request_round_trip() -> None:
    assert wire.unpack_request(wire.pack_request(REQUEST)) == REQUEST


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 10_000])
def test_frames_survive_any_cut(cut: int) -> None:
    stream = b"".join(map(wire.pack_frame, FRAMES))
    reader = wire.FrameReader()
    got = [frame for i in range(0, len(stream), cut) for frame in reader.feed(stream[i : i + cut])]
    assert got == FRAMES


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03", wire.pack({"protocol": 99})])
def test_unpack_request_refuses(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.unpack_request(data)


@pytest.mark.parametrize("data", [b"\x05", b"\x91\x63", b"\x92\x00\xa1x", b"\xc1"])
def test_frame_reader_refuses(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        list(wire.FrameReader().feed(data))
