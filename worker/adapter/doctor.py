"""Checks whether an engine can be a worker. It sends the engine two short prompts, and more until an event arrives."""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Final, NamedTuple

import msgspec

from cache.types import HASH_BYTES, BlockHash
from worker.adapter.api import EngineApi, EngineLoad, EngineLostError, EnginePart, EngineRefusedError, EventSource
from worker.adapter.blocks import EngineBlocks
from worker.adapter.connect import PROBE_TEXTS, check_tokenizer, event_source, make_bundle, open_api
from worker.adapter.kv_events import BlockStored, EventBatch
from worker.adapter.subscriber import EventSubscriber, engine_binds
from worker.adapter.text import COMPLETIONS
from worker.common.capabilities import GENERATING
from worker.common.checks import Check, judge
from worker.config import WorkerConfig
from worker.wire import ChoiceState, EngineCall, GenerateRequest, SamplingParams

PROBE_BLOCKS: Final = 4  # full blocks, so that there are events of some
MIN_PROBE_TOKENS: Final = 64  # with small blocks, too
PROBE_TIMEOUT_S: Final = 60.0  # a request may queue behind others
LISTEN_S: Final = 2.0
"""Time to wait for a probe's event. A publisher retries a closed port a few times a second."""
MAX_PROBES: Final = 3  # the first event may come before the subscription holds
POLL_S: Final = 0.02  # short against LISTEN_S
STREAMED_TOKENS: Final = 16
MAX_NAMES: Final = 1 << 16  # a doctor reads for seconds only
NOWHERE: Final = "tcp://127.0.0.1:0"
"""A free port that no engine uses: only the replay delivers events there."""
EVENTS_OPTION: Final = (
    "--kv-events-config '" + '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://127.0.0.1:5557",'
    '"replay_endpoint":"tcp://127.0.0.1:5558"}' + "', with ports of its own for each engine"
)


class Probe(NamedTuple):
    """A prompt that is new to the engine, and the answer."""

    prompt_ids: list[int]
    root: BlockHash
    num_cached: int | None = None


async def checks(config: WorkerConfig) -> AsyncIterator[Check]:
    """Yield the checks in the order in which an adapter starts, and stop where the rest would mean nothing."""
    api = open_api(config)
    step = "engine"
    try:
        yield Check("engine", "ok", f"{api.kind} {await api.version()}")
        step = "model"
        model = await api.model()
        load = await api.load()
        aliases = f", also named {', '.join(model.aliases)}" if model.aliases else ""
        loras = f", with the adapters {', '.join(model.loras)}" if model.loras else ""
        yield Check("model", "ok", f"{model.name}, {model.max_model_len:,} tokens of context{aliases}{loras}")
        yield check_blocks(load.block_size, config.block_size)
        step = "tokenizer"
        ids = [token_id for text in PROBE_TEXTS for token_id in await api.tokenize(text)]
        try:
            made, _ = await asyncio.to_thread(make_bundle, config, model)
            await check_tokenizer(api, made)
            found = f"the engine and {config.tokenizer or model.source} give the same ids"
            if made.engine_vocabulary:
                found = "only the engine can read the vocabulary, so it renders prompts and writes answers"
            yield Check("tokenizer", "ok", found)
        except ValueError as error:
            yield Check("tokenizer", "fail", str(error), "give the engine's own tokenizer: --tokenizer FOLDER-OR-ID")
        step = "apis"
        apis = await api.text_apis()
        if apis and GENERATING.isdisjoint(apis):
            yield Check("events", "ok", "not needed: requests for a model without text are routed by load")
            return
        step = "tokens"
        num_tokens = min(max(PROBE_BLOCKS * load.block_size + 1, MIN_PROBE_TOKENS), model.max_model_len - 2)

        async def send() -> Probe:
            return await _send(api, random.choices(ids, k=num_tokens))

        first = await send()
        yield (caching := await check_cache(api, load, first))
        yield await check_salt(api, first)
        if api.kind == "vllm":
            yield await check_stream(api, first)
        if caching.status != "fail":  # without caching no block is ever stored
            async for check in check_events(api, config, send):
                yield check
    except (EngineLostError, EngineRefusedError, TimeoutError) as error:
        yield Check(step, "fail", str(error) or f"no answer within {PROBE_TIMEOUT_S:g} s", _advice(error, step))
    finally:
        await api.close()


