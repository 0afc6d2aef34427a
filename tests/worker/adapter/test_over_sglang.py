"""The adapter over the fake SGLang, on real sockets, as `connect` builds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cache.hashing import hash_chain
from cache.types import BlockHash
from tests.fake_engine.sglang import FakeSglang, parse
from tests.server.scripted_worker import listening
from tests.waiting import until
from tests.worker.adapter import rig as rig_module
from tests.worker.adapter.rig import BLOCK, ROOT, Rig, running, token_ids
from worker.adapter.api import EnginePart
from worker.adapter.connect import connect
from worker.adapter.health import facts_of
from worker.adapter.sglang import SglangApi, chat_body
from worker.adapter.text import CHAT
from worker.common.capabilities import adapters_in
from worker.config import WorkerConfig
from worker.contracts.metrics import WorkerMetrics
from worker.wire import EngineCall, GenerateRequest


def make_request(prompt_ids: Sequence[int], **fields: Any) -> GenerateRequest:
    """Return a chat whose answer has its token ids, which SGLang's streams lack."""
    messages = [{"role": "user", "content": "Hi"}]
    return rig_module.make_request(prompt_ids, path=CHAT, streams=False, messages=messages, **fields)


@asynccontextmanager
async def sglang(folder: Path, *options: str) -> AsyncIterator[tuple[FakeSglang, str]]:
    sockets = ["--events", f"ipc://{folder}/events", "--replay", f"ipc://{folder}/replay"]
    fake = FakeSglang(parse([str(folder), "--port", "0", "--token-s", "0", *sockets, *options]))
    try:
        async with listening(fake.app) as url:
            yield fake, url
    finally:
        fake.close()


@asynccontextmanager
async def rig_over(url: str) -> AsyncIterator[Rig]:
    api = SglangApi(url)
    rig = Rig(api, await api.event_source(), facts_of(await api.load(), await api.model()))
    async with running(rig):
        await until(lambda: rig.load.num_blocks)
        yield rig
        await until(rig.is_idle)


async def test_an_unloaded_adapters_blocks_are_forgotten(engine_folder: Path, brisk: None) -> None:
    async with sglang(engine_folder, "--lora", "pirate") as (fake, url), rig_over(url) as rig:
        await until(lambda: adapters_in(rig.engine.member.capabilities))
        adapted, plain = make_request(range(100, 200), adapter="pirate"), make_request(range(100, 200), root=b"o" * 16)
        await rig.answer(adapted)
        await rig.answer(plain)
        await until(lambda: rig.num_published(adapted) == rig.num_published(plain) == 96)
        fake.lora_ids = {}
        await until(lambda: not adapters_in(rig.engine.member.capabilities))
        fake.lora_ids = {"pirate": "2" * 32}
        await until(lambda: adapters_in(rig.engine.member.capabilities))
        assert (await rig.answer(plain))[-1].num_cached_tokens == 96
        rig.published |= {e.block_hash for e in rig.engine._blocks.visible_events()}
        assert rig.num_published(adapted) == 0
        assert rig.num_published(plain) == 96
        assert (await rig.answer(adapted))[-1].num_cached_tokens == 0


def num_matched(rig: Rig, prompt: list[int]) -> int:
    return rig.engine._blocks.num_matched_tokens(hash_chain(BlockHash(ROOT), prompt, BLOCK), len(prompt))


@pytest.mark.parametrize(("options", "ends"), [((), ""), (("--eagle",), "exact")])
async def test_turns_and_a_flush(engine_folder: Path, brisk: None, options: tuple[str, ...], ends: str) -> None:
    async with sglang(engine_folder, *options) as (_, url), rig_over(url) as rig:
        prompt = list(range(100, 200))
        for _ in range(3):
            promised = num_matched(rig, prompt)
            frames = await rig.answer(make_request(prompt, max_tokens=20))
            assert promised <= frames[-1].num_cached_tokens
            prompt += [*token_ids(frames), 1, 2, 3]
            least = (len(prompt) - 4) // 16 * 16 - 16
            await until(lambda: num_matched(rig, prompt) >= least)  # noqa: B023
        assert rig.engine.member.ends == ends
        epoch = rig.engine.member.epoch
        await asyncio.wrap_future(rig.engine.purge())
        assert rig.engine.member.epoch != epoch
        assert (await rig.answer(make_request(prompt)))[-1].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--version", "0.5.18", "--layout", "arrays", "--old-paths"), "carry no salt"),
        (("--windows",), "windows or states"),
        ((), ""),
    ],
)
async def test_what_is_registered(engine_folder: Path, options: tuple[str, ...], problem: str) -> None:
    (engine_folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0].content }}!"}')
    reports: list[str] = []
    async with sglang(engine_folder, *options) as (_, url):
        config = WorkerConfig(engine="sglang", engine_url=url)
        engine = await connect(config, "http://w", "w", WorkerMetrics(), reports.append)
        assert problem in engine.member.index_problem
        assert bool(engine.member.index_problem) is bool(problem)
        assert (engine.index_problem or "") == engine.member.index_problem
        said = [line for line in reports if line.startswith("no prefix index")]
        assert len(said) == bool(problem)
        await engine.close()


def chat(streams: bool = False, **fields: object) -> GenerateRequest:
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4} | fields)
    request = make_request((5, 6, 7), adapter="pirate")
    return msgspec.structs.replace(request, call=EngineCall(CHAT, body, streams))


async def test_chats_by_ready_ids(engine_folder: Path) -> None:
    (engine_folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0].content }}!"}')
    async with sglang(engine_folder, "--lora", "pirate") as (fake, url):
        api = SglangApi(url)
        assert await api.text_apis() == (CHAT,)
        request = chat()
        assert request.call is not None
        rendered = await api.render(request.call)
        assert rendered.prompts == (tuple(await api.tokenize("Hi!")),)
        assert rendered.max_tokens == (4,)
        unlimited = await api.render(EngineCall(CHAT, b'{"messages": [{"content": "Hi"}], "max_tokens": null}'))
        assert unlimited.max_tokens == (4096 - 3,)
        parts = list[EnginePart]()
        await api.generate(request, "r1", lambda data, part: parts.append(part))
        [whole] = parts
        [choice] = whole.choices
        assert (len(choice.token_ids or ()), choice.finish_reason, whole.num_cached_tokens) == (4, "length", 0)
        body = fake.bodies[-1]
        assert body["input_ids"] == [5, 6, 7]
        assert (body["cache_salt"], body["lora_path"], body["rid"]) == (ROOT.hex(), "pirate", "r1")
        parts.clear()
        request = chat(streams=True, stream=True, return_token_ids=True)
        await api.generate(request, "r2", lambda data, part: parts.append(part))
        assert not any(choice.token_ids for part in parts for choice in part.choices), "SGLang gives none in streams"
        assert parts[-1].num_cached_tokens == 0
        await api.close()


def test_the_rest_of_a_chat() -> None:
    choices = make_request((5,), output_ids=(8,)).choices
    request = chat(priority=3, model="a:b", temperature=0.5, min_tokens=3)
    body = chat_body(msgspec.structs.replace(request, choices=choices), "r", 2)
    assert body["input_ids"] == [5, 6, 7, 8]
    assert (body["max_completion_tokens"], body["min_tokens"], body["data_parallel_rank"]) == (7, 2, 2)
    assert not {"priority", "model", "max_tokens"}.intersection(body)
    assert bytes(body["temperature"]) == b"0.5"
