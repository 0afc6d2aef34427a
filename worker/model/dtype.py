"""The number format of activations and dense weights: the one that is asked for, or the quickest on a device."""

from __future__ import annotations

import logging
import platform
from typing import Final

import torch

from worker.model.config import DTYPES

logger = logging.getLogger(__name__)

AUTO: Final = "auto"
CHOICES: Final = (AUTO, *DTYPES)
_X86_UNITS: Final = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
"""Functions of torch.cpu. oneDNN also lists processors that emulate bfloat16, slower than float32."""


def choose_dtype(asked: str | None, device: str) -> str:
    """Return one of DTYPES. None: float32 on a CPU, else bfloat16. "auto": the quickest on this device.

    Warns if the processor has no units for the dtype that is asked for. Raises ValueError for an unknown one.
    """
    if asked is None:
        return "float32" if device == "cpu" else "bfloat16"
    if asked not in CHOICES:
        raise ValueError(f"--dtype must be one of {', '.join(CHOICES)}, got {asked!r}")
    if asked == AUTO:
        return quickest_dtype(device)
    if device == "cpu" and asked != "float32" and quickest_dtype(device) != asked:
        logger.warning(
            "dtype=%s: this processor has no units for it, so prefill may take several times as long as in float32; "
            "dtype=auto takes what is quickest",
            asked,
        )
    return asked


def quickest_dtype(device: str) -> str:
    if device == "cpu":
        return "bfloat16" if _cpu_has_bfloat16_units() else "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


def _cpu_has_bfloat16_units() -> bool:
    """Return whether this processor multiplies in bfloat16, and torch's products use it."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return platform.machine() in ("aarch64", "arm64") or any(getattr(torch.cpu, name)() for name in _X86_UNITS)
