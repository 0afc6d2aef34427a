"""Memory that libraries keep for later: freed pages in the C library, compiled products in oneDNN."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

_PRIMITIVE_CACHES: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's own, and that of ideep, through which torch calls it."""
_NUM_PRIMITIVES: Final = 128


def bound_primitives() -> None:
    """Let oneDNN and ideep keep 128 compiled products each, if their user has not said how many. Only before the first.

    There is one for every number of rows and shape of weight, of hundreds of KB with what belongs to it, and by
    themselves they keep 1,024: a worker grew by 400 MB over its first thousands of requests, and looking for what they
    had dropped took longer than compiling it. Decodes need a few for every batch size; those of prefills, whose lengths
    rarely return, are what goes.
    """
    for name in _PRIMITIVE_CACHES:
        os.environ.setdefault(name, str(_NUM_PRIMITIVES))


def return_free_pages() -> None:
    """Hand freed pages back to the system. Takes milliseconds; does nothing where the C library is not glibc.

    A burst's tensors leave free pages all over the engine thread's heap, which glibc gives back from its end only.
    """
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