def _advice(error: Exception, step: str) -> str:
    if isinstance(error, EngineRefusedError) and error.status in (401, 403):
        return "give its API key: --engine-key-file FILE"
    if isinstance(error, EngineRefusedError) and error.status == 404 and step == "engine":
        return "start vLLM 0.32 or newer with --enable-scale-out, or correct --engine and --engine-url"
    if isinstance(error, EngineLostError) and error.gone:
        return "start the engine, or correct --engine-url"
    return "see the engine's log, or correct --engine (vllm or sglang) and --engine-url"


def check_blocks(engine_size: int, size: int) -> Check:
    """Check how much of a hit is lost to rounding: prefixes are promised in whole blocks of the index."""
    found = f"the engine's blocks have {engine_size} tokens, the index counts in {size}"
    if engine_size % size and size % engine_size:
        num_lost = size - math.gcd(engine_size, size)
        found += f": up to {num_lost} tokens of what the engine holds are not promised"
        fitting = max(size for size in range(1, min(engine_size, 64) + 1) if engine_size % size == 0)
        return Check("blocks", "warn", found, f"give --block-size {fitting} to every worker of the fleet")
    found += f": hits are rounded down to {max(engine_size, size)}" if engine_size != size else ""
    return Check("blocks", "ok", found)


async def _send(api: EngineApi, prompt_ids: list[int], root: BlockHash | None = None) -> Probe:
    """Generate one token after a prompt."""
    root = root or BlockHash(secrets.token_bytes(HASH_BYTES))
    async with asyncio.timeout(PROBE_TIMEOUT_S):
        return Probe(prompt_ids, root, await api.probe(prompt_ids, root.hex()))


async def check_cache(api: EngineApi, load: EngineLoad, first: Probe) -> Check:
    """Send a prompt again: the engine must find it cached."""
    again = await _send(api, first.prompt_ids, first.root)
    fix = "start it with --enable-prefix-caching" if api.kind == "vllm" else "start it without --disable-radix-cache"
    if load.reuses_prefixes is False or again.num_cached == 0:
        return Check("caching", "fail", "prefix caching is off: the same prompt is computed again", fix)
    if again.num_cached is None:
        found = "the engine does not report cached tokens, so caching and salt are not checked"
        return Check("caching", "warn", found, "start it with --enable-prompt-tokens-details: it corrects usage, too")
    return Check("caching", "ok", f"the same prompt again: {again.num_cached} of {len(first.prompt_ids)} tokens cached")


async def check_salt(api: EngineApi, first: Probe) -> Check:
    """Send a prompt with another salt: the engine must not find it cached."""
    other = await _send(api, first.prompt_ids)
    if other.num_cached is None:
        return Check("salt", "warn", "not checked", "start it with --enable-prompt-tokens-details")
    fix = "tenants see each other's cache: install a version whose " + (
        "API has cache_salt, and leave out proxies that drop it" if api.kind == "vllm" else "/generate has extra_key"
    )
    found = f"the same prompt with another salt: {other.num_cached} tokens cached"
    return judge("salt", found, (other.num_cached > 0, "fail", fix))


async def check_stream(api: EngineApi, first: Probe) -> Check:
    """Stream an answer, and count the tokens in its events."""
    sizes: list[int] = []
    length = {"max_tokens": STREAMED_TOKENS, "min_tokens": STREAMED_TOKENS}
    call = EngineCall(COMPLETIONS, msgspec.json.encode({"stream": True, **length}), streams=True)
    sampling, choices = SamplingParams(STREAMED_TOKENS), (ChoiceState(0, 0),)
    request = GenerateRequest("doctor", "", "", first.root, first.prompt_ids, choices, sampling, call=call)

    def take(data: bytes, part: EnginePart) -> None:
        sizes.extend(len(choice.token_ids) for choice in part.choices if choice.token_ids)

    async with asyncio.timeout(PROBE_TIMEOUT_S):
        await api.generate(request, f"doctor-{secrets.token_hex(8)}", take)
    found = f"up to {max(sizes, default=0)} tokens of a stream come in one event"
    return Check("stream", "ok", found + ": --stream-interval sets the least, for less work and less smooth text")


