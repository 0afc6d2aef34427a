"""The engine's thread: nothing lost, nothing waited for, the poisoned alone fail, a dead device is told.

Most of it twice: over a device that is this thread, and over one that computes beside it, where errors come up late.
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

from cache.allocators import make_allocator
from cache.events import BlockEvent
from cache.records import WorkerLoad, WorkerMember
from cache.types import Epoch, WorkerId
from tests.block_events import replay
from tests.waiting import HANG_S
from tests.worker.device_streams import ThreadedStream
from tests.worker.scheduler.arithmetic_runner import VOCAB, ArithmeticRunner, answer
from tests.worker.scheduler.engine import ROOT, Answer, generate
from worker.device import DeviceStream, HostStream
from worker.engine.engine import EngineCore
from worker.engine.load import PrefillRate
from worker.engine.metrics import WorkerMetrics
from worker.engine.protocol import EngineDeadError, EngineOutput, RequestKey
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
    """A started engine over the arithmetic runner, and the answers that came out of it."""

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
        """Everything put into the inbox so far has been done, and the step that ran then has ended."""
        self.engine.mailbox.call(lambda: None, before=self.engine._in_flight.process_all).result(HANG_S)

    def heard(self) -> None:
        """Everything put into the inbox so far has been done."""
        self.engine.mailbox.call(lambda: None).result(HANG_S)

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"headstart_worker_{name}", labels) or 0.0


def until(condition: Callable[[], object]) -> None:
    """Poll: for what the engine does in its own time."""
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
def inline() -> Iterator[ThreadedEngine]:
    """Over a device that is the engine's own thread."""
    with running(HostStream()) as engine:
        yield engine


@pytest.fixture
def beside() -> Iterator[ThreadedEngine]:
    """Over a device that computes beside it."""
    stream = ThreadedStream()
    with running(stream) as engine:
        yield engine
    stream.close()


@pytest.fixture(params=["inline", "beside"])
def threaded(request: pytest.FixtureRequest) -> ThreadedEngine:
    return request.getfixturevalue(request.param)


def test_many_requests_from_many_threads_all_end_right(threaded: ThreadedEngine) -> None:
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


def test_what_is_offered_replays_to_what_the_pool_holds(threaded: ThreadedEngine) -> None:
    for i in range(40):  # more than the pool holds, so blocks are evicted too
        threaded.submit(i, generate([i, i + 1, *range(30)], 6))
    for i in range(40):
        threaded.wait(RequestKey(i))
    threaded.settle()
    assert threaded.allocator.stats().evictions > 0
    assert replay(threaded.listener.events) == set(threaded.allocator.held())


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


def test_a_suspect_is_said_to_have_begun_before_the_device_sees_it(threaded: ThreadedEngine) -> None:
    num_sent: list[int] = []
    threaded.runner.fails = lambda step: num_sent.append(threaded.frames.qsize())
    threaded.submit(0, generate(range(10), 1, is_suspect=True))
    until(lambda: num_sent)
    assert num_sent == [1]


def test_abort_during_a_step_takes_effect_after_it(inline: ThreadedEngine) -> None:
    inline.runner.gate.clear()
    key = inline.submit(0, generate(range(10), 200))
    assert inline.runner.entered.acquire(timeout=HANG_S)
    inline.engine.abort(key)
    inline.engine.abort(key)
    inline.engine.abort(RequestKey(99))
    inline.runner.gate.set()
    got = inline.wait(key)
    assert got.finished[0].reason == "abort"
    assert len(got.tokens[0]) == 1
    inline.settle()
    assert inline.allocator.num_free_blocks == NUM_BLOCKS - 1


