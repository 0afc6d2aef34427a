"""Copies between host and device that nobody waits for, and which device is meant. On a CPU there is nothing to do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

Values = Tensor | Sequence[int] | Sequence[float] | Sequence[Sequence[int]]


def to_device(values: Values, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` on the device, for what is queued there after this call."""
    host = values.to(dtype) if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cuda":  # from other memory the copy would wait for what the device has still to do
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Memory of the host that holds the tensor's values once all that is queued on the device by now is done."""
    return tensor.to("cpu", non_blocking=True)


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Where this thread's Triton kernels, events and graphs go: they follow the current device, not their tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
