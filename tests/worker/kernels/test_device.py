"""The calls of a GPU's stream, recorded by a stand-in for torch.cuda."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from worker.kernels.device import DeviceStream, current_device


class FakeCuda:
    """Keeps the current device of a thread, and the devices on which events were recorded."""

    def __init__(self) -> None:
        self.current = torch.device("cuda:0")
        self.recorded: list[torch.device] = []

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    def event(self, *, blocking: bool) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self) -> None:
        self._cuda.recorded.append(self._cuda.current)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    return fake


def test_work_and_its_event_go_to_the_device_of_the_stream(cuda: FakeCuda) -> None:
    """The current device is another one, as in a new thread, where an event would be done at once."""
    second = torch.device("cuda:1")
    launch = DeviceStream(second).enqueue(lambda: cuda.current)
    assert launch.is_done()
    assert launch.collect() == second
    assert cuda.recorded == [second]
    assert cuda.current == torch.device("cuda:0")


def test_a_cpu_leaves_the_current_device_alone(cuda: FakeCuda) -> None:
    with current_device(torch.device("cpu")):
        assert cuda.current == torch.device("cuda:0")
