"""The adapter's engine over a scripted API: refusals, blocks, epochs, liveness and the watch."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import msgspec
import pytest

from cache.hashing import hash_chain
from cache.types import BlockHash
from tests.waiting import HANG_S, until
from tests.worker.adapter.rig import (
    BLOCK,
    ROOT,
    Rig,
    ScriptedApi,
    is_lost,
    make_request,
    running,
)
from worker.adapter import engine as engine_module
from worker.adapter.api import EngineLoad, EngineLostError, EngineRefusedError
from worker.adapter.kv_events import BlockRemoved, BlockStored, EventBatch
from worker.common.capabilities import adapters_in
from worker.contracts.engine import RefusedError
from worker.wire import End


async def test_refusals(api: ScriptedApi, rig: Rig) -> None:
    refusal = rig.engine.refusal
    assert refusal(make_request()) is None
    bare = refusal(msgspec.structs.replace(make_request(), call=None))
    assert bare is not None
    assert (bare.code, bare.retryable) == ("unsupported", True), "another worker may"
    messages = refusal(make_request(path="/v1/messages"))
    assert messages is not None
    assert "/v1/messages" in messages.message
    unknown = refusal(make_request(adapter="pirate"))
    assert unknown is not None
    assert "pirate" in unknown.message
    too_long = refusal(make_request(max_tokens=5000))
    assert too_long is not None
    assert too_long.code == "context_length_exceeded"
    rig.engine.load = msgspec.structs.replace(rig.engine.load, num_blocks=1)
    assert refusal(make_request(range(100, 200))) is None, "with context parallelism a block has more tokens"
    outside = refusal(make_request([99_999]))
    assert outside is not None
    assert "vocabulary" in outside.message


async def test_adapters_of_the_engine_are_listed_again(api: ScriptedApi, rig: Rig) -> None:
    api.loras = ("pirate",)
    await until(lambda: adapters_in(rig.engine.member.capabilities))
    assert adapters_in(rig.epochs[-1].capabilities) == ["pirate"]
    assert rig.engine.refusal(make_request(adapter="pirate")) is None
    api.loras = ()
    await until(lambda: not adapters_in(rig.engine.member.capabilities))
    assert rig.engine.refusal(make_request(adapter="pirate")) is not None


async def test_an_engine_that_is_gone_and_back(api: ScriptedApi, rig: Rig) -> None:
    """The same process counts again after a token, as after a fault of a network."""
    key, counts = rig.submit(make_request()), api.counts
    await api.call()
    api.counts = EngineLostError("closed", gone=True)
    await until(lambda: rig.load.draining)
    await until(lambda: rig.is_over(key))
    assert is_lost(rig.frames[key])
    assert rig.load.problem == "closed"
    assert "closed" in (await rig.engine.liveness() or "")
    refused = rig.engine.refusal(make_request())
    assert refused is not None
    assert (refused.code, refused.retryable) == ("not_ready", True)
    api.works.clear()
    api.counts = counts
    await until(lambda: rig.state == "starting")
    assert rig.load.draining, "it answers, and has generated no token"
    api.works.set()
    await until(lambda: not rig.load.draining)
    assert await rig.engine.liveness() is None


async def test_an_engine_that_is_slow_to_answer_is_not_lost(api: ScriptedApi, rig: Rig) -> None:
    """Its streams wait, and it comes back by an answer."""
    healthy, epoch = api.counts, rig.engine.member.epoch
    key = rig.submit(make_request())
    call = await api.call()
    api.works.clear()
    api.counts = EngineLostError("timeout")
    await until(lambda: rig.load.is_slow)
    await until(lambda: rig.load.draining)
    assert rig.state == "doubtful"
    api.counts = healthy
    await until(lambda: not rig.load.draining)
    api.works.set()
    call.end()
    await until(lambda: rig.is_over(key))
    assert isinstance(rig.frames[key][-1], End)
    assert rig.engine.member.epoch == epoch


@pytest.mark.parametrize(
    "change", [{"started_s": 2.0}, {"num_blocks": 255}, {"block_size": 32}, {"prefill_tokens": 5.0}], ids=str
)
async def test_another_process_ends_the_worker(
    api: ScriptedApi, rig: Rig, change: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    key = rig.submit(make_request())
    await api.call()
    counts = replace(api.counts, prefill_tokens=9.0)
    api.counts = counts
    await until(lambda: rig.engine._counts == counts)
    api.counts = replace(counts, **change)
    await until(lambda: rig.deaths)
    await until(lambda: rig.is_over(key))
    assert is_lost(rig.frames[key])
    assert rig.load.draining, "gateways send it nothing"
    assert rig.state == "replaced"
    api.counts = counts
    await asyncio.sleep(0.05)
    assert (rig.state, len(rig.deaths)) == ("replaced", 1)
    [critical] = [record.message for record in caplog.records if record.levelno == logging.CRITICAL]
    assert critical.startswith("the engine is replaced: another engine answers: ")


async def test_a_list_of_other_models_ends_the_worker(api: ScriptedApi, rig: Rig) -> None:
    api.model_name = "other"
    await until(lambda: rig.deaths)
    assert "'tiny'" in str(rig.deaths[0])
    assert "'other'" in str(rig.deaths[0])


async def test_traffic_round_the_gateway_is_said_loudly(
    api: ScriptedApi, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    key = rig.submit(make_request())
    call = await api.call()
    api.counts = EngineLoad(1.0, 1, 0, 256, 16, 0.0)  # its own
    asked = api.num_asked
    await until(lambda: api.num_asked > asked + 5)
    assert "bypass the gateway" not in caplog.text
    with caplog.at_level(logging.WARNING):
        api.counts = EngineLoad(1.0, 2, 3, 256, 16, 0.0)
        await until(lambda: "4 requests bypass the gateway" in caplog.text)
    assert (rig.load.num_running, rig.load.num_waiting) == (2, 3)
    asked = api.num_asked
    await until(lambda: api.num_asked > asked + 10)
    assert caplog.text.count("bypass the gateway") == 1, "once a minute"
    call.end()
    await until(lambda: rig.is_over(key))


async def test_inputs_of_one_call_bypass_nothing(
    api: ScriptedApi, brisk: None, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine counts each input of an embedding call."""
    rig = Rig(api)
    rig.engine.member = replace(rig.engine.member, capabilities=("/v1/embeddings",))
    api.counts = EngineLoad(1.0, 64, 0, 256, 16, 0.0)
    async with running(rig):
        await until(lambda: api.num_asked > engine_module.BYPASS_AFTER + 3)
    assert rig.engine.load.num_running == 64
    assert "bypass the gateway" not in caplog.text


