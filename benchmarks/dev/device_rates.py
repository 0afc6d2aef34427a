"""Measure what a device can do at best: bytes of memory moved a second, and operations of a matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

_ROUNDS: Final = 5
_REPEATS: Final = 10
"""Runs in a row that are timed on a GPU: a single run takes little longer than its launch."""


def memory_rate(device: torch.device) -> float:
    """Bytes per second of a large copy, read and written."""
    num_bytes = 1 << (31 if device.type == "cuda" else 28)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * num_bytes / _best_s(lambda: target.copy_(source), device)


@torch.inference_mode()
def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large square product."""
    size = 8192 if device.type == "cuda" else 1024
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    return 2 * size**3 / _best_s(lambda: torch.mm(one, other, out=out), device)


def synchronise(device: torch.device) -> None:
    """Wait for all that the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    repeats = _REPEATS if device.type == "cuda" else 1
    best = float("inf")
    run()
    for _ in range(_ROUNDS):
        synchronise(device)
        begun_s = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronise(device)
        best = min(best, (time.perf_counter() - begun_s) / repeats)
    return best
