"""How torch's bfloat16 tensors become the arrays that `worker.kernels.bfloat16` takes, and when those kernels serve."""

from __future__ import annotations

import logging
from functools import cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_ROWS: Final = 64
"""Of one loop; more are shared out to threads."""


def bits(states: Tensor) -> NDArray[np.uint16]:
    """The same memory, as numpy sees it."""
    array: NDArray[np.uint16] = states.view(torch.uint16).numpy()
    return array


def kernels_serve(dtype: torch.dtype, device: torch.device, *, deterministic: bool) -> bool:
    """Whether the compiled kernels run a model of this dtype on this device."""
    return dtype == torch.bfloat16 and device.type == "cpu" and not deterministic and _installed()


@cache
def _installed() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:
        logger.warning("decoding in bfloat16 is slower without numba: pip install 'headstart[worker]'")
        return False
    return True
