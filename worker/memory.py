"""Memory that was freed and that the C library keeps."""

from __future__ import annotations

import ctypes
from typing import Any


def return_free_pages() -> None:
    """Hand freed pages back to the system. Takes milliseconds; does nothing where the C library is not glibc.

    A burst's tensors leave free pages all over the engine thread's heap, which glibc gives back from its end only.
    """
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
