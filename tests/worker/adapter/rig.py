"""An AdapterEngine as a worker has it: with a reader of its frames, and a publisher that keeps its events."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cache.events import BlockEvent, Removed, Stored
from cache.hashing import hash_chain
from cache.records import WorkerLoad, WorkerMember
from cache.types import BlockHash, Epoch, WorkerId
from tests.fake_engine.server import FakeEngine, parse
from tests.server.scripted_worker import listening
from tests.waiting import HANG_S, until
from worker.adapter.api import ChoicePart, EngineApi, EngineLoad, EngineModel, EnginePart, EventSource, Take
from worker.adapter.blocks import EngineBlocks
from worker.adapter.engine import AdapterEngine
from worker.adapter.health import EngineFacts, EngineHealth
from worker.contracts.engine import EngineOutput, EngineSinks, RequestKey
from worker.contracts.metrics import WorkerMetrics
from worker.wire import (
    ChoiceState,
    End,
    EngineCall,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    SamplingParams,
    Started,
    TokenizerBundle,
    Tokens,
)

BLOCK = 16
VOCAB = 32_000
BUNDLE = TokenizerBundle("f", "tiny", "r", b"{}", None, None, None, (2,), False, VOCAB, 4096, BLOCK)
MEMBER = WorkerMember(
    *(WorkerId("w"), Epoch("e0"), "http://w", "tiny", "n", "vllm-0", BLOCK, 4096, 1),
    capabilities=("/v1/chat/completions", "/v1/completions"),
    engine_block_size=BLOCK,
)
ROOT = b"tenant-number-1."
OTHER_ROOT = b"tenant-number-2."


def make_request(
    prompt_ids: Sequence[int] = tuple(range(100, 200)),
    *,
    n: int = 1,
    output_ids: tuple[int, ...] = (),
    root: bytes = ROOT,
    gateway: str = "g",
    max_tokens: int = 8,
    deadline_s: float | None = None,
    is_suspect: bool = False,
    adapter: str = "",
    streams: bool = True,
    path: str = "/v1/completions",
    **fields: Any,
) -> GenerateRequest:
    """`fields` are those of the client's body."""
    body = {"n": n, "temperature": 0.0, "max_tokens": max_tokens, "stream": streams, **fields}
    return GenerateRequest(
        request_id="r",
        gateway_id=gateway,
        epoch="",
        root=root,
        prompt_ids=list(prompt_ids),
        choices=tuple(ChoiceState(index, 7 + index, output_ids) for index in range(n)),
        sampling=SamplingParams(max_tokens=max_tokens),
        deadline_s=deadline_s,
        is_suspect=is_suspect,
        adapter=adapter,
        call=EngineCall(path, msgspec.json.encode(body), streams),
    )


FACTS = EngineFacts(1.0, 256, BLOCK, EngineModel("tiny", "tiny", 4096))


class Rig:
    """Submits, and keeps what comes. `check` asserts the order of each request's frames."""

    def __init__(
        self,
        api: EngineApi,
        source: EventSource | None = None,
        facts: EngineFacts = FACTS,
        *,
        hang_s: float = HANG_S,
        probe_s: float = 0.0,
    ) -> None:
        self.metrics = WorkerMetrics()
        blocks = EngineBlocks(BLOCK, max_names=4096)
        self.deaths: list[BaseException] = []
        self.sinks = EngineSinks(self.deliver, self.deaths.append, self)
        health = EngineHealth(facts, hang_s=hang_s, probe_s=probe_s)
        self.engine = AdapterEngine(api, blocks, source, BUNDLE, MEMBER, health, self.metrics, self.sinks)
        self.frames: dict[RequestKey, list[Frame]] = defaultdict(list)
        self.published: set[BlockHash] = set()
        self.epochs: list[WorkerMember] = []
        self.load = WorkerLoad()
        self._next = 0

    def deliver(self, outputs: list[EngineOutput]) -> None:
        for key, frame in outputs:
            self.frames[key].append(frame)
            check_order(self.frames[key])

    def offer(self, events: Sequence[BlockEvent], load: WorkerLoad) -> None:
        for event in events:
            match event:
                case Stored(block_hash):
                    assert block_hash not in self.published
                    self.published.add(block_hash)
                case Removed(block_hash):
                    self.published.remove(block_hash)
        self.load = load

    def begin_epoch(self, member: WorkerMember) -> None:
        self.epochs.append(member)
        self.published.clear()

    def submit(self, request: GenerateRequest) -> RequestKey:
        assert self.engine.refusal(request) is None
        key = RequestKey(self._next)
        self._next += 1
        self.engine.submit(key, request, None)
        return key

    async def answer(self, request: GenerateRequest) -> list[Frame]:
        """All frames of a request, from Started to the last."""
        key = self.submit(request)
        await until(lambda: self.is_over(key))
        return self.frames[key]

    def is_over(self, key: RequestKey) -> bool:
        return bool(self.frames[key]) and isinstance(self.frames[key][-1], (End, Failed))

    def num_published(self, request: GenerateRequest) -> int:
        """Tokens of the prompt's prefix that gateways are promised."""
        chain = hash_chain(BlockHash(request.root), request.prompt_ids, BLOCK)
        held = [block_hash in self.published for block_hash in chain]
        return BLOCK * (held.index(False) if False in held else len(held))

    async def is_idle(self) -> bool:
        """Run due callbacks, then return whether the account is empty."""
        await asyncio.sleep(0)
        state = self.engine.debug_state().result()
        self.engine._publish()
        return state["num_requests"] == 0 and not sum(self.load.queued_prefill_s.values())

    @property
    def state(self) -> str:
        """The state of the engine."""
        return str(self.engine.debug_state().result()["engine"]["state"])


