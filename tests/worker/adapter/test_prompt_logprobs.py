"""Log probabilities of a prompt, from the engine's answer to the frame on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from cache.records import WorkerMember
from cache.types import Epoch, WorkerId
from tests.waiting import until
from worker.adapter.api import Chunk
from worker.adapter.blocks import EngineBlocks
from worker.adapter.engine import AdapterEngine
from worker.common.frames import FrameReader
from worker.contracts.engine import EngineSinks, RequestKey
from worker.contracts.metrics import WorkerMetrics
from worker.wire import (
    ChoiceState,
    End,
    GenerateRequest,
    PromptLogprobs,
    SamplingParams,
    TokenizerBundle,
    TokenLogprobs,
    pack,
)

BUNDLE = TokenizerBundle("f", "m", "r", b"{}", None, None, None, (), False, 100, 512, 16)
POSITIONS = (None, TokenLogprobs(-0.5, ((7, -0.5),)), TokenLogprobs(-2.0, ((8, -0.25),)))


class Api:
    """An engine that answers at once."""

    kind = "vllm"
    unsupported = ()

    async def prompt_logprobs(self, request: GenerateRequest) -> tuple[TokenLogprobs | None, ...]:
        return POSITIONS

    async def generate(self, request: GenerateRequest, choice: ChoiceState, request_id: str) -> AsyncIterator[Chunk]:
        yield Chunk((9,), None, "length")

    async def close(self) -> None:
        pass


async def test_prompt_logprobs_are_packed() -> None:
    """Forward the engine's values: a frame that cannot be packed would end the gateway's connection."""
    member = WorkerMember(WorkerId("w"), Epoch("e"), "http://w", "m", "ns", "vllm", 16, 512, 1)
    outputs: list[Any] = []
    blocks, sinks = EngineBlocks(16, max_names=8), EngineSinks(outputs.extend)
    engine: Any = AdapterEngine(Api(), blocks, None, BUNDLE, member, WorkerMetrics(), sinks)
    try:
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=1)
        request = GenerateRequest("r", "g", "", bytes(16), (1, 7, 8), (ChoiceState(0, 0),), sampling)
        engine.submit(RequestKey(0), request, None)
        await until(lambda: outputs and isinstance(outputs[-1].frame, End))
    finally:
        await engine.close()
    frames = FrameReader().feed(b"".join(pack(output.frame) for output in outputs))
    [found] = [frame for frame in frames if isinstance(frame, PromptLogprobs)]
    assert tuple(found.positions) == POSITIONS
