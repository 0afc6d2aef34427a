"""Connect to a running engine and build the worker's engine over it.

A fleet promises one tokenizer. So the adapter and the engine tokenize some texts; if the ids differ, the adapter
refuses to start.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
from tokenizers import Tokenizer

from cache.records import WorkerMember, new_epoch, signed
from cache.types import WorkerId
from worker.adapter.api import EngineApi, EngineLostError, EngineModel, EngineRefusedError, EventSource
from worker.adapter.blocks import EngineBlocks
from worker.adapter.engine import AdapterEngine
from worker.adapter.groups import part_kind
from worker.adapter.health import EngineHealth, facts_of
from worker.adapter.http import socket_path
from worker.adapter.sglang import SglangApi
from worker.adapter.vllm import VllmApi
from worker.common.capabilities import CHAT, GENERATING, adapter_names
from worker.common.chat_probes import CHAT_PROBES, digests
from worker.common.command_line import read_text
from worker.common.sockets import in_url, is_loopback
from worker.common.tls import client_context
from worker.config import WorkerConfig
from worker.contracts.engine import EngineSinks
from worker.contracts.metrics import WorkerMetrics
from worker.files.generation_config import sampling_defaults
from worker.files.tokenizer_files import fields_of_folder, fingerprint, tokenizer_folder, vocab_size
from worker.wire import OLDEST_PROTOCOL, PROTOCOL_VERSION, EngineCall, SamplingDefaults, TokenizerBundle

PROBE_TEXTS: Final = (
    "Hello, world! The quick brown fox jumps over 13 lazy dogs.",
    "  Größe: naïve café, 日本語のテキスト, emoji 🙂🙃\n\tdef f(x):\n\t\treturn x ** 2  # 100_000\r\n",
)
REPEAT_S: Final = 8.0  # silence for longer looks like a hang
RETRY_S: Final = 1.0  # an engine takes minutes to start, and a question a second costs nothing
REMEMBERED_PER_BLOCK: Final = 4
"""Engine block hashes that are remembered after lost events, per block of its pool."""


async def connect(
    config: WorkerConfig,
    url: str,
    worker_id: str,
    metrics: WorkerMetrics,
    report: Callable[[str], None],
    sinks: EngineSinks | None = None,
) -> AdapterEngine:
    """Wait for the engine and build the adapter over it. Raises ValueError or OSError if it cannot be served."""
    api = open_api(config)
    try:
        while True:
            model = await wait_for_engine(api, config, report)
            load = await api.load()
            if config.engine_rank is None and len(load.ranks) > 1:
                found = ", ".join(map(str, load.ranks))
                raise ValueError(f"--engine-rank: this server has the ranks {found}: start an adapter for each")
            facts = facts_of(load, model)
            bundle, folder = await asyncio.to_thread(make_bundle, config, model, await api.sampling_defaults())
            await check_tokenizer(api, bundle)
            blocks = EngineBlocks(
                config.block_size,
                max_names=REMEMBERED_PER_BLOCK * max(1024, load.num_blocks),
                drops_last_block=await api.drops_last_block(),
                expected_parts=part_kind(folder),
            )
            member = await _member(api, config, bundle, model, url, worker_id)
            if facts_of(await api.load(), await api.model()) == facts:
                break
            report("the engine has restarted: its facts are read again")
        member = replace(member, engine_block_size=load.block_size)
        has_events = not (member.index_problem or GENERATING.isdisjoint(member.capabilities))
        source = await event_source(api, config) if has_events else None
        if has_events and source is None:
            fix = "start it with --kv-events-config, or give --events none to serve without a prefix index"
            raise ValueError(f"--events auto: the engine advertises no cache events; {fix}")
        events = "no cache events" if source is None else f"cache events from {source.endpoint}"
        report(f"{api.kind} {member.numerics}: {load.num_blocks} blocks of {load.block_size} tokens, {events}")
        if member.index_problem:
            report(f"no prefix index, requests are routed only by load: {member.index_problem}")
        with ExitStack() as stack:
            claim = stack.enter_context(await asyncio.to_thread(claim_engine, config))
            engine = AdapterEngine(
                api,
                blocks,
                source,
                bundle,
                signed(config.cluster_secret(), member),
                EngineHealth(facts, hang_s=config.hang_s, probe_s=config.probe_s),
                metrics,
                sinks or EngineSinks(),
                claim,
            )
            stack.pop_all()
        report("waiting for the first token of the engine, which may compile now")
        await engine.catch_up()
        return engine
    except BaseException as error:
        await api.close()
        if isinstance(error, (EngineLostError, EngineRefusedError)):
            raise OSError(f"--engine-url: {error}") from error
        raise


async def _member(
    api: EngineApi, config: WorkerConfig, bundle: TokenizerBundle, model: EngineModel, url: str, worker_id: str
) -> WorkerMember:
    """Return the registry entry, without its signature. Raises ValueError for an engine without text."""
    apis = await api.text_apis()
    if not apis:
        raise ValueError(f"--engine-url: this {api.kind} offers no API that renders prompts and writes answers")
    index_problem = ""
    if not GENERATING.isdisjoint(apis):
        index_problem = await api.index_problem() or ""
        if config.events == "none":
            index_problem = "the engine publishes no cache events (--events none)"
    may_have_dates = not bundle.chat_template or "strftime_now" in bundle.chat_template  # its ids change by the day
    return WorkerMember(
        worker_id=WorkerId(worker_id),
        epoch=new_epoch(),
        url=url,
        model=bundle.model,
        namespace=bundle.namespace.fingerprint,
        numerics=f"{api.kind}-{await api.version()}/{await api.precision() or 'unknown'}",
        block_size=config.block_size,
        max_model_len=bundle.max_model_len,
        protocol=PROTOCOL_VERSION,
        epoch_started_ms=time.time_ns() // 1_000_000,
        oldest_protocol=OLDEST_PROTOCOL,
        prefill_order="fifo",
        capabilities=(*apis, *adapter_names(model.loras)),
        chat_probes=await probe_digests(api) if CHAT in apis and not may_have_dates else (),
        index_problem=index_problem,
        aliases=model.aliases,
    )


async def probe_digests(api: EngineApi) -> tuple[tuple[str, str], ...]:
    """Return the digests of the engine's ids of `CHAT_PROBES`. Raises EngineLostError."""
    prompts: dict[str, list[tuple[int, ...] | None]] = {}
    for name, bodies in CHAT_PROBES.items():
        prompts[name] = []
        for body in bodies:
            try:
                prompts[name].append((await api.render(EngineCall(CHAT, msgspec.json.encode(body)))).prompts[0])
            except EngineRefusedError:
                prompts[name].append(None)
    return digests(prompts)