def check_order(frames: Sequence[Frame]) -> None:
    """Assert what the wire promises: Started first and once, no token behind a choice's end, one last frame."""
    kinds = [type(frame) for frame in frames]
    assert kinds.count(Started) <= 1
    assert Tokens not in kinds or kinds[0] is Started
    assert not {End, Failed}.intersection(kinds[:-1])
    finished: set[int] = set()
    for frame in frames:
        if isinstance(frame, (Tokens, Finished)):
            assert frame.choice not in finished
            finished.update({frame.choice} if isinstance(frame, Finished) else ())


def token_ids(frames: Sequence[Frame], choice: int = 0) -> list[int]:
    return [id_ for frame in frames if isinstance(frame, Tokens) and frame.choice == choice for id_ in frame.token_ids]


def finishes(frames: Sequence[Frame]) -> list[Finished]:
    return [frame for frame in frames if isinstance(frame, Finished)]


def is_lost(frames: Sequence[Frame]) -> bool:
    return isinstance(frames[-1], Failed) and (frames[-1].code, frames[-1].retryable) == ("worker_lost", True)


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[Rig]:
    await rig.engine.catch_up()
    rig.engine.start()
    supervising = asyncio.create_task(rig.engine.supervise())
    try:
        yield rig
        assert not supervising.done() or supervising.result()
    finally:
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
        await rig.engine.close()


class Call:
    """One request at a scripted engine."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.parts: asyncio.Queue[EnginePart | Exception | None] = asyncio.Queue()
        self.is_open = True

    def say(self, *parts: EnginePart | Exception | None) -> None:
        """An exception breaks the stream, None ends it."""
        for part in parts:
            self.parts.put_nowait(part)

    def token(self, token_id: int = 5, choice: int = 0) -> None:
        self.say(EnginePart((ChoicePart(choice, (token_id,)),)))

    def end(self, reason: str = "length", num_cached_tokens: int | None = None) -> None:
        choices = [choice.index for choice in self.request.choices]
        self.say(EnginePart(tuple([ChoicePart(index, (6,), reason) for index in choices])))
        usage = {"prompt_tokens_details": {"cached_tokens": num_cached_tokens}}
        self.say(msgspec.convert({"usage": usage}, EnginePart), None)


class ScriptedApi(EngineApi):
    """An EngineApi that a test controls."""

    kind = "vllm"

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.counts: EngineLoad | Exception = EngineLoad(1.0, 0, 0, 256, BLOCK, 0.0)
        self.model_name = "tiny"
        self.loras: tuple[str, ...] = ()
        self.reset_error: Exception | None = None
        self.num_resets = 0
        self.healthy = True
        self.num_asked = 0
        self.paused = False
        self.works = asyncio.Event()
        """Cleared: the core answers no request for a token."""
        self.works.set()
        self.num_probes = 0

    @property
    def open_calls(self) -> list[Call]:
        return [call for call in self.calls if call.is_open]

    async def call(self, number: int = 0) -> Call:
        """The call with that number, as soon as it has come."""
        await until(lambda: len(self.calls) > number)
        return self.calls[number]

    async def version(self) -> str:
        return "0"

    async def model(self) -> EngineModel:
        return EngineModel(self.model_name, "tiny", 4096, self.loras)

    async def load(self) -> EngineLoad:
        self.num_asked += 1
        if isinstance(self.counts, Exception):
            raise self.counts
        return self.counts

    async def is_healthy(self) -> bool:
        return self.healthy

    async def is_paused(self) -> bool:
        return self.paused

    async def probe(self, prompt_ids: Sequence[int] = (0,), salt: str = "") -> int | None:
        self.num_probes += 1
        await self.works.wait()
        return 0

    async def reset(self) -> None:
        self.num_resets += 1
        if self.reset_error is not None:
            raise self.reset_error

    async def generate(self, request: GenerateRequest, request_id: str, take: Take) -> None:
        call = Call(request)
        self.calls.append(call)
        try:
            while (part := await call.parts.get()) is not None:
                if isinstance(part, Exception):
                    raise part
                take(b"{}", part)
        finally:
            call.is_open = False

    async def text_apis(self) -> tuple[str, ...]:
        return ("/v1/completions",)


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer, as little as an engine can be started with. Returns the folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number + 3 for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(f'{{"vocab_size": {VOCAB}, "eos_token_id": 2}}')
    return folder


@asynccontextmanager
async def fake_engine(folder: Path, *options: str, events: bool = True) -> AsyncIterator[tuple[FakeEngine, str]]:
    """A fake engine on this event loop, and its URL; its events go over unix sockets in the folder."""
    sockets = ["--events", f"ipc://{folder}/events", "--replay", f"ipc://{folder}/replay"] if events else []
    engine = FakeEngine(parse([str(folder), "--port", "0", *sockets, *options]))
    try:
        async with listening(engine.app) as url:
            yield engine, url
    finally:
        engine.close()
