"""The engine thread when a step fails, a device dies or hangs, and calls come too late."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any

import pytest

from tests.cache.held import cached_hashes
from tests.waiting import HANG_S, wait_until
from tests.worker.engine.threaded_engine import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    ThreadedEngine,
)
from tests.worker.scheduler.arithmetic_runner import answer
from tests.worker.scheduler.engine import ROOT, generate
from worker.contracts.engine import EngineDeadError, EngineOutput, RequestKey
from worker.contracts.step import Step
from worker.wire import End, Failed, Started


def test_blocks_of_a_failed_step_cannot_be_found(overlapping: ThreadedEngine) -> None:
    overlapping.runner.fails = lambda step: any(49 in sequence.token_ids for sequence in step.sequences)
    overlapping.runner.gate.clear()
    bad = overlapping.submit(0, generate([49, *range(20)], 5))
    assert overlapping.runner.entered.acquire(timeout=HANG_S)
    overlapping.run_commands()  # launched without an error, which comes when it is collected
    overlapping.runner.gate.set()
    assert isinstance(overlapping.wait(bad).last, Failed)
    overlapping.settle()
    assert overlapping.allocator.find([49, *range(20)], ROOT) == 0
    assert overlapping.allocator.num_free_blocks == NUM_BLOCKS - 1


def test_a_step_launched_behind_a_failed_one_is_discarded(overlapping: ThreadedEngine) -> None:
    overlapping.runner.fails = lambda step: len(overlapping.runner.steps) == 6
    keys = [overlapping.submit(i, generate([i, *range(9)], 20)) for i in range(2)]
    for i, key in enumerate(keys):
        assert overlapping.wait(key).tokens[0] == answer([i, *range(9)], 100, 20)
    assert overlapping.counted("step_failures_total", kind="decode") == 1
    overlapping.settle()
    assert overlapping.allocator.num_free_blocks == NUM_BLOCKS - 1


def test_only_the_request_that_breaks_a_step_fails(threaded: ThreadedEngine) -> None:
    threaded.runner.fails = lambda step: any(49 in sequence.token_ids[:1] for sequence in step.sequences)
    threaded.runner.gate.clear()
    good = [threaded.submit(i, generate([i, 2, 3], 1)) for i in range(5)]
    bad = threaded.submit(5, generate([49, 2, 3], 1))
    threaded.runner.gate.set()
    assert threaded.wait(bad).last == Failed("internal_error", "the request cannot be computed", retryable=False)
    for i, key in enumerate(good):
        assert threaded.wait(key).tokens[0] == answer([i, 2, 3], 100, 1)
    assert threaded.counted("step_failures_total", kind="prefill") >= 1
    assert threaded.counted("request_failures_total", cause="internal_error") == 1
    assert threaded.deaths.empty()


def test_tensors_of_a_failed_step_are_freed_before_the_retry(threaded: ThreadedEngine) -> None:
    """A device too small for a step runs its requests one by one. The error must not keep the tensors."""

    class Activations:
        pass

    held: list[weakref.ref[Activations]] = []
    num_alive: list[int] = []

    def runs_out_of_memory(step: Step) -> bool:
        num_alive.append(sum(each() is not None for each in held))
        activations = Activations()
        held.append(weakref.ref(activations))
        if len(step.sequences) > 1 or len(held) == 3:
            raise MemoryError
        return False

    threaded.runner.fails = runs_out_of_memory
    threaded.runner.gate.clear()
    keys = [threaded.submit(i, generate([i, 2, 3], 1)) for i in range(4)]
    threaded.runner.gate.set()
    failed = [threaded.wait(key).last for key in keys]
    assert sum(isinstance(last, Failed) for last in failed) <= 1
    assert len(num_alive) >= 4
    assert set(num_alive) == {0}


def test_a_broken_device_ends_the_engine(threaded: ThreadedEngine) -> None:
    threaded.runner.fails = lambda step: True
    threaded.runner.gate.clear()
    threaded.submit(0, generate([1, 2, 3]))
    threaded.runner.gate.set()
    assert "does not compute" in str(threaded.deaths.get(timeout=HANG_S))
    assert "died" in (asyncio.run(threaded.engine.liveness()) or "")


@pytest.mark.parametrize("num_newcomers", [1, 2])
def test_the_only_prefill_of_a_fatal_step_is_poisonous(threaded: ThreadedEngine, num_newcomers: int) -> None:
    """No other worker then computes it. A request that has had a token is not to blame."""
    broken: list[Step] = []

    def fails(step: Step) -> bool:
        if len(threaded.runner.steps) == 3:
            threaded.runner.gate.clear()
        if len(step.sequences) > 1 or broken:
            broken.append(step)
        return bool(broken)

    threaded.runner.fails = fails
    old = threaded.submit(0, generate(range(10), 400))
    for _ in range(4):
        assert threaded.runner.entered.acquire(timeout=HANG_S)
    newcomers = [RequestKey(i) for i in range(1, 1 + num_newcomers)]
    threaded.engine.mailbox.call(lambda: [threaded.submit(i, generate([i, 2, 3])) for i in newcomers])  # as one command
    threaded.runner.gate.set()
    assert "does not compute" in str(threaded.deaths.get(timeout=HANG_S))
    while not threaded.frames.empty():
        threaded.next()
    lasts = [threaded.answers[key].last for key in (old, *newcomers)]
    if num_newcomers == 1:
        assert lasts == [None, Failed("poisonous", "the request has broken the device", retryable=False)]
    else:
        assert lasts == [None] * 3


def test_results_of_a_retry_are_sent_before_the_next_retry(threaded: ThreadedEngine) -> None:
    num_sent: list[int] = []

    def fails(step: Step) -> bool:
        num_sent.append(threaded.frames.qsize())
        return len(step.sequences) > 1

    threaded.runner.gate.clear()
    blocker = threaded.submit(0, generate([9, 2, 3], 1))
    assert threaded.runner.entered.acquire(timeout=HANG_S)
    for i in range(1, 3):
        threaded.submit(i, generate([i, 2, 3], 1))
    threaded.runner.fails = fails
    threaded.runner.gate.set()
    wait_until(lambda: len(num_sent) == 4)  # the blocker, the two together, and each of them
    assert num_sent[3] >= num_sent[2] + 3, "its token, its end, and the end of all"
    threaded.wait(blocker)


def test_buffered_outputs_are_sent_before_the_engine_dies(blocking: ThreadedEngine) -> None:
    output = EngineOutput(RequestKey(7), Started(0))

    def break_down() -> None:
        blocking.engine._outputs.put([output])
        raise ZeroDivisionError

    blocking.engine.mailbox.put(break_down)
    assert isinstance(blocking.deaths.get(timeout=HANG_S), ZeroDivisionError)
    assert blocking.frames.get(timeout=HANG_S) == output


@pytest.mark.parametrize("ends", ["dies", "stops"])
def test_calls_to_an_engine_that_has_ended_fail_at_once(threaded: ThreadedEngine, ends: str) -> None:
    engine, blocked = threaded.engine, threading.Event()

    def break_down() -> None:
        assert blocked.wait(HANG_S)
        if ends == "dies":
            raise ZeroDivisionError

    def ask(key: int) -> list[Future[Any]]:
        threaded.submit(key, generate([1, 2, 3]))
        engine.abort(RequestKey(key))
        engine.drain()
        failed = Failed("draining", "the worker stops", retryable=True)
        return [engine.mailbox.call(lambda: None), engine.purge(), engine.fail_all(failed), engine.probe()]

    engine.mailbox.put(break_down)
    if ends == "stops":
        engine._stopping = True
    before = ask(0) if ends == "dies" else []  # behind what ends it; what came before a stop is still done
    blocked.set()
    engine._thread.join(HANG_S)
    given_up = engine.mailbox.call(lambda: None)
    assert not given_up.cancel()  # it has ended
    for future in before + ask(1):
        with pytest.raises(EngineDeadError, match=r"the engine (died|has stopped)"):
            future.result(HANG_S)
    for key in (0, 1) if ends == "dies" else (1,):
        last = threaded.wait(RequestKey(key)).last
        assert isinstance(last, Failed)
        assert (last.code, last.retryable) == ("worker_lost", True)


def test_a_call_that_waits_for_a_broken_step_fails(overlapping: ThreadedEngine) -> None:
    """The command has left the mailbox, and processes the step first."""
    overlapping.runner.fails = lambda step: True
    overlapping.runner.gate.clear()
    overlapping.submit(0, generate(range(10), 5))
    assert overlapping.runner.entered.acquire(timeout=HANG_S)
    purged = overlapping.engine.purge()
    overlapping.runner.gate.set()
    with pytest.raises(EngineDeadError, match="does not compute"):
        purged.result(HANG_S)
    assert overlapping.deaths.get(timeout=HANG_S)


def test_queued_steps_are_timed_without_overlap(overlapping: ThreadedEngine) -> None:
    overlapping.runner.fails = lambda step: time.sleep(0.005)
    begun_s = time.monotonic()
    overlapping.wait(overlapping.submit(0, generate([1, 2, 3], 20)))
    overlapping.settle()
    elapsed_s = time.monotonic() - begun_s
    assert overlapping.runner.steps[9].sequences[0].follows == 0
    assert overlapping.counted("step_seconds_count", kind="decode") == 19
    assert 0.0 < overlapping.counted("step_seconds_sum", kind="decode") <= elapsed_s


def test_a_hang_is_seen_in_the_second_step_in_flight(overlapping: ThreadedEngine) -> None:
    def close_gate(step: Step) -> bool:
        if len(overlapping.runner.steps) == 3:
            overlapping.runner.gate.clear()
        return False

    overlapping.runner.fails = close_gate
    key = overlapping.submit(0, generate([1, 2, 3], 10))
    while len(overlapping.answers[key].tokens.get(0, ())) < 3:
        overlapping.next()
    wait_until(lambda: overlapping.engine.watchdog.started_s is not None)
    assert overlapping.runner.steps[2].sequences[0].follows == 0
    overlapping.runner.gate.set()
    overlapping.wait(key)


def test_a_probe_takes_no_block_of_the_pool(threaded: ThreadedEngine) -> None:
    """It computes in the null block: a pool that was full once has only cached blocks."""
    free = NUM_BLOCKS - 1
    token_ids = range(free * BLOCK_SIZE)
    held = threaded.allocator.allocate(len(token_ids), token_ids, ROOT)
    assert held is not None
    held.commit(token_ids, len(token_ids))
    held.free()
    before = cached_hashes(threaded.allocator)
    for _ in range(3):
        threaded.engine.probe().result(HANG_S)
    assert [slot for step in threaded.runner.steps for each in step.sequences for slot in each.slots] == [0, 0, 0]
    assert cached_hashes(threaded.allocator) == before
    assert len(before) == threaded.allocator.num_free_blocks == free


def test_a_probe_without_an_answer_is_a_hang(threaded: ThreadedEngine) -> None:
    threaded.runner.gate.clear()
    threaded.runner.fails = lambda step: True
    probed = threaded.engine.probe()
    assert threaded.runner.entered.acquire(timeout=HANG_S)
    assert threaded.engine.watchdog.started_s is not None  # the watchdog reads it
    proved_s = threaded.engine.watchdog._proved_s
    threaded.runner.gate.set()
    with pytest.raises(EngineDeadError, match="does not compute"):
        probed.result(HANG_S)
    assert threaded.engine.watchdog.started_s is None
    assert threaded.engine.watchdog._proved_s == proved_s  # it proved nothing: the next health check probes again


def test_failing_all_ends_every_request(threaded: ThreadedEngine) -> None:
    threaded.runner.gate.clear()
    keys = [threaded.submit(i, generate([i, 2, 3], 50)) for i in range(20)]
    done = threaded.engine.fail_all(Failed("draining", "stop", retryable=True))
    threaded.runner.gate.set()
    done.result(HANG_S)
    assert all(threaded.wait(key).last == Failed("draining", "stop", retryable=True) for key in keys)
    threaded.settle()
    assert threaded.allocator.num_free_blocks == NUM_BLOCKS - 1


def test_a_request_that_cannot_be_taken_fails_alone(threaded: ThreadedEngine) -> None:
    bad = threaded.submit(0, generate([1, 2], 2, priority=10**400))
    good = threaded.submit(1, generate([1, 2], 2))
    assert isinstance(threaded.wait(bad).last, Failed)
    assert isinstance(threaded.wait(good).last, End)
