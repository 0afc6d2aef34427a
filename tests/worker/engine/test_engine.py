"""The engine thread: outputs, events and load, failed steps, dead devices, hangs.

Most tests run twice: on a device that computes in the engine thread, and on one that overlaps and raises errors late.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cache.allocators import make_allocator
from cache.events import BlockEvent
from cache.records import WorkerLoad, WorkerMember
from cache.types import Epoch, WorkerId
from tests.block_events import replay
from tests.waiting import HANG_S
from tests.worker.device_streams import ThreadedStream
from tests.worker.scheduler.arithmetic_runner import VOCAB, ArithmeticRunner, answer
from tests.worker.scheduler.engine import ROOT, Answer, generate
from worker.device import DeviceStream
from worker.engine.engine import EngineCore
from worker.engine.metrics import WorkerMetrics
from worker.engine.protocol import EngineDeadError, EngineOutput, RequestKey
from worker.engine.reporter import PrefillRate
from worker.engine.step import SequenceResult, Step
from worker.scheduler.budget import BatchLimits
from worker.scheduler.scheduler import Scheduler
from worker.wire import End, Failed, Started, TokenizerBundle

NUM_BLOCKS = 129
BLOCK_SIZE = 4


class GatedRunner(ArithmeticRunner):
    """Waits before each step while `gate` is closed."""

    def __init__(self, num_blocks: int, block_size: int, stream: DeviceStream) -> None:
        super().__init__(num_blocks, block_size, stream=stream)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def compute(self, step: Step) -> list[SequenceResult]:
        self.entered.release()
        assert self.gate.wait(HANG_S)
        return super().compute(step)


class RecordingListener:
    def __init__(self) -> None:
        self.events: list[BlockEvent] = []
        self.loads: list[WorkerLoad] = []
        self.members: list[WorkerMember] = []

    def offer(self, events, load) -> None:
        self.events += events
        self.loads.append(load)

    def begin_epoch(self, member) -> None:
        self.members.append(member)
        self.events.clear()


class ThreadedEngine:
    """A started engine over the arithmetic runner, and its answers."""

    def __init__(self, stream: DeviceStream, *, async_scheduling: bool = True, **limits) -> None:
        self.runner = GatedRunner(NUM_BLOCKS, BLOCK_SIZE, stream)
        self.allocator = make_allocator("hash", NUM_BLOCKS, BLOCK_SIZE)
        self.listener = RecordingListener()
        self.metrics = WorkerMetrics()
        self.deaths: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.frames: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        self.answers: dict[RequestKey, Answer] = defaultdict(Answer)
        self.scheduler = Scheduler(self.allocator, BatchLimits(**limits), ())
        member = WorkerMember(WorkerId("w"), Epoch("first"), "http://w", "m", "ns", "cpu", BLOCK_SIZE, 512, 1)
        bundle = TokenizerBundle("f", "m", "r", b"{}", None, None, None, (), False, VOCAB, 512, BLOCK_SIZE)
        self.engine = EngineCore(
            self.scheduler,
            self.runner,
            PrefillRate(1000, 1.0),
            bundle,
            member,
            self.metrics,
            async_scheduling=async_scheduling,
        )
        self.engine.start(
            lambda outputs: [self.frames.put(output) for output in outputs] and None, self.deaths.put, self.listener
        )

    def submit(self, key: int, wire) -> RequestKey:
        self.engine.submit(RequestKey(key), wire, {})
        return RequestKey(key)

    def next(self) -> EngineOutput:
        output = self.frames.get(timeout=HANG_S)
        self.answers[output.key].add(output.frame)
        return output

    def wait(self, key: RequestKey) -> Answer:
        while self.answers[key].last is None:
            self.next()
        return self.answers[key]

    def settle(self) -> None:
        """Run every command put so far, and process the steps in flight."""
        self.engine.mailbox.call(lambda: None, before=self.engine._in_flight.process_all).result(HANG_S)

    def run_commands(self) -> None:
        """Run every command put so far."""
        self.engine.mailbox.call(lambda: None).result(HANG_S)

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"headstart_worker_{name}", labels) or 0.0


def until(condition: Callable[[], object]) -> None:
    """Poll for a condition."""
    deadline_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@contextmanager
def running(stream: DeviceStream, *, async_scheduling: bool = True, max_num_seqs: int = 16) -> Iterator[ThreadedEngine]:
    engine = ThreadedEngine(
        stream, async_scheduling=async_scheduling, max_num_batched_tokens=64, max_num_seqs=max_num_seqs
    )
    try:
        yield engine
    finally:
        engine.runner.gate.set()
        engine.engine.stop()


@pytest.fixture
def blocking() -> Iterator[ThreadedEngine]:
    """An engine whose device computes in the engine thread."""
    with running(DeviceStream(torch.device("cpu"))) as engine:
        yield engine


@pytest.fixture
def overlapping() -> Iterator[ThreadedEngine]:
    """An engine whose device overlaps with the engine thread."""
    stream = ThreadedStream()
    with running(stream) as engine:
        yield engine
    stream.close()


@pytest.fixture(params=["blocking", "overlapping"])
def threaded(request: pytest.FixtureRequest) -> ThreadedEngine:
    return request.getfixturevalue(request.param)


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
    assert replay(threaded.listener.events) == set(threaded.allocator.cached_hashes())


def test_started_is_sent_before_the_prefill_runs(threaded: ThreadedEngine) -> None:
    threaded.runner.gate.clear()
    key = threaded.submit(0, generate(range(10)))
    output = threaded.next()
    assert output == EngineOutput(key, Started(0))
    threaded.runner.gate.set()
    threaded.wait(key)
    again = threaded.submit(1, generate(range(10)))
    assert threaded.next() == EngineOutput(again, Started(8))
    threaded.wait(again)


def test_started_is_sent_before_a_suspect_request_reaches_the_device(threaded: ThreadedEngine) -> None:
    num_sent: list[int] = []
    threaded.runner.fails = lambda step: num_sent.append(threaded.frames.qsize())
    threaded.submit(0, generate(range(10), 1, is_suspect=True))
    until(lambda: num_sent)
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
    assert overlapping.engine.health(0.0) is not None
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
    assert overlapping.counted("step_failures_total") == 1
    overlapping.settle()
    assert overlapping.allocator.num_free_blocks == NUM_BLOCKS - 1


def test_purge_waits_for_the_step_in_flight(overlapping: ThreadedEngine) -> None:
    overlapping.runner.gate.clear()
    key = overlapping.submit(0, generate(range(10), 5))
    assert overlapping.runner.entered.acquire(timeout=HANG_S)
    purged = overlapping.engine.purge()
    assert not purged.done()
    overlapping.runner.gate.set()
    purged.result(HANG_S)
    assert overlapping.wait(key).tokens[0] == answer(range(10), 100, 5)


def test_only_the_request_that_breaks_a_step_fails(threaded: ThreadedEngine) -> None:
    threaded.runner.fails = lambda step: any(49 in sequence.token_ids[:1] for sequence in step.sequences)
    threaded.runner.gate.clear()
    good = [threaded.submit(i, generate([i, 2, 3], 1)) for i in range(5)]
    bad = threaded.submit(5, generate([49, 2, 3], 1))
    threaded.runner.gate.set()
    assert threaded.wait(bad).last == Failed("internal_error", "the request cannot be computed", retryable=False)
    for i, key in enumerate(good):
        assert threaded.wait(key).tokens[0] == answer([i, 2, 3], 100, 1)
    assert threaded.counted("step_failures_total") >= 1
    assert threaded.counted("request_failures_total", cause="internal_error") == 1
    assert threaded.deaths.empty()


def test_tensors_of_a_failed_step_are_freed_before_the_retry(threaded: ThreadedEngine) -> None:
    """A device without room for a step has room for its requests one by one, unless the error keeps its tensors."""

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
    assert "died" in (threaded.engine.health(60.0) or "")


@pytest.mark.parametrize("num_newcomers", [1, 2])
def test_the_only_prefill_of_a_step_that_breaks_the_device_is_poisonous(
    threaded: ThreadedEngine, num_newcomers: int
) -> None:
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
    until(lambda: len(num_sent) == 4)  # the blocker, the two together, and each of them alone
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


def test_stop_waits_for_the_step_in_flight(overlapping: ThreadedEngine) -> None:
    overlapping.runner.gate.clear()
    overlapping.submit(0, generate(range(10), 5))
    assert overlapping.runner.entered.acquire(timeout=HANG_S)
    threading.Timer(0.05, overlapping.runner.gate.set).start()
    overlapping.engine.stop()
    assert not overlapping.engine._in_flight
    assert overlapping.runner.steps


def test_a_long_step_is_a_hang(threaded: ThreadedEngine) -> None:
    assert threaded.engine.health(0.0) is None
    threaded.runner.gate.clear()
    key = threaded.submit(0, generate([1, 2, 3]))
    assert threaded.runner.entered.acquire(timeout=HANG_S)
    time.sleep(0.02)
    assert "a step has been running" in (threaded.engine.health(0.01) or "")
    assert threaded.engine.health(60.0) is None
    threaded.runner.gate.set()
    threaded.wait(key)
    threaded.settle()
    assert threaded.engine.health(0.0) is None


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
    until(lambda: "a step has been running" in (overlapping.engine.health(0.0) or ""))
    assert overlapping.runner.steps[2].sequences[0].follows == 0
    overlapping.runner.gate.set()
    overlapping.wait(key)


def test_probe_computes_ahead_of_the_queue_and_frees_its_block(threaded: ThreadedEngine) -> None:
    seen: list[int] = []

    class OneToken(ArithmeticRunner):
        def compute(self, step: Step) -> list[SequenceResult]:
            seen.extend(slot for sequence in step.sequences for slot in sequence.slots)
            assert threaded.allocator.num_free_blocks == max(0, free - 1)
            return []

    threaded.runner.compute = OneToken(NUM_BLOCKS, BLOCK_SIZE).compute
    free = NUM_BLOCKS - 1
    threaded.engine.probe().result(HANG_S)
    assert seen[0] >= BLOCK_SIZE  # not in the null block
    assert threaded.allocator.num_free_blocks == NUM_BLOCKS - 1
    held = threaded.allocator.allocate(free * BLOCK_SIZE, [0] * free * BLOCK_SIZE, ROOT)
    free = 0
    threaded.engine.probe().result(HANG_S)
    assert seen[1] == 0  # in the null block: the pool is full
    held.free()
    assert threaded.allocator.num_free_blocks == NUM_BLOCKS - 1


def test_a_probe_without_an_answer_is_a_hang(threaded: ThreadedEngine) -> None:
    threaded.runner.gate.clear()
    threaded.runner.fails = lambda step: True
    probed = threaded.engine.probe()
    assert threaded.runner.entered.acquire(timeout=HANG_S)
    assert threaded.engine.watchdog.started_s is not None  # the watchdog reads it
    assert "a step has been running" in (threaded.engine.health(0.0) or "")
    proved_s = threaded.engine.watchdog._proved_s
    threaded.runner.gate.set()
    with pytest.raises(EngineDeadError, match="does not compute"):
        probed.result(HANG_S)
    assert threaded.engine.watchdog.started_s is None
    assert threaded.engine.watchdog._proved_s == proved_s  # it proved nothing: the next health check probes again


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
    assert [member.epoch for member in threaded.listener.members] == [epoch]
    for i, key in enumerate(keys):
        assert threaded.wait(key).tokens[0] == answer([i, 2, 3, 4, 5], 100, 60)
    threaded.settle()
    assert replay(threaded.listener.events) == set(threaded.allocator.cached_hashes())


def test_the_load_has_queued_prefill_per_gateway(threaded: ThreadedEngine) -> None:
    threaded.runner.gate.clear()
    threaded.submit(0, generate([1] * 100, 2, gateway_id="a"))
    assert threaded.runner.entered.acquire(timeout=HANG_S)
    threaded.submit(1, generate([2] * 50, 2, gateway_id="b"))
    threaded.runner.gate.set()
    for key in (0, 1):
        threaded.wait(RequestKey(key))
    threaded.engine.drain()
    threaded.settle()
    loads = threaded.listener.loads
    assert {gateway for load in loads for gateway in load.queued_prefill_s} == {"a", "b"}
    assert loads[-1].queued_prefill_s == {}
    assert loads[-1].draining
    assert loads[-1].assigned_prefill_s > 0.0
    assert loads[-1].prefill_tokens_per_s != loads[0].prefill_tokens_per_s
    assert loads[-1].num_free_blocks == loads[-1].num_blocks - 1


def test_an_idle_engine_has_reported_no_load(threaded: ThreadedEngine) -> None:
    """It then waits for commands and reports nothing."""
    threaded.wait(threaded.submit(0, generate(range(8), 2)))  # its last step fills no block: that is no news
    assert any(load.num_running for load in threaded.listener.loads)
    until(lambda: not threaded.listener.loads[-1].num_running)


def test_the_load_has_the_start_interval() -> None:
    with running(DeviceStream(torch.device("cpu")), max_num_seqs=1) as engine:
        engine.runner.gate.clear()
        keys = [engine.submit(i, generate([i, 2, 3], 3)) for i in range(4)]
        engine.runner.gate.set()
        for key in keys:
            engine.wait(key)
        engine.settle()
        assert engine.listener.loads[-1].start_interval_s > 0.0


def test_the_load_is_reported_while_a_prefill_runs(overlapping: ThreadedEngine) -> None:
    overlapping.runner.gate.clear()
    overlapping.submit(0, generate([1] * 100, 2, gateway_id="a"))
    assert overlapping.runner.entered.acquire(timeout=HANG_S)
    overlapping.submit(1, generate([2] * 50, 2, gateway_id="b"))
    deadline_s = time.monotonic() + HANG_S
    while "b" not in overlapping.listener.loads[-1].queued_prefill_s:
        assert time.monotonic() < deadline_s, "the load lacks a request that came during the step"
        overlapping.run_commands()


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
