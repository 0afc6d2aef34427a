"""The engine thread: outputs, commands, async scheduling, events and load. Most tests run on both kinds of device."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from tests.block_events import replay
from tests.cache.held import cached_hashes
from tests.waiting import HANG_S, wait_until
from tests.worker.device_streams import ThreadedStream
from tests.worker.engine.threaded_engine import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    ThreadedEngine,
    running,
)
from tests.worker.scheduler.arithmetic_runner import answer
from tests.worker.scheduler.engine import ROOT, generate
from worker.contracts.engine import RequestKey
from worker.kernels.device import DeviceStream
from worker.wire import Failed, Started


def test_requests_from_many_threads_all_finish(threaded: ThreadedEngine) -> None:
    def submit_some(first: int) -> None:
        for i in range(first, first + 10):
            threaded.submit(i, generate([i % 50, 1, 2, 3, 4], 8))

    threads = [threading.Thread(target=submit_some, args=(10 * t,)) for t in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(60):
        assert threaded.wait(RequestKey(i)).tokens[0] == answer([i % 50, 1, 2, 3, 4], 100, 8)
    threaded.settle()
    assert threaded.allocator.num_free_blocks == NUM_BLOCKS - 1
    assert any(part.follows is not None for step in threaded.runner.steps for part in step.sequences) == (
        threaded.runner.overlaps
    )
    assert threaded.counted("requests_total") == 60
    assert threaded.counted("output_tokens_total") == 480


def test_offered_events_replay_to_the_held_blocks(threaded: ThreadedEngine) -> None:
    for i in range(40):  # more than the pool holds, so blocks are evicted too
        threaded.submit(i, generate([i, i + 1, *range(30)], 6))
    for i in range(40):
        threaded.wait(RequestKey(i))
    threaded.settle()
    assert threaded.allocator.stats().evictions > 0
    assert replay(threaded.publisher.events) == set(cached_hashes(threaded.allocator))


def test_started_is_sent_before_the_prefill_runs(threaded: ThreadedEngine) -> None:
    threaded.runner.gate.clear()
    key = threaded.submit(0, generate(range(10)))
    output = threaded.next()
    assert isinstance(output.frame, Started)
    assert (output.key, output.frame.num_cached_tokens) == (key, 0)
    assert output.frame.queue_s is not None
    threaded.runner.gate.set()
    threaded.wait(key)
    again = threaded.submit(1, generate(range(10)))
    output = threaded.next()
    assert isinstance(output.frame, Started)
    assert (output.key, output.frame.num_cached_tokens) == (again, 8)
    threaded.wait(again)


def test_started_is_sent_before_a_suspect_reaches_the_device(threaded: ThreadedEngine) -> None:
    num_sent: list[int] = []
    threaded.runner.fails = lambda step: num_sent.append(threaded.frames.qsize())
    threaded.submit(0, generate(range(10), 1, is_suspect=True))
    wait_until(lambda: num_sent)
    assert num_sent == [1]


def test_abort_during_a_step_takes_effect_after_it(blocking: ThreadedEngine) -> None:
    blocking.runner.gate.clear()
    key = blocking.submit(0, generate(range(10), 200))
    assert blocking.runner.entered.acquire(timeout=HANG_S)
    blocking.engine.abort(key)
    blocking.engine.abort(key)
    blocking.engine.abort(RequestKey(99))
    blocking.runner.gate.set()
    got = blocking.wait(key)
    assert got.finished[0].reason == "abort"
    assert len(got.tokens[0]) == 1
    blocking.settle()
    assert blocking.allocator.num_free_blocks == NUM_BLOCKS - 1


def test_commands_run_while_the_device_computes_a_step(overlapping: ThreadedEngine) -> None:
    overlapping.runner.gate.clear()
    aborted = overlapping.submit(0, generate(range(10), 200))
    assert overlapping.runner.entered.acquire(timeout=HANG_S)
    other = overlapping.submit(1, generate(range(20, 40), 5))
    overlapping.engine.abort(aborted)
    got = overlapping.wait(aborted)
    assert got.finished[0].reason == "abort"
    assert not got.tokens
    waiting = overlapping.engine.mailbox.call(
        lambda: [len(sequence.block_hashes) for sequence in overlapping.scheduler.waiting]
    )
    assert waiting.result(HANG_S) == [20 // BLOCK_SIZE]  # taken in, and hashed
    assert overlapping.allocator.num_free_blocks == NUM_BLOCKS - 1 - 3  # the step still writes them
    assert overlapping.engine.watchdog.started_s is not None
    overlapping.runner.gate.set()
    assert overlapping.wait(other).tokens[0] == answer(range(20, 40), 100, 5)
    overlapping.settle()
    assert overlapping.allocator.num_free_blocks == NUM_BLOCKS - 1
    assert overlapping.allocator.find([*range(10), 1], ROOT) == 8  # what the step has computed is kept


@pytest.mark.parametrize(("async_scheduling", "num_steps"), [(True, 2), (False, 1)])
def test_async_scheduling_launches_a_second_step(async_scheduling: bool, num_steps: int) -> None:
    stream = ThreadedStream()
    with running(stream, async_scheduling=async_scheduling) as engine:
        got = engine.wait(engine.submit(0, generate(range(20), 50)))
    stream.close()
    assert got.tokens[0] == answer(range(20), 100, 50)
    assert stream.max_in_flight == num_steps


def test_deadlines_expire_under_async_scheduling() -> None:
    stream = ThreadedStream()
    with running(stream, max_num_seqs=1) as engine:
        engine.runner.gate.clear()
        seated = engine.submit(0, generate(range(20), 300))
        assert engine.runner.entered.acquire(timeout=HANG_S)
        late = engine.submit(1, generate(range(30), 5, deadline_s=0.0))
        engine.run_commands()
        engine.runner.gate.set()
        assert engine.wait(late).last == Failed("deadline", "it waited too long", retryable=False)
        assert engine.answers[seated].last is None
        engine.wait(seated)
    stream.close()


def test_abort_of_a_choice_during_prefill_leaves_the_others(overlapping: ThreadedEngine) -> None:
    overlapping.runner.gate.clear()
    key = overlapping.submit(0, generate(range(10), 6, 3))
    assert overlapping.runner.entered.acquire(timeout=HANG_S)
    overlapping.engine.abort(key, 1)
    overlapping.run_commands()
    overlapping.runner.gate.set()
    got = overlapping.wait(key)
    assert {i: got.finished[i].reason for i in range(3)} == {0: "length", 1: "abort", 2: "length"}
    assert got.tokens == {i: answer(range(10), 100 + i, 6) for i in (0, 2)}


def test_purge_waits_for_the_step_in_flight(overlapping: ThreadedEngine) -> None:
    overlapping.runner.gate.clear()
    key = overlapping.submit(0, generate(range(10), 5))
    assert overlapping.runner.entered.acquire(timeout=HANG_S)
    purged = overlapping.engine.purge()
    assert not purged.done()
    overlapping.runner.gate.set()
    purged.result(HANG_S)
    assert overlapping.wait(key).tokens[0] == answer(range(10), 100, 5)


def test_no_step_is_in_flight_when_a_purge_empties_the_pool(
    overlapping: ThreadedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the engine goes on with steps after each command of the purge."""
    mailbox, scheduler, num_in_flight = overlapping.engine.mailbox, overlapping.scheduler, list[int]()
    put, preempt_all = mailbox.put, scheduler.preempt_all

    def put_and_wait(*command) -> None:
        put(*command)
        for _ in range(3):
            overlapping.next()

    def count_and_preempt() -> None:
        num_in_flight.append(len(overlapping.engine._in_flight))
        preempt_all()

    key = overlapping.submit(0, generate(range(10), 200))
    monkeypatch.setattr(mailbox, "put", put_and_wait)
    monkeypatch.setattr(scheduler, "preempt_all", count_and_preempt)
    overlapping.engine.purge().result(HANG_S)
    monkeypatch.undo()
    assert num_in_flight == [0]
    assert overlapping.wait(key).tokens[0] == answer(range(10), 100, 200)


