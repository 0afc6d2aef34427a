"""The warm start of an adapter: prompts of peers are computed before it registers, and never in a request's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cache.hashing import encode_tokens, hash_chain
from cache.records import WorkerLoad
from cache.redis_index import RegistryEntry
from cache.types import BlockHash, Epoch
from tests.running import listening as raw_listening
from tests.server.scripted_worker import listening
from tests.waiting import until
from tests.worker.adapter.rig import BLOCK, OTHER_ROOT, ROOT, Rig, ScriptedApi, fake_engine, make_request, running
from tests.worker.adapter.test_over_sglang import sglang
from worker.adapter.api import EngineApi, EngineLoad, EngineLostError, EngineRefusedError, EventSource
from worker.adapter.prompt_chains import PromptChains
from worker.adapter.sglang import SglangApi
from worker.adapter.vllm import VllmApi
from worker.common.proof import gateway_token
from worker.config import parse
from worker.contracts.exchange import ChainsWanted, OfferedChain
from worker.contracts.metrics import WorkerMetrics
from worker.http.app import make_app
from worker.http.service import WorkerService
from worker.kv_transfer.peers import ChainClient, FetchError
from worker.kv_transfer.warm_start import NUM_FETCHES, warm_start
from worker.main import Worker
from worker.wire import End, GenerateRequest

TOKEN = gateway_token(b"secret of the fleet")
PEERS = ChainClient(TOKEN)


def chain(first: int = 100, num_blocks: int = 6, *, root: bytes = ROOT, adapter: str = "") -> OfferedChain:
    ids = list(range(first, first + num_blocks * BLOCK))
    hashes = hash_chain(BlockHash(root), ids, BLOCK)
    return OfferedChain(root, b"".join(hashes), encode_tokens(ids), adapter)


def chains_of(rig: Rig) -> PromptChains:
    assert rig.engine.chains is not None
    return rig.engine.chains


def adopt(rig: Rig, offered: OfferedChain) -> asyncio.Task[int]:
    return asyncio.create_task(chains_of(rig).adopt("http://peer", "e1", offered))


@asynccontextmanager
async def serving(rig: Rig) -> AsyncIterator[RegistryEntry]:
    """The worker over a rig, as the registry has it."""
    service = WorkerService(WorkerMetrics())
    service._engine = rig.engine
    async with listening(make_app(service, TOKEN, url="http://w")) as url:
        yield entry_of(rig, url)


def entry_of(rig: Rig, url: str) -> RegistryEntry:
    return RegistryEntry(replace(rig.engine.member, url=url), WorkerLoad(), 10, {}, 0, 5.0, 0.0)


class Registry:
    """A publisher whose registry has these workers."""

    def __init__(self, *entries: RegistryEntry) -> None:
        self.entries = list(entries)
        self.upkeep = self

    async def wait_connected(self, timeout_s: float) -> bool:
        return True

    async def workers(self) -> list[RegistryEntry]:
        return self.entries


async def join(rig: Rig, *entries: RegistryEntry, time_s: float = 30.0) -> None:
    """Do what a worker does before the registry names it."""
    worker = Worker(parse(["--warm-start-s", str(time_s)]))
    await worker._join(rig.engine, Registry(*entries))  # type: ignore[arg-type]


# --- over a scripted engine ----------------------------------------------------------------------------------------


@pytest.fixture
async def joiner(api: ScriptedApi) -> AsyncIterator[Rig]:
    async with running(Rig(api, peers=PEERS, name="joiner")) as rig:
        await until(lambda: rig.engine.chains is not None and rig.engine.chains.num_blocks)
        yield rig
        await until(rig.is_idle)
        assert not api.open_calls
        assert rig.engine._account.num_open == 0


async def test_a_prompt_is_one_token_under_its_salt(joiner: Rig, api: ScriptedApi) -> None:
    api.loras = ("pirate",)
    joiner.engine.member = replace(joiner.engine.member, adapters=("pirate",))
    adopted = adopt(joiner, chain(root=OTHER_ROOT, adapter="pirate"))
    call = await api.call()
    assert (call.request.root, call.request.adapter) == (OTHER_ROOT, "pirate")
    assert call.request.prompt_ids == list(range(100, 196))
    assert call.request.sampling.max_tokens == 1
    call.end()
    assert await adopted == 6
    assert not joiner.frames, "no client gets it"


@pytest.mark.parametrize(
    "offered",
    [
        chain(adapter="unloaded"),
        chain(num_blocks=256),
        chain(first=31_990),
        chain(num_blocks=129),
        OfferedChain(ROOT, b"x" * 16, b"abc"),
        OfferedChain(ROOT, b"x" * 16),
    ],
    ids=["unloaded", "context", "vocabulary", "half of the pool", "no tokens", "none"],
)
async def test_prompts_that_are_left_out(joiner: Rig, api: ScriptedApi, offered: OfferedChain) -> None:
    assert await adopt(joiner, offered) == 0
    assert api.calls == []


@pytest.mark.parametrize("error", [EngineLostError("gone"), EngineRefusedError(400, "no"), RuntimeError("?")])
async def test_an_engine_that_fails_starts_cold(joiner: Rig, api: ScriptedApi, error: Exception) -> None:
    adopted = adopt(joiner, chain())
    (await api.call()).say(error)
    assert await adopted == 0


async def test_the_engines_other_requests_come_first(joiner: Rig, api: ScriptedApi) -> None:
    """Those that bypass this worker, too."""
    api.counts = EngineLoad(1.0, 1, 0, 256, BLOCK, 0.0)
    adopted, num_asked = adopt(joiner, chain()), api.num_asked
    await until(lambda: api.num_asked > num_asked + 2)
    assert api.calls == []
    api.counts = EngineLoad(1.0, 0, 0, 256, BLOCK, 0.0)
    (await api.call()).end()
    assert await adopted == 6


async def test_a_request_ends_the_prefills(joiner: Rig, api: ScriptedApi) -> None:
    adopted = [adopt(joiner, chain()), adopt(joiner, chain(3000))]
    await api.call(1)
    key = joiner.submit(make_request())
    (await api.call(2)).end()
    await until(lambda: joiner.is_over(key))
    assert all(each.cancelled() for each in await asyncio.wait(adopted) and adopted)
    assert isinstance(joiner.frames[key][-1], End)
    assert [call.is_open for call in api.calls] == [False] * 3


async def test_a_request_while_it_joins(joiner: Rig, api: ScriptedApi) -> None:
    """The prompt that it meets is left out. The next one waits until the request is over."""
    peer = Rig(ScriptedApi(), peers=PEERS)
    for number in range(NUM_FETCHES + 1):
        note(peer, make_request(range(1000 * number, 1000 * number + 100)))
    async with serving(peer) as entry:
        joining = asyncio.create_task(join(joiner, entry))
        await api.call(NUM_FETCHES - 1)
        key, num_asked = joiner.submit(make_request()), api.num_asked
        own = await api.call(NUM_FETCHES)
        await until(lambda: api.num_asked > num_asked + 2)
        assert api.open_calls == [own]
        own.end()
        await until(lambda: joiner.is_over(key))
        (await api.call(NUM_FETCHES + 1)).end()
        await joining
    assert [call.request.prompt_ids[0] for call in api.calls] == [2000, 1000, 100, 0]
    await peer.engine.close()


async def test_the_time_ends_the_prefills(joiner: Rig, api: ScriptedApi) -> None:
    """The engine answers none, so only those begin that come at a time."""
    peer = Rig(ScriptedApi(), peers=PEERS)
    for number in range(10):
        note(peer, make_request(range(1000 * number, 1000 * number + 100)))
    async with serving(peer) as entry:
        await join(joiner, entry, time_s=2.0)
    assert len(api.calls) == NUM_FETCHES
    await until(lambda: not api.open_calls)
    await peer.engine.close()


def note(rig: Rig, request: GenerateRequest) -> None:
    chains_of(rig).prompts.note(request, hash_chain(BlockHash(request.root), request.prompt_ids, BLOCK))


async def test_half_of_the_pool_at_most(joiner: Rig, api: ScriptedApi) -> None:
    peer = Rig(ScriptedApi(), peers=PEERS)
    for number in range(30):
        note(peer, make_request(range(1000 * number, 1000 * number + 10 * BLOCK)))
    done = asyncio.create_task(answer_all(api))
    async with serving(peer) as entry:
        await join(joiner, entry)
    done.cancel()
    assert len(api.calls) == 12, "120 of 256 blocks: the next chain would take more than half"
    assert api.calls[0].request.prompt_ids[0] == 29_000, "the latest first"
    await peer.engine.close()


async def answer_all(api: ScriptedApi) -> None:
    number = 0
    while True:
        (await api.call(number)).end()
        number += 1


async def test_only_a_computed_prompt_is_offered(api: ScriptedApi, joiner: Rig) -> None:
    refused, left = joiner.submit(make_request(range(100, 200))), joiner.submit(make_request(range(200, 300)))
    (await api.call(0)).say(EngineRefusedError(400, "no"))
    await api.call(1)
    joiner.engine.abort(left)
    await until(lambda: joiner.is_over(refused) and joiner.is_over(left))
    assert await chains_of(joiner).latest_chains(100) == []
    streams = joiner.submit(make_request(range(300, 400)))
    (await api.call(2)).token()
    await until(lambda: len(joiner.frames[streams]) > 1)
    [offered] = await chains_of(joiner).latest_chains(100)
    assert offered == chain(300)
    api.calls[2].end()


@pytest.mark.parametrize("how", ["purge", "restart", "loras"])
async def test_an_emptied_cache_forgets_its_prompts(api: ScriptedApi, joiner: Rig, brisk: None, how: str) -> None:
    """A prompt that ended the engine is not given to others. New LoRA adapters empty nothing."""
    key, epoch = joiner.submit(make_request()), joiner.engine.member.epoch
    (await api.call()).end()
    await until(lambda: joiner.is_over(key))
    if how == "purge":
        await asyncio.wrap_future(joiner.engine.purge())
    elif how == "restart":
        api.counts = EngineLoad(2.0, 0, 0, 256, BLOCK, 0.0)
    else:
        api.loras = ("pirate",)
    await until(lambda: joiner.engine.member.epoch != epoch)
    assert len(await chains_of(joiner).latest_chains(100)) == (1 if how == "loras" else 0)


async def test_an_engine_that_cannot_be_emptied_joins(joiner: Rig, api: ScriptedApi) -> None:
    """A peer was purged in the meantime: what was computed leaves the index, at least."""
    api.reset_error = EngineRefusedError(404, "no /reset_prefix_cache")
    peer = Rig(ScriptedApi(), peers=PEERS)
    note(peer, make_request())
    done, epoch = asyncio.create_task(answer_all(api)), joiner.engine.member.epoch
    async with serving(peer) as entry:

        class Purged(Registry):
            async def workers(self) -> list[RegistryEntry]:
                found = self.entries
                self.entries = [replace(entry, member=replace(entry.member, epoch=Epoch("e9")))]
                return found

        await Worker(parse(["--warm-start-s", "30"]))._join(joiner.engine, Purged(entry))  # type: ignore[arg-type]
    done.cancel()
    assert len(api.calls) == 1
    assert api.num_resets == 1
    assert joiner.engine.member.epoch != epoch
    await peer.engine.close()


# --- peers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"namespace": "other"}, {"layout": "blocks"}, {"worker_id": "joiner"}])
async def test_workers_that_are_no_peers(joiner: Rig, api: ScriptedApi, change: dict[str, str]) -> None:
    peer = Rig(ScriptedApi(), peers=PEERS)
    note(peer, make_request())
    async with serving(peer) as entry:
        await join(joiner, replace(entry, member=replace(entry.member, **change)))  # type: ignore[arg-type]
    assert api.calls == []
    await peer.engine.close()


async def test_a_worker_without_chains_answers_with_a_refusal() -> None:
    peer, wanted = Rig(ScriptedApi()), ChainsWanted("e0", "n", 100)
    async with serving(peer) as entry:
        with pytest.raises(FetchError, match="409"):
            await asyncio.to_thread(PEERS.ask_chains, entry.member.url, wanted, 30.0)
    await peer.engine.close()


@pytest.mark.parametrize("client", [ChainClient(gateway_token(b"another fleet")), ChainClient("")])
async def test_prompts_go_to_members_of_the_fleet_only(client: ChainClient) -> None:
    peer, wanted = Rig(ScriptedApi(), peers=PEERS), ChainsWanted("e0", "n", 100)
    note(peer, make_request())
    async with serving(peer) as entry:
        with pytest.raises(FetchError, match="401"):
            await asyncio.to_thread(client.ask_chains, entry.member.url, wanted, 30.0)
        found = await asyncio.to_thread(PEERS.ask_chains, entry.member.url, wanted, 30.0)
        assert found.chains == (chain(),)
    await peer.engine.close()


async def test_a_peer_that_dies_costs_nothing(joiner: Rig, api: ScriptedApi) -> None:
    """One has gone, one dies in mid-answer, one lives: its prompt is computed."""

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10000\r\n\r\nhalf")
        await writer.drain()

    peer = Rig(ScriptedApi(), peers=PEERS)
    note(peer, make_request())
    done = asyncio.create_task(answer_all(api))
    async with serving(peer) as entry, raw_listening(die) as port:
        dead = [entry_of(peer, f"http://127.0.0.1:{number}") for number in (1, port)]
        await join(joiner, *dead, entry)
    done.cancel()
    assert [call.request.prompt_ids for call in api.calls] == [list(range(100, 196))]
    await peer.engine.close()


# --- over both fake engines ----------------------------------------------------------------------------------------

Build = Callable[[str], tuple[EngineApi, EventSource | None]]


@asynccontextmanager
async def vllm_rig(folder: Path, name: str) -> AsyncIterator[tuple[Rig, Callable[[], int]]]:
    """A rig over a fake vLLM, and its count of prompts so far that found nothing."""
    async with fake_engine(folder, "--lora", "pirate", "--token-s", "0", "--block-size", "16") as (fake, url):
        api = VllmApi(url)
        await api.version()
        async with running(Rig(api, await api.event_source(), PEERS, name)) as rig:
            await until(lambda: rig.load.num_blocks and rig.engine.member.adapters)
            yield rig, lambda: len(fake.ranks[0].pool.copies)
            await until(rig.is_idle)


@asynccontextmanager
async def sglang_rig(folder: Path, name: str) -> AsyncIterator[tuple[Rig, Callable[[], int]]]:
    async with sglang(folder, "--lora", "pirate") as (fake, url):
        api = SglangApi(url)
        async with running(Rig(api, await api.event_source(), PEERS, name)) as rig:
            await until(lambda: rig.load.num_blocks and rig.engine.member.adapters)
            yield rig, lambda: len(fake.cache.pages)
            await until(rig.is_idle)


@pytest.mark.parametrize("make", [vllm_rig, sglang_rig])
async def test_it_joins_with_the_prompts_of_its_peer(
    engine_folder: Path, brisk: None, make: Callable[[Path, str], AsyncIterator[tuple[Rig, Callable[[], int]]]]
) -> None:
    folders = [engine_folder / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir(0o700)
        for name in ("tokenizer.json", "config.json"):
            (folder / name).write_bytes((engine_folder / name).read_bytes())
    requests = [
        make_request(range(100, 300)),
        make_request(range(100, 300), root=OTHER_ROOT),
        make_request(range(3000, 3200), root=b"tenant-number-3.", adapter="pirate"),
    ]
    async with AsyncExitStack() as stack:
        peer, _ = await stack.enter_async_context(make(folders[0], "peer"))  # type: ignore[arg-type]
        joiner, num_held = await stack.enter_async_context(make(folders[1], "joiner"))  # type: ignore[arg-type]
        for request in requests:
            await peer.answer(request)
        entry = await stack.enter_async_context(serving(peer))
        assert num_held() == 0
        await join(joiner, entry)
        assert num_held() == 36, "12 blocks each, before the registry names the worker"
        remembered = [set(await chains_of(rig).latest_chains(100)) for rig in (joiner, peer)]
        assert remembered[0] == remembered[1], "for the next worker that joins"
        await until(lambda: all(joiner.num_published(request) == 192 for request in requests))
        for request in requests:
            frames = await joiner.answer(request)
            assert frames[0].num_cached_tokens == frames[-1].num_cached_tokens == 192
        stranger = await joiner.answer(make_request(range(100, 300), root=b"tenant-number-4."))
        assert stranger[-1].num_cached_tokens == 0, "every prompt has the salt of its tenant"
        assert (await warm_start(joiner.engine.member, chains_of(joiner), [entry], 30.0)).total() == 0, "it has them"