async def test_waiting_tokens_are_a_metric(api: ScriptedApi, rig: Rig) -> None:
    """As of Headstart's engine: autoscalers ask for it."""

    def num_queued() -> float | None:
        return rig.metrics.registry.get_sample_value("headstart_worker_queued_tokens")

    keys = [rig.submit(make_request(range(100))) for _ in range(3)]
    await until(lambda: num_queued() == 200)
    for number in range(3):
        (await api.call(number)).end()
    await until(lambda: all(map(rig.is_over, keys)) and num_queued() == 0)


async def test_drain(api: ScriptedApi, rig: Rig) -> None:
    key = rig.submit(make_request())
    rig.engine.drain()
    assert rig.load.draining
    (await api.call()).end()
    await until(lambda: rig.is_over(key))
    assert isinstance(rig.frames[key][-1], End)


async def test_purge(api: ScriptedApi, rig: Rig) -> None:
    epoch = rig.engine.member.epoch
    assert await asyncio.wrap_future(rig.engine.purge()) == rig.engine.member.epoch != epoch
    assert api.num_resets == 1


@pytest.mark.parametrize("error", [EngineRefusedError(404, "no /reset_prefix_cache"), EngineLostError("no answer")])
async def test_a_refused_purge_changes_nothing(api: ScriptedApi, rig: Rig, error: Exception) -> None:
    """The engine still has its blocks, and does not report them again."""
    prompt_ids, salt = tuple(range(100, 100 + 3 * BLOCK)), ((ROOT.hex(),), None, None)
    rig.engine.hear("batch", EventBatch(1.0, (BlockStored((1, 2, 3), None, prompt_ids, BLOCK, "GPU", None, salt),)))
    epoch, api.reset_error = rig.engine.member.epoch, error
    with pytest.raises(RefusedError, match=r"reset_prefix_cache|no answer"):
        await asyncio.wrap_future(rig.engine.purge())
    assert rig.engine.member.epoch == epoch
    await until(lambda: rig.num_published(make_request(prompt_ids)) == 3 * BLOCK)