def test_stop_waits_for_the_step_in_flight(overlapping: ThreadedEngine) -> None:
    overlapping.runner.gate.clear()
    overlapping.submit(0, generate(range(10), 5))
    assert overlapping.runner.entered.acquire(timeout=HANG_S)
    threading.Timer(0.05, overlapping.runner.gate.set).start()
    overlapping.engine.stop()
    assert not overlapping.engine._in_flight
    assert overlapping.runner.steps


def test_a_cancelled_call_is_skipped(blocking: ThreadedEngine) -> None:
    blocking.runner.gate.clear()
    key = blocking.submit(0, generate([1, 2, 3], 1))
    assert blocking.runner.entered.acquire(timeout=HANG_S)
    called: list[int] = []
    assert blocking.engine.mailbox.call(lambda: called.append(1)).cancel()
    blocking.runner.gate.set()
    blocking.wait(key)
    blocking.settle()
    assert not called
    assert blocking.deaths.empty()


def test_purge_under_load_begins_an_epoch_and_changes_no_token(threaded: ThreadedEngine) -> None:
    keys = [threaded.submit(i, generate([i, 2, 3, 4, 5], 60)) for i in range(4)]
    while len(threaded.answers[keys[0]].tokens.get(0, ())) < 5:
        threaded.next()
    epoch = threaded.engine.purge().result(HANG_S)
    assert epoch != "first"
    assert threaded.engine.member.epoch == epoch
    assert [member.epoch for member in threaded.publisher.members] == [epoch]
    for i, key in enumerate(keys):
        assert threaded.wait(key).tokens[0] == answer([i, 2, 3, 4, 5], 100, 60)
    threaded.settle()
    assert replay(threaded.publisher.events) == set(cached_hashes(threaded.allocator))