class _Listener:
    """Listens to KV events and matches them to probes."""

    def __init__(self, config: WorkerConfig, source: EventSource) -> None:
        """Raises ValueError for an endpoint that others can reach, OSError for a port that is taken."""
        self.blocks = EngineBlocks(config.block_size, max_names=MAX_NAMES)
        self._beginnings: list[tuple[int, ...]] = []
        self._subscriber = EventSubscriber(source, self._hear)
        self._running = asyncio.create_task(self._subscriber.run())

    def _hear(self, event: str, batch: EventBatch | None) -> None:
        if batch is not None:
            self.blocks.apply(batch.events)
            for each in batch.events:
                if isinstance(each, BlockStored) and each.parent_block_hash is None and each.token_ids:
                    self._beginnings.append(each.token_ids)

    async def finds(self, probe: Probe) -> bool:
        """Wait for the event that stores the probe's first blocks."""
        deadline_s = time.monotonic() + LISTEN_S
        while time.monotonic() < deadline_s:
            if any(ids == tuple(probe.prompt_ids[: len(ids)]) for ids in self._beginnings):
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._subscriber.close()


async def check_events(
    api: EngineApi, config: WorkerConfig, send: Callable[[], Awaitable[Probe]]
) -> AsyncIterator[Check]:
    """Check where events come from, that a probe's event arrives live, and that the replay has it."""
    advertised = await api.event_source()
    if config.events == "none":
        fix = "leave out --events none" if advertised else f"start the engine with {EVENTS_OPTION}"
        yield Check("events", "warn", "--events none: no prefix is known, so requests are routed only by load", fix)
        return
    if (problem := await api.index_problem()) is not None:
        fix = "or go on without: requests are then routed only by load"
        yield Check("events", "fail", f"no prefix index: {problem}", fix)
        return
    if (source := await event_source(api, config)) is None:
        found = "the engine advertises no cache events: no prefix would be known"
        yield Check("events", "fail", found, f"start it with {EVENTS_OPTION}; or name its endpoint with --events")
        return
    try:
        listener = _Listener(config, replace(source, replay_endpoint=None))
    except ValueError as error:
        yield Check("events", "fail", str(error), f"start the engine with {EVENTS_OPTION}")
        return
    except OSError as error:
        fix = "end the worker that follows this engine, and ask again; two engines need ports of their own"
        yield Check("events", "warn", f"live events are not checked: {error}", fix)
    else:
        try:
            yield await check_live(listener, source, advertised, send)
        finally:
            await listener.close()
    yield await check_replay(config, source, send)


async def check_live(
    listener: _Listener, source: EventSource, advertised: EventSource | None, send: Callable[[], Awaitable[Probe]]
) -> Check:
    """Send probes until the event of one arrives."""
    for _ in range(MAX_PROBES):
        if await listener.finds(await send()):
            break
    else:
        found = f"no event has arrived from {source.endpoint} for {MAX_PROBES} prompts"
        return Check("events", "fail", found, _advice_for_silence(source, advertised))
    if listener.blocks.problem is not None:
        fix = "such a model is served without a prefix index: give --events none"
        return Check("events", "fail", listener.blocks.problem, fix)
    if listener.blocks.tree.num_opaque and not listener.blocks.visible_events():
        fix = "use vLLM 0.32, SGLang 0.5.20 or newer: their events carry the cache_salt"
        return Check("events", "fail", "events arrive, but without the salt of their request", fix)
    return Check("events", "ok", f"they come from {source.endpoint}")


def _advice_for_silence(source: EventSource, advertised: EventSource | None) -> str:
    if advertised is not None and source.endpoint != advertised.endpoint:
        return f"the engine publishes to {advertised.endpoint}: leave out --events, or name that"
    if engine_binds(source):
        return "no engine publishes there: run the adapter where this endpoint is the engine's"
    return (
        "vLLM connects to an endpoint without *, and waits there for a listener: run the adapter on the engine's "
        "machine, in its pod or its network namespace"
    )


async def check_replay(config: WorkerConfig, source: EventSource, send: Callable[[], Awaitable[Probe]]) -> Check:
    """Check that the replay has the event of a probe."""
    fix = f"start the engine with a replay_endpoint: {EVENTS_OPTION}"
    if not source.replay_endpoint:
        return Check("replay", "warn", "there is none: lost events, and a worker's restart, cost prefix hits", fix)
    try:
        listener = _Listener(config, replace(source, endpoint=NOWHERE, binds=None))
    except ValueError as error:
        return Check("replay", "fail", str(error), fix)
    try:
        is_found = await listener.finds(await send())
    finally:
        await listener.close()
    found = f"{source.replay_endpoint} has the events" if is_found else f"no answer from {source.replay_endpoint}"
    return judge("replay", found, (not is_found, "fail", "the port must be this engine's, on this machine"))
