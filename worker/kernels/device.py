"""The device that a model runs on: asynchronous copies to and from it, and the stream that its work is queued on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from worker.contracts.step import Launch

T = TypeVar("T")
Values = Tensor | Sequence[int] | Sequence[float] | Sequence[Sequence[int]]


def to_device(values: Values, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy `values` to the device, for work that is queued there after this call."""
    host = values.to(dtype) if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cuda":  # a copy from pageable memory would wait for all queued work
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Return host memory that holds the tensor once all work queued so far is done."""
    return tensor.to("cpu", non_blocking=True)


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` current: this thread's Triton kernels, events and graphs go there, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Stopwatch:
    """Times the parts of work that is queued on a device. Nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        """Begin the first part."""
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """End a part: the point at which the device has done all work queued so far."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the duration of each part, once the work is done."""
        if self._is_cuda:
            return [begun.elapsed_time(ended) / 1000 for begun, ended in pairwise(self._marks)]
        return [ended - begun for begun, ended in pairwise(self._marks)]


class DeviceStream:
    """Runs queued work in order, for one thread: on the current stream of a GPU, or within `enqueue`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.overlaps = device.type == "cuda"
        """`enqueue` returns before the work is done."""

    def enqueue(self, work: Callable[[], T]) -> Launch[T]:
        """Queue `work`. It returns host tensors that are valid after `collect`; its errors are raised here or there."""
        with current_device(self._device):
            result = work()
            if not self.overlaps:
                return Launch(lambda: result)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()

        def collect() -> T:
            event.synchronize()
            return result

        def is_done() -> bool:
            try:
                return bool(event.query())  # type: ignore[no-untyped-call]
            except RuntimeError:  # the work failed: `collect` raises it
                return True

        return Launch(collect, is_done)
