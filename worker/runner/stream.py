"""Where the work of a step goes: a CPU does it at once, a GPU takes it into a queue and computes beside this thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from worker.device import current_device
from worker.engine.step import Done, Launch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Stream(Protocol):
    """Does what is queued in order, for one thread."""

    @property
    def overlaps(self) -> bool:
        """Whether `enqueue` returns before the work is done."""

    def enqueue(self, work: Callable[[], T]) -> Launch[T]:
        """`work` returns host tensors that are filled once it is collected. What it raises is raised here or there."""


class HostStream:
    overlaps = False

    def enqueue(self, work: Callable[[], T]) -> Launch[T]:
        return Done(work())


class CudaStream:
    """The stream of a device that is current where `work` runs: what it calls there is queued, not done."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enqueue(self, work: Callable[[], T]) -> Launch[T]:
        with current_device(self._device):
            result = work()
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
        return _Recorded(result, event)


@dataclass(frozen=True, slots=True)
class _Recorded(Generic[T_co]):
    result: T_co
    event: torch.cuda.Event

    def is_done(self) -> bool:
        try:
            return bool(self.event.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # of the work: for `collect` to raise
            return True

    def collect(self) -> T_co:
        self.event.synchronize()
        return self.result


def stream_of(device: torch.device) -> Stream:
    return CudaStream(device) if device.type == "cuda" else HostStream()
