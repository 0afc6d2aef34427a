"""A runner whose steps a test allows one by one, and what an idle worker holds."""

from __future__ import annotations

import asyncio
import threading

from tests.worker.live_worker import LiveWorker
from tests.worker.scheduler.arithmetic_runner import ArithmeticRunner
from worker.contracts.step import SequenceResult, Step
from worker.kernels.device import DeviceStream

NUM_BLOCKS = 129


class SlowRunner(ArithmeticRunner):
    """Runs a step whenever the test allows one; by default at once."""

    def __init__(self, stream: DeviceStream) -> None:
        super().__init__(NUM_BLOCKS, 4, stream=stream)
        self.free_running = threading.Event()
        self.free_running.set()
        self.steps_allowed = threading.Semaphore(0)

    def compute(self, step: Step) -> list[SequenceResult]:
        while not self.free_running.is_set():
            if self.steps_allowed.acquire(timeout=0.005):
                break
        return super().compute(step)


async def assert_idle(worker: LiveWorker) -> None:
    """No stream, no request, every block free or cached, and the pool's own check passes."""
    await worker.until(lambda: worker.service.num_open == 0)
    await worker.until(lambda: not worker.scheduler.requests)
    await worker.settled()
    allocator = worker.scheduler.allocator
    await asyncio.wrap_future(worker.engine.mailbox.call(allocator.check_integrity))
    await worker.until(lambda: allocator.num_free_blocks == NUM_BLOCKS - 1)  # an aborted step may still run
    assert len(worker.scheduler.running) == len(worker.scheduler.waiting) == 0
    assert worker.service.queue.num_requests == 0
