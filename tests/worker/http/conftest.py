from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from tests.worker.device_streams import ThreadedStream
from tests.worker.http.slow_runner import NUM_BLOCKS, SlowRunner
from tests.worker.live_worker import LiveWorker, live_worker
from worker.kernels.device import DeviceStream


@pytest.fixture
def runner(request: pytest.FixtureRequest) -> Iterator[SlowRunner]:
    """A runner that computes in the engine thread, or overlaps with it."""
    if getattr(request, "param", "blocking") == "blocking":
        yield SlowRunner(DeviceStream(torch.device("cpu")))
    else:
        stream = ThreadedStream()
        yield SlowRunner(stream)
        stream.close()


@pytest.fixture
async def worker(runner: SlowRunner) -> AsyncIterator[LiveWorker]:
    async with live_worker(runner, NUM_BLOCKS, 4, max_num_batched_tokens=64, max_num_seqs=16) as worker:
        yield worker
        runner.free_running.set()