def open_api(config: WorkerConfig) -> EngineApi:
    """Return the API of the engine that the options name. Raises ValueError."""
    key = "" if config.engine_key_file is None else read_text("--engine-key-file", config.engine_key_file)
    tls = client_context("--engine-ca", config.engine_ca)
    api = SglangApi if config.engine == "sglang" else VllmApi
    return api(config.engine_url, key=key, rank=config.engine_rank, tls=tls)


def claim_engine(config: WorkerConfig) -> socket.socket:
    """Return a socket whose name locks the engine until it is closed. Raises ValueError if it is locked.

    Two adapters of one engine would count its free blocks twice. Names of abstract sockets belong to a network
    namespace, as loopback addresses do, and end with their process. Elsewhere than on Linux nothing is claimed.
    """
    url = urlsplit(config.engine_url)
    name: tuple[object, ...] = (os.path.realpath(socket_path(config.engine_url)),)
    if url.scheme != "unix":
        address, port = socket.getaddrinfo(url.hostname, url.port or url.scheme, type=socket.SOCK_STREAM)[0][4][:2]
        name = "loopback" if is_loopback(str(address)) else address, port
    claim = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":
            claim.bind(f"\0headstart-adapter {name!r} {config.engine_rank}")
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        message = f"--engine-url: another adapter on this machine serves {config.engine_url}, and an engine takes one"
        raise ValueError(message) from error
    return claim


async def wait_for_engine(api: EngineApi, config: WorkerConfig, report: Callable[[str], None]) -> EngineModel:
    """Return the model when the engine answers, which may take minutes."""
    reported, reported_s = "", 0.0
    while True:
        try:
            await api.version()  # raises where the API of tokens is missing
            return await api.model()
        except (EngineLostError, EngineRefusedError) as error:
            if isinstance(error, EngineRefusedError) and error.status in (401, 403):
                raise ValueError(f"--engine-key-file: {error}") from error
            why = f"waiting for the engine at {config.engine_url}: {error}"
        if why != reported or time.monotonic() - reported_s > REPEAT_S:
            report(why)
            reported, reported_s = why, time.monotonic()
        await asyncio.sleep(RETRY_S)


def make_bundle(
    config: WorkerConfig, model: EngineModel, defaults: SamplingDefaults | None = None
) -> tuple[TokenizerBundle, Path]:
    """Build the tokenizer bundle from --tokenizer, by default from the engine's own source.

    `defaults`: the engine's own sampling defaults, if known. Also return the folder of its files.
    """
    source = config.tokenizer or model.source or model.name
    folder, revision = tokenizer_folder(source, config.revision)
    fields = fields_of_folder(folder, allow_engine_vocabulary=True)
    if defaults is None or config.generation_config != "auto":
        defaults = sampling_defaults(config.generation_config, folder)
    bundle = TokenizerBundle(
        fingerprint=fingerprint(*fields.values()),
        model=config.served_model_name or model.name,
        revision=revision,
        vocab_size=vocab_size(folder, fields["tokenizer_json"]),
        max_model_len=min(model.max_model_len, config.max_model_len or model.max_model_len),
        block_size=config.block_size,
        sampling_defaults=defaults,
        template_kwargs=config.template_kwargs,
        **fields,
    )
    return bundle, folder


async def check_tokenizer(api: EngineApi, bundle: TokenizerBundle) -> None:
    """Raise ValueError if the engine's ids of a text differ from those of the bundle's tokenizer, if it has one."""
    if bundle.engine_vocabulary:
        return
    tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
    for text in PROBE_TEXTS:
        try:
            engine_ids = await api.tokenize(text)
        except EngineRefusedError as error:
            if error.status == 404:  # started without a tokenizer: nothing to compare
                return
            raise ValueError(f"--engine-url: {error}") from error
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if engine_ids != ids:
            first = next(at for at, pair in enumerate(zip_longest(engine_ids, ids)) if pair[0] != pair[1])
            raise ValueError(
                f"--tokenizer: the engine's token ids differ from those of this tokenizer from position {first} of a"
                f" probe text on; name the folder or Hugging Face id of the engine's own tokenizer"
            )


async def event_source(api: EngineApi, config: WorkerConfig) -> EventSource | None:
    """Return where the cache events come from; None for an engine that advertises none."""
    source = await api.event_source() if config.events == "auto" else EventSource(config.events, config.events_replay)
    if source is None:
        return None
    host = urlsplit(config.engine_url).hostname or "localhost"
    source = replace(source, is_exposed=config.events_exposed)
    return source if is_loopback(host) else replace(source, host=in_url(host))
