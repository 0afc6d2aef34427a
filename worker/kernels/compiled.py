"""numba's compilers with the options of all kernels.

What is compiled for a signature is kept on disk where there is a place for it. It is compiled anew when any file of
this folder changes, and for other constants. What has no signature becomes part of its callers, and is kept with them.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, TypeVar

import numba
from numba.extending import intrinsic

logger = logging.getLogger(__name__)

_FAST: Final = {"reassoc", "contract", "arcp", "nsz"}
"""Without what would let the compiler forget NaN: a broken model must be noticed."""
_DISK_ERRORS: Final = (RuntimeError, OSError, EOFError, pickle.UnpicklingError)
"""No place beside the function's file nor in the home folder; a full disk; files that a crash has cut short."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


def digest(folder: Path) -> str:
    """Of the code in a folder."""
    texts = (path.read_bytes() for path in sorted(folder.glob("*.py")))
    return blake2b(b"\0".join(texts), digest_size=6).hexdigest()


_VERSION: Final = digest(Path(__file__).parent)


def compiled(*signatures: str, nogil: bool = False) -> Callable[[_Function], _Function]:
    """At once if there is a signature, so that no step waits for it.

    What takes microseconds keeps the interpreter's lock: to get it back from a busy event loop may take milliseconds.
    """

    def compile_with(**options: Any) -> Any:
        return numba.njit(list(signatures) or None, nogil=nogil, fastmath=_FAST, error_model="numpy", **options)

    return _kept_on_disk(compile_with) if signatures else compile_with()


def compiled_callback(signature: str) -> Callable[[_Function], Any]:
    """For callers that know the address alone, `.address`."""

    def compile_with(**options: Any) -> Any:
        return numba.cfunc(signature, fastmath=_FAST, error_model="numpy", **options)

    return _kept_on_disk(compile_with)


def instructions(function: Callable[..., Any]) -> Any:
    """A function that kernels may call, given what writes its instructions; constants come to it as literals."""
    return intrinsic(prefer_literal=True)(function)


def _kept_on_disk(compile_with: Callable[..., Any]) -> Callable[[_Function], Any]:
    def decorate(function: _Function) -> Any:
        # numba names the file by this, and looks for changes in the function's own file alone.
        function.__qualname__ += f"_{_VERSION}"
        try:
            return compile_with(cache=True)(function)
        except _DISK_ERRORS as error:
            logger.info("%s is compiled at every start: %r", function.__qualname__, error)
            return compile_with()(function)

    return decorate