async def test_liveness(api: ScriptedApi, rig: Rig) -> None:
    assert await rig.engine.liveness() is None
    api.healthy = False
    assert await rig.engine.liveness() == "the engine reports that it is not healthy"
    api.healthy = True


async def test_a_paused_engine_is_neither_lost_nor_ready(api: ScriptedApi, rig: Rig) -> None:
    key = rig.submit(make_request())
    call = await api.call()
    for fields in ({}, {"sleeps": True}):
        counts, api.paused = api.counts, not fields
        api.counts = replace(counts, **fields)
        await until(lambda: rig.state == "paused")
        assert rig.load.draining
        assert rig.engine.not_ready_reason == "the engine is paused or sleeps"
        assert await rig.engine.liveness() is None
        api.works.clear()
        api.paused, api.counts = False, counts
        await until(lambda: rig.state == "starting")
        api.works.set()
        await until(lambda: not rig.load.draining)
    call.end()
    await until(lambda: rig.is_over(key))
    assert isinstance(rig.frames[key][-1], End), "it has waited"


async def test_an_unloaded_adapter_is_no_loss(api: ScriptedApi, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways ask another worker, and the next list of models comes at once."""
    api.loras = ("pirate",)
    await until(lambda: adapters_in(rig.engine.member.capabilities))
    monkeypatch.setattr(engine_module, "WATCH_S", HANG_S)
    asked = api.num_asked
    await until(lambda: api.num_asked > asked)
    key = rig.submit(make_request(adapter="pirate"))
    api.loras = ()
    (await api.call()).say(EngineRefusedError(404, "The model `pirate` does not exist."))
    await until(lambda: rig.is_over(key))
    assert rig.frames[key][-1].code == "not_ready"
    await until(lambda: not adapters_in(rig.engine.member.capabilities))


async def test_larger_blocks_of_events_than_the_reported_ones_count(api: ScriptedApi, rig: Rig) -> None:
    """Context parallelism makes them so. Smaller ones later change nothing."""
    await until(lambda: rig.engine._report_timer is None)
    for number, size in enumerate((2 * BLOCK, BLOCK), 1):
        stored = BlockStored((number,), None, tuple(range(size)), size, "GPU", None, ((ROOT.hex(),),))
        rig.engine.hear("batch", EventBatch(float(number), (stored,)))
        assert rig.engine.member.engine_block_size == 2 * BLOCK
        assert [member.engine_block_size for member in rig.epochs] == [2 * BLOCK]


async def test_a_model_with_windows_begins_an_epoch_with_ends(api: ScriptedApi, rig: Rig) -> None:
    """Its blocks are no prefix that the engine reuses at any length."""
    prompt_ids, salt = tuple(range(100, 100 + 3 * BLOCK)), ((ROOT.hex(),), None, None)
    window = BlockStored((3,), None, prompt_ids, BLOCK, "GPU", None, (None,), 0, "sliding_window", BLOCK)
    full = BlockStored((1, 2, 3), None, prompt_ids, BLOCK, "GPU", None, salt, 1, "full_attention")
    await until(lambda: rig.engine._report_timer is None)
    assert rig.engine.member.ends == ""
    rig.engine.hear("batch", EventBatch(1.0, (window, full)))
    assert (rig.engine.member.ends, rig.epochs[-1].ends) == ("exact", "exact")
    await until(lambda: rig.num_published(make_request(prompt_ids)) == 3 * BLOCK)
    rig.engine.hear("batch", EventBatch(2.0, (BlockRemoved((3,), "GPU", 0),)))
    chain = hash_chain(BlockHash(ROOT), prompt_ids, BLOCK)
    assert rig.engine._blocks.num_matched_tokens(chain, len(prompt_ids) + 1) == 0
    assert len(rig.epochs) == 1
