"""A started engine over the arithmetic runner, with a gate before each step."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from cache.allocators import make_allocator
from cache.events import BlockEvent
from cache.records import WorkerLoad, WorkerMember
from tests.waiting import HANG_S
from tests.worker.scheduler.arithmetic_runner import ArithmeticRunner
from tests.worker.scheduler.engine import BUNDLE, MEMBER, Answer
from worker.contracts.engine import EngineOutput, EngineSinks, RequestKey, StepLog
from worker.contracts.metrics import WorkerMetrics
from worker.contracts.rates import PrefillRate
from worker.contracts.step import SequenceResult, Step
from worker.engine.engine import EngineCore, PreparedParts
from worker.kernels.device import DeviceStream
from worker.scheduler.budget import BatchLimits
from worker.scheduler.scheduler import Scheduler

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


class RecordingPublisher:
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
        self.publisher = RecordingPublisher()
        self.metrics = WorkerMetrics()
        self.deaths: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.frames: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        self.answers: dict[RequestKey, Answer] = defaultdict(Answer)
        self.scheduler = Scheduler(self.allocator, BatchLimits(**limits), ())
        self.engine = EngineCore(
            self.scheduler,
            self.runner,
            PrefillRate(1000, 1.0),
            BUNDLE,
            MEMBER,
            self.metrics,
            async_scheduling=async_scheduling,
            sinks=EngineSinks(self._deliver, self.deaths.put, self.publisher),
        )
        self.engine.start()

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self.frames.put(output)

    def submit(self, key: int, wire, steps: StepLog | None = None) -> RequestKey:
        self.engine.submit(RequestKey(key), wire, PreparedParts(), steps)
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