def test_commands_are_heard_while_a_step_runs_on_the_device(beside: ThreadedEngine) -> None:
    beside.runner.gate.clear()
    aborted = beside.submit(0, generate(range(10), 200))
    assert beside.runner.entered.acquire(timeout=HANG_S)
    other = beside.submit(1, generate(range(20, 40), 5))
    beside.engine.abort(aborted)
    got = beside.wait(aborted)
    assert got.finished[0].reason == "abort"
    assert not got.tokens
    waiting = beside.engine.mailbox.call(lambda: [len(sequence.block_hashes) for sequence in beside.scheduler.waiting])
    assert waiting.result(HANG_S) == [20 // BLOCK_SIZE]  # taken in, and hashed
    assert beside.allocator.num_free_blocks == NUM_BLOCKS - 1 - 3  # the step still writes them
    assert beside.engine.health(0.0) is not None
    beside.runner.gate.set()
    assert beside.wait(other).tokens[0] == answer(range(20, 40), 100, 5)
    beside.settle()
    assert beside.allocator.num_free_blocks == NUM_BLOCKS - 1
    assert beside.allocator.find([*range(10), 1], ROOT) == 8  # what the step has computed is kept


@pytest.mark.parametrize(("async_scheduling", "num_steps"), [(True, 2), (False, 1)])
def test_a_device_is_given_the_next_decode_before_the_last_is_seen_unless_told_not_to(
    async_scheduling: bool, num_steps: int
) -> None:
    stream = ThreadedStream()
    with running(stream, async_scheduling=async_scheduling) as engine:
        got = engine.wait(engine.submit(0, generate(range(20), 50)))
    stream.close()
    assert got.tokens[0] == answer(range(20), 100, 50)
    assert stream.max_in_flight == num_steps


def test_who_waits_past_its_deadline_hears_of_it_while_every_step_is_launched_ahead() -> None:
    stream = ThreadedStream()
    with running(stream, max_num_seqs=1) as engine:
        engine.runner.gate.clear()
        seated = engine.submit(0, generate(range(20), 300))
        assert engine.runner.entered.acquire(timeout=HANG_S)
        late = engine.submit(1, generate(range(30), 5, deadline_s=0.0))
        engine.heard()
        engine.runner.gate.set()
        assert engine.wait(late).last == Failed("deadline", "it waited too long", retryable=False)
        assert engine.answers[seated].last is None
        engine.wait(seated)
    stream.close()


def test_a_choice_that_ends_while_the_prompt_is_computed_leaves_the_others_alone(beside: ThreadedEngine) -> None:
    beside.runner.gate.clear()
    key = beside.submit(0, generate(range(10), 6, 3))
    assert beside.runner.entered.acquire(timeout=HANG_S)
    beside.engine.abort(key, 1)
    beside.heard()
    beside.runner.gate.set()
    got = beside.wait(key)
    assert {i: got.finished[i].reason for i in range(3)} == {0: "length", 1: "abort", 2: "length"}
    assert got.tokens == {i: answer(range(10), 100 + i, 6) for i in (0, 2)}


def test_nothing_of_a_step_that_raises_is_findable(beside: ThreadedEngine) -> None:
    beside.runner.fails = lambda step: any(49 in sequence.token_ids for sequence in step.sequences)
    beside.runner.gate.clear()
    bad = beside.submit(0, generate([49, *range(20)], 5))
    assert beside.runner.entered.acquire(timeout=HANG_S)
    beside.heard()  # launched without an error, which comes when it is collected
    beside.runner.gate.set()
    assert isinstance(beside.wait(bad).last, Failed)
    beside.settle()
    assert beside.allocator.find([49, *range(20)], ROOT) == 0
    assert beside.allocator.num_free_blocks == NUM_BLOCKS - 1


def test_what_was_launched_behind_a_step_that_raises_has_never_been(beside: ThreadedEngine) -> None:
    beside.runner.fails = lambda step: len(beside.runner.steps) == 6
    keys = [beside.submit(i, generate([i, *range(9)], 20)) for i in range(2)]
    for i, key in enumerate(keys):
        assert beside.wait(key).tokens[0] == answer([i, *range(9)], 100, 20)
    assert beside.counted("step_failures_total") == 1
    beside.settle()
    assert beside.allocator.num_free_blocks == NUM_BLOCKS - 1


def test_purge_waits_for_the_step_that_runs(beside: ThreadedEngine) -> None:
    beside.runner.gate.clear()
    key = beside.submit(0, generate(range(10), 5))
    assert beside.runner.entered.acquire(timeout=HANG_S)
    purged = beside.engine.purge()
    assert not purged.done()
    beside.runner.gate.set()
    purged.result(HANG_S)
    assert beside.wait(key).tokens[0] == answer(range(10), 100, 5)


def test_the_poisoned_request_fails_and_its_neighbours_do_not(threaded: ThreadedEngine) -> None:
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


def test_what_a_step_that_raised_held_is_let_go_before_it_is_run_again(threaded: ThreadedEngine) -> None:
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


def test_a_device_that_computes_nothing_ends_the_engine(threaded: ThreadedEngine) -> None:
    threaded.runner.fails = lambda step: True
    threaded.runner.gate.clear()
    threaded.submit(0, generate([1, 2, 3]))
    threaded.runner.gate.set()
    assert "does not compute" in str(threaded.deaths.get(timeout=HANG_S))
    assert "died" in (threaded.engine.health(60.0) or "")


@pytest.mark.parametrize("num_newcomers", [1, 2])
def test_who_broke_the_device_is_told_where_it_can_have_been_only_one(
    threaded: ThreadedEngine, num_newcomers: int
) -> None:
    """So that no other worker computes it. Who has had a token before is above suspicion."""
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
    threaded.engine.mailbox.call(lambda: [threaded.submit(i, generate([i, 2, 3])) for i in newcomers])  # heard as one
    threaded.runner.gate.set()
    assert "does not compute" in str(threaded.deaths.get(timeout=HANG_S))
    while not threaded.frames.empty():
        threaded.next()
    told = [threaded.answers[key].last for key in (old, *newcomers)]
    if num_newcomers == 1:
        assert told == [None, Failed("poisonous", "the request has broken the device", retryable=False)]
    else:
        assert told == [None] * 3


def test_what_a_request_gets_alone_is_sent_before_the_next_is_tried(threaded: ThreadedEngine) -> None:
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


def test_what_was_to_be_sent_is_sent_before_the_engine_dies(inline: ThreadedEngine) -> None:
    output = EngineOutput(RequestKey(7), Started(0))

    def break_down() -> None:
        inline.engine._outputs.put([output])
        raise ZeroDivisionError

    inline.engine.mailbox.put(break_down)
    assert isinstance(inline.deaths.get(timeout=HANG_S), ZeroDivisionError)
    assert inline.frames.get(timeout=HANG_S) == output


@pytest.mark.parametrize("ends", ["dies", "stops"])
def test_whatever_is_asked_of_an_engine_that_has_ended_ends_at_once(threaded: ThreadedEngine, ends: str) -> None:
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


def test_what_waits_for_a_step_that_breaks_the_engine_is_told(beside: ThreadedEngine) -> None:
    """The command is at work: it has left the inbox, and lands the step first."""
    beside.runner.fails = lambda step: True
    beside.runner.gate.clear()
    beside.submit(0, generate(range(10), 5))
    assert beside.runner.entered.acquire(timeout=HANG_S)
    purged = beside.engine.purge()
    beside.runner.gate.set()
    with pytest.raises(EngineDeadError, match="does not compute"):
        purged.result(HANG_S)
    assert beside.deaths.get(timeout=HANG_S)


def test_the_step_that_runs_is_waited_for_at_the_end(beside: ThreadedEngine) -> None:
    beside.runner.gate.clear()
    beside.submit(0, generate(range(10), 5))
    assert beside.runner.entered.acquire(timeout=HANG_S)
    threading.Timer(0.05, beside.runner.gate.set).start()
    beside.engine.stop()
    assert not beside.engine._in_flight
    assert beside.runner.steps


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


def test_steps_that_stand_behind_each_other_last_no_longer_than_all_of_them(beside: ThreadedEngine) -> None:
    beside.runner.fails = lambda step: time.sleep(0.005)
    begun_s = time.monotonic()
    beside.wait(beside.submit(0, generate([1, 2, 3], 20)))
    beside.settle()
    elapsed_s = time.monotonic() - begun_s
    assert beside.runner.steps[9].sequences[0].follows == 0
    assert beside.counted("step_seconds_count", kind="decode") == 19
    assert 0.0 < beside.counted("step_seconds_sum", kind="decode") <= elapsed_s


def test_a_hang_is_seen_in_a_step_that_was_launched_ahead_too(beside: ThreadedEngine) -> None:
    def close_gate(step: Step) -> bool:
        if len(beside.runner.steps) == 3:
            beside.runner.gate.clear()
        return False

    beside.runner.fails = close_gate
    key = beside.submit(0, generate([1, 2, 3], 10))
    while len(beside.answers[key].tokens.get(0, ())) < 3:
        beside.next()
    until(lambda: "a step has been running" in (beside.engine.health(0.0) or ""))
    assert beside.runner.steps[2].sequences[0].follows == 0
    beside.runner.gate.set()
    beside.wait(key)


def test_probe_allocates_and_computes_past_the_queue_and_gives_back(threaded: ThreadedEngine) -> None:
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
    assert threaded.engine.watchdog.started_s is not None  # for who ends a process that hangs
    assert "a step has been running" in (threaded.engine.health(0.0) or "")
    proved_s = threaded.engine.watchdog._proved_s
    threaded.runner.gate.set()
    with pytest.raises(EngineDeadError, match="does not compute"):
        probed.result(HANG_S)
    assert threaded.engine.watchdog.started_s is None
    assert threaded.engine.watchdog._proved_s == proved_s  # it proved nothing: the next look asks again


def test_a_call_given_up_before_its_turn_harms_nobody(inline: ThreadedEngine) -> None:
    inline.runner.gate.clear()
    key = inline.submit(0, generate([1, 2, 3], 1))
    assert inline.runner.entered.acquire(timeout=HANG_S)
    called: list[int] = []
    assert inline.engine.mailbox.call(lambda: called.append(1)).cancel()
    inline.runner.gate.set()
    inline.wait(key)
    inline.settle()
    assert not called
    assert inline.deaths.empty()


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
    assert replay(threaded.listener.events) == set(threaded.allocator.held())


def test_the_load_tells_whose_prefill_waits(threaded: ThreadedEngine) -> None:
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
    assert loads[-1].prefill_tokens_per_s != loads[0].prefill_tokens_per_s  # measured anew
    assert loads[-1].num_free_blocks == loads[-1].num_blocks - 1


def test_an_engine_without_work_has_said_so(threaded: ThreadedEngine) -> None:
    """It waits for commands then, and tells nothing more."""
    threaded.wait(threaded.submit(0, generate(range(8), 2)))  # its last step fills no block: that is no news
    assert any(load.num_running for load in threaded.listener.loads)
    until(lambda: not threaded.listener.loads[-1].num_running)


def test_the_load_tells_how_fast_the_queue_moves() -> None:
    with running(HostStream(), max_num_seqs=1) as engine:
        engine.runner.gate.clear()
        keys = [engine.submit(i, generate([i, 2, 3], 3)) for i in range(4)]
        engine.runner.gate.set()
        for key in keys:
            engine.wait(key)
        engine.settle()
        assert engine.listener.loads[-1].start_interval_s > 0.0


def test_the_load_is_told_while_a_prefill_runs(beside: ThreadedEngine) -> None:
    beside.runner.gate.clear()
    beside.submit(0, generate([1] * 100, 2, gateway_id="a"))
    assert beside.runner.entered.acquire(timeout=HANG_S)
    beside.submit(1, generate([2] * 50, 2, gateway_id="b"))
    deadline_s = time.monotonic() + HANG_S
    while "b" not in beside.listener.loads[-1].queued_prefill_s:
        assert time.monotonic() < deadline_s, "nobody hears of what has come since the step was launched"
        beside.heard()


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