def test_the_load_has_queued_prefill_per_gateway(threaded: ThreadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.reporter.REPORT_INTERVAL_S", 0.0)
    threaded.runner.gate.clear()
    threaded.submit(0, generate([1] * 100, 2, gateway_id="a"))
    assert threaded.runner.entered.acquire(timeout=HANG_S)
    threaded.submit(1, generate([2] * 50, 2, gateway_id="b"))
    threaded.runner.gate.set()
    for key in (0, 1):
        threaded.wait(RequestKey(key))
    loads = threaded.publisher.loads
    threaded.settle()
    threaded.engine.drain()
    wait_until(lambda: loads[-1].draining)
    assert {gateway for load in loads for gateway in load.queued_prefill_s} == {"a", "b"}
    assert loads[-1].queued_prefill_s == {}
    assert loads[-1].assigned_prefill_s > 0.0
    assert loads[-1].prefill_tokens_per_s != loads[0].prefill_tokens_per_s
    assert loads[-1].num_free_blocks == loads[-1].num_blocks - 1


def test_an_idle_engine_has_reported_no_load(threaded: ThreadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It then waits for commands and reports nothing."""
    monkeypatch.setattr("worker.engine.reporter.REPORT_INTERVAL_S", 0.0)
    threaded.wait(threaded.submit(0, generate(range(8), 2)))  # its last step fills no block: that is no news
    assert any(load.num_running for load in threaded.publisher.loads)
    wait_until(lambda: not threaded.publisher.loads[-1].num_running)


def test_the_load_has_the_start_interval() -> None:
    with running(DeviceStream(torch.device("cpu")), max_num_seqs=1) as engine:
        engine.runner.gate.clear()
        keys = [engine.submit(i, generate([i, 2, 3], 3)) for i in range(4)]
        engine.runner.gate.set()
        for key in keys:
            engine.wait(key)
        engine.settle()
        assert engine.publisher.loads[-1].start_interval_s > 0.0


def test_the_load_is_reported_while_a_prefill_runs(overlapping: ThreadedEngine) -> None:
    overlapping.runner.gate.clear()
    overlapping.submit(0, generate([1] * 100, 2, gateway_id="a"))
    assert overlapping.runner.entered.acquire(timeout=HANG_S)
    overlapping.submit(1, generate([2] * 50, 2, gateway_id="b"))
    deadline_s = time.monotonic() + HANG_S
    while "b" not in overlapping.publisher.loads[-1].queued_prefill_s:
        assert time.monotonic() < deadline_s, "the load lacks a request that came during the step"
        overlapping.run_commands()


def test_long_lists_are_read_once_and_not_by_the_engine(threaded: ThreadedEngine) -> None:
    """Reading a million ids takes a quarter of a second, in which no other request would get a token."""
    wire = generate([1, 2, 3], 4, n=8, allowed_token_ids=tuple(range(50)) * 1000)
    prepared = asyncio.run(threaded.engine.prepare(wire))
    thread, _ = prepared.sampler_cache.value  # type: ignore[misc]
    assert thread != threaded.engine._thread.ident
    threaded.engine.submit(RequestKey(0), wire, prepared)
    threaded.wait(RequestKey(0))
    rows = [row for step in threaded.runner.steps for part in step.sequences for row in part.sampling_rows]
    assert len({row.seed for row in rows}) == 8
    assert all(row.request_cache is prepared.sampler_cache for row in rows)


def test_short_lists_wait_for_no_thread(threaded: ThreadedEngine) -> None:
    prepared = asyncio.run(threaded.engine.prepare(generate([1, 2, 3], 4, allowed_token_ids=(1, 2))))
    assert prepared.sampler_cache.value is None
