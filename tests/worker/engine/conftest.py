"""Engines on a device that computes in the engine thread, and on one that overlaps and raises errors late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.worker.device_streams import ThreadedStream
from tests.worker.engine.threaded_engine import (
    ThreadedEngine,
    running,
)
from worker.kernels.device import DeviceStream


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
