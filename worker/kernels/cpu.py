"""The kernels of `cpu.cpp`: compiled by g++ once per instruction set, or taken ready-built.

Without a compiler, or on an unsupported processor, the worker runs in torch and logs that once.
`python -m worker.kernels.cpu` builds them for every instruction set, next to the source, as the image does.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.common.folders import cache_folder, private_folder

logger = logging.getLogger(__name__)

MAX_ROWS: Final = 64
"""Rows of a norm or rotation that one thread handles. All threads share more."""
MIN_HEAD_DIM: Final = 16
"""The widest vector of any instruction set, so that each of them serves the same models."""
_NO_WINDOW: Final = 1 << 40  # longer than any context
_SOURCE: Final = Path(__file__).with_name("cpu.cpp")
_MARCH: Final = (
    {"DEFAULT": "armv8-a"} if platform.machine() == "aarch64" else {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}
)
"""g++'s -march for a CPU capability that torch reports."""
_FLAGS: Final = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=fast"),
    *("-fno-trapping-math", "-fno-math-errno"),
)
NO_COMPILER: Final = "there is no g++"
_BUILD_ERRORS: Final = (OSError, subprocess.SubprocessError)


UNIFORM_BITS: Final = 53
"""Shares and random numbers are integers in units of 2^-53: each double in [0, 1) is exact."""
_SAMPLING_ROW: Final = Struct("20Q dqQQff")


class Limits(NamedTuple):
    """`Limits` of sampling.h: the limits of a request."""

    min_p_margin: float
    top_k: int
    top_p: int
    typical_p: int
    penalty: float
    scale: float


class _Norm(ctypes.Structure):
    """`Norm` of cpu.cpp."""

    _fields_ = (("weight", ctypes.c_void_p), ("size", ctypes.c_int64), ("offset", ctypes.c_float))


class _Shape(ctypes.Structure):
    """`Shape` of decodes.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_kv_heads", "group_size", "head_dim", "block_size")),
        ("scale", ctypes.c_float),
    )


class Decodes(ctypes.Structure):
    """Sequences with one query each, which sees all keys up to its own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("block_tables", "bounds")),
        *((name, ctypes.c_int64) for name in ("num_rows", "table_width")),
    )

    def __init__(self, block_tables: NDArray[np.int64], bounds: NDArray[np.int64]) -> None:
        """`block_tables` (rows, width); `bounds` (rows, 2): first key that the query sees, and end. Both contiguous."""
        super().__init__(block_tables.ctypes.data, bounds.ctypes.data, *block_tables.shape)
        self.arrays = (block_tables, bounds)  # the fields point into them


class Tiles(ctypes.Structure):
    """Tokens of a step in tiles. A tile is consecutive tokens of a sequence, whose queries attend together."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("block_tables", "tiles")),
        *((name, ctypes.c_int64) for name in ("num_tiles", "table_width", "max_tokens")),
    )

    def __init__(self, block_tables: NDArray[np.int64], tiles: NDArray[np.int64]) -> None:
        """`block_tables` (sequences, width); `tiles` (tiles, 4): row of the table, first row of the step, its position,
        number of tokens. Both contiguous.
        """
        sizes = (len(tiles), block_tables.shape[1], int(tiles[:, 3].max(initial=0)))
        super().__init__(block_tables.ctypes.data, tiles.ctypes.data, *sizes)
        self.arrays = (block_tables, tiles)  # the fields point into them


class Kernels:
    """The functions of one build of `cpu.cpp`.

    Short calls keep the interpreter's lock: to get it back from a busy event loop may take milliseconds.
    """

    __slots__ = ("locked", "panel_width", "unlocked")

    def __init__(self, path: Path) -> None:
        """Raise OSError when the file cannot be loaded."""
        self.locked, self.unlocked = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        pointer, size, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        arguments = {
            "rms_norm": (pointer, pointer, pointer, size, count),
            "rotate": (pointer, pointer, size, size, size, size, count),
            "argmax": (pointer, pointer, size, size, count),
            "sample": (*(pointer,) * 5, size, size, count),
            "rate": (pointer, pointer, pointer, size, size, size, *(pointer,) * 4, count),
            "multiply": (pointer, pointer, pointer, size, count, count),
            "attend": (pointer, pointer, *((pointer, size) * 3), pointer, pointer, pointer, count),
        }
        tiles = (*(pointer, pointer, pointer, size, size), *((pointer, size) * 3), *(pointer, pointer, pointer, count))
        arguments |= dict.fromkeys(("attend_tiles_float32", "attend_tiles_bfloat16"), tiles)
        for library in (self.locked, self.unlocked):
            for name, types in arguments.items():
                function = getattr(library, name)
                function.argtypes, function.restype = types, None
        self.panel_width: int = self.locked.panel_width()

    def library_for(self, num_rows: int) -> tuple[ctypes.CDLL, int]:
        """Return the library for a row-wise kernel, and the number of threads."""
        return (self.unlocked, torch.get_num_threads()) if num_rows > MAX_ROWS else (self.locked, 1)

    def rotate(self, states: Tensor, table: Tensor, num_heads: int) -> None:
        """Rotate the first heads of contiguous rows (num_rows, width) in place; table (num_rows, 2, head_dim)."""
        num_rows, width = states.shape
        library, num_threads = self.library_for(num_rows)
        library.rotate(states.data_ptr(), table.data_ptr(), num_rows, width, num_heads, table.shape[2], num_threads)

    def argmax(self, states: Tensor) -> Tensor:
        """Return the index of the first highest element of each row, (num_rows,) int64. NaN is the highest."""
        states = states.contiguous()
        num_rows, size = states.shape
        found = torch.empty(num_rows, dtype=torch.int64)
        num_threads = min(num_rows, torch.get_num_threads())
        self.unlocked.argmax(states.data_ptr(), found.data_ptr(), num_rows, size, num_threads)
        return found

    def sample(
        self, rows: Sequence[Iterable[float]], masks: Sequence[bytes | None], vocab_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sample a token from each row; return (rows,) tokens, best raw logits, best ones.

        `rows` have the fields of `SamplingRow` in sampling.h; a mask has a bit for each token, in words of 64.
        """
        num_rows, table = len(rows), b"".join([_SAMPLING_ROW.pack(*row) for row in rows])
        words = (ctypes.c_char_p * num_rows)(*masks)
        found = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows), torch.empty(num_rows)
        num_threads = min(num_rows, torch.get_num_threads())
        self.unlocked.sample(table, words, *(t.data_ptr() for t in found), num_rows, vocab_size, num_threads)
        return found

    def rate(self, logits: Tensor, rows: Tensor, token_ids: Tensor, num_best: int) -> tuple[Tensor, ...]:
        """Return log probabilities and ranks (rows,) of a token of each row, and log probabilities and ids of the best.

        logits (..., vocab_size) float32, contiguous; rows and token_ids (rows,) int64; the best (rows, num_best). NaN
        where a logit is not finite.
        """
        num_rows = len(rows)
        logprobs, ranks = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
        values, ids = torch.empty(num_rows, num_best), torch.empty((num_rows, num_best), dtype=torch.int64)
        given, found = (logits, rows, token_ids), (logprobs, ranks, values, ids)
        sizes, num_threads = (num_rows, logits.shape[1], num_best), min(num_rows, torch.get_num_threads())
        self.unlocked.rate(*(t.data_ptr() for t in given), *sizes, *(t.data_ptr() for t in found), num_threads)
        return found


class RmsNormKernel:
    """x * weight / sqrt(mean(x^2) + eps), rounded once."""

    __slots__ = ("_address", "_fields", "_kernels", "_weight")

    def __init__(self, kernels: Kernels, weight: Tensor, eps: float) -> None:
        """`weight` (size,)"""
        size = weight.shape[-1]
        self._kernels = kernels
        self._weight = weight.float() * size**0.5
        self._fields = _Norm(self._weight.data_ptr(), size, size * eps)
        self._address = ctypes.addressof(self._fields)

    def __call__(self, states: Tensor) -> Tensor:
        """(num_rows, size), contiguous -> the same shape"""
        assert states.is_contiguous()
        out = torch.empty_like(states)
        num_rows = states.shape[0]
        library, num_threads = self._kernels.library_for(num_rows)
        library.rms_norm(self._address, states.data_ptr(), out.data_ptr(), num_rows, num_threads)
        return out


class AttentionKernel:
    """Attention over the pages of one pool, for one shape of heads. Uses torch's number of threads."""

    __slots__ = ("_attend", "_attend_tiles", "_fields", "_head_dim", "_shape")

    def __init__(
        self, kernels: Kernels, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, block_size: int
    ) -> None:
        """`scale` multiplies products of query and key."""
        library = kernels.unlocked
        self._attend = library.attend
        self._attend_tiles = {
            torch.float32: library.attend_tiles_float32,
            torch.bfloat16: library.attend_tiles_bfloat16,
        }
        self._head_dim = head_dim
        self._fields = _Shape(num_kv_heads, num_heads // num_kv_heads, head_dim, block_size, scale)
        self._shape = ctypes.addressof(self._fields)

    def __call__(
        self, states: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor, decodes: Decodes, out: Tensor
    ) -> None:
        """Store one key and value per row, then attend: `states` are queries (rows, heads, head_dim), keys and values
        (rows, kv_heads, head_dim), in bfloat16 and any strides.

        keys, values (num_blocks, block_size, kv_heads, head_dim); out (rows, heads * head_dim).
        """
        self._run(self._attend, (ctypes.addressof(decodes),), states, (keys, values, out))

    def attend_tiles(
        self,
        states: tuple[Tensor, Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        tiles: Tiles,
        slots: Tensor,
        out: Tensor,
        window: int | None = None,
    ) -> None:
        """Do the same for rows of any chunks, in float32 or bfloat16. Keys and values go to `slots` (rows,) int64."""
        plan = (ctypes.addressof(tiles), slots.data_ptr(), len(slots), window or _NO_WINDOW)
        self._run(self._attend_tiles[keys.dtype], plan, states, (keys, values, out))

    def _run(
        self,
        function: Callable[..., None],
        plan: tuple[int, ...],
        states: tuple[Tensor, Tensor, Tensor],
        pools_and_out: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        query, key, value = (self._with_adjacent_heads(one) for one in states)
        function(
            self._shape,
            *plan,
            *(query.data_ptr(), query.stride(0), key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0)),
            *(tensor.data_ptr() for tensor in pools_and_out),
            torch.get_num_threads(),
        )

    def _with_adjacent_heads(self, states: Tensor) -> Tensor:
        """Copy `states` if the heads of a row are not adjacent, as in some models of transformers."""
        _, head, element = states.stride()
        if element == 1 and (head == self._head_dim or states.shape[1] == 1):
            return states
        return states.contiguous()


def attention_for(dtype: torch.dtype, device: torch.device, head_dim: int) -> Kernels | None:
    """Return the kernels if `AttentionKernel` serves heads of this size and dtype on this device."""
    serves = dtype == torch.float32 or (dtype == torch.bfloat16 and head_dim % 2 == 0)
    return _load() if serves and device.type == "cpu" and head_dim >= MIN_HEAD_DIM else None


def has_amx() -> bool:
    """Return whether torch's products in bfloat16 use the matrix units of this processor."""
    capability = torch.backends.cpu.get_cpu_capability()
    return bool(torch.cpu._is_amx_tile_supported()) and capability == "AVX512"


def kernels_for(dtype: torch.dtype, device: torch.device, *, deterministic: bool) -> Kernels | None:
    """Return the kernels if they run a model of this dtype on this device."""
    if dtype != torch.bfloat16 or device.type != "cpu" or deterministic:
        return None
    return _load()


def matmul_kernels_for(dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """Return the kernels if their matrix products serve this dtype on this device."""
    return _load() if (dtype, device.type) == (torch.float32, "cpu") else None


def sampling_kernels_for(device: torch.device) -> Kernels | None:
    """Return the kernels if they sample from logits on this device."""
    return _load() if device.type == "cpu" else None


def problem() -> str | None:
    """Return why a model that asked for the kernels runs without them, in one line. None: it has them."""
    if not _loaded.cache_info().currsize:
        return None
    found = _loaded()
    return found if isinstance(found, str) else None


def _load() -> Kernels | None:
    found = _loaded()
    return None if isinstance(found, str) else found


@cache
def _loaded() -> Kernels | str:
    """Load the kernels, or return why there are none, which is logged once."""
    found = _kernels_or_problem()
    if isinstance(found, str):
        logger.warning("the model runs in torch, slower: %s", found)
    return found


def _kernels_or_problem() -> Kernels | str:
    capability = torch.backends.cpu.get_cpu_capability()
    if (march := _MARCH.get(capability)) is None:
        return f"there are no compiled kernels for a CPU with {capability}"
    ready = _SOURCE.parent / _file_name(march, "")
    if not ready.is_file() and shutil.which("g++") is None:
        return f"{NO_COMPILER}: apt-get install g++, and start again"
    try:
        return Kernels(ready) if ready.is_file() else _load_or_build(march)
    except _BUILD_ERRORS as error:
        return f"cpu.cpp is not compiled: {' '.join(str(error).split())}"


def _load_or_build(march: str) -> Kernels:
    """Load the kernels from the user's cache folder, compiled if need be. Raise OSError or SubprocessError."""
    compiler = subprocess.run([_compiler(), "--version"], check=True, capture_output=True, text=True).stdout
    with private_folder() if (cached := cache_folder()) is None else nullcontext(cached) as folder:
        file = folder / _file_name(march, compiler)
        if file.is_file():
            try:
                return Kernels(file)
            except OSError as error:
                logger.warning("%s cannot be loaded, so it is compiled: %s", file, error)
        build(march, file)
        return Kernels(file)  # stays mapped when a private folder goes


def build(march: str, file: Path) -> None:
    """Compile `cpu.cpp` to a file, atomically. Raise OSError or SubprocessError."""
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not libraries:
        raise OSError("torch has no libgomp whose threads the kernels could share")
    with private_folder(file.parent) as folder:
        built = folder / file.name
        # --as-needed: linked with torch's libgomp, g++'s own adds nothing and is left out.
        command = [_compiler(), *_FLAGS, f"-march={march}", str(_SOURCE), "-o", str(built), "-Wl,--as-needed"]
        try:
            command, variables = [*command, str(libraries[0])], {**os.environ, "TMPDIR": str(folder)}
            subprocess.run(command, env=variables, check=True, capture_output=True, text=True, timeout=300)
        except subprocess.CalledProcessError as error:
            raise OSError(f"g++ failed: {error.stderr.strip()[-500:]}") from error
        with built.open("rb") as written:
            os.fsync(written.fileno())
        built.replace(file)


def _compiler() -> str:
    if (compiler := shutil.which("g++")) is None:
        raise OSError(NO_COMPILER)
    return compiler


def _file_name(march: str, compiler: str) -> str:
    sources = (file.read_bytes() for file in (_SOURCE, *sorted(_SOURCE.parent.glob("*.h"))))
    parts = (*sources, " ".join(_FLAGS).encode(), compiler.encode())
    digest = blake2b(b"\0".join(parts), digest_size=8).hexdigest()
    return f"cpu-{march}-{digest}.so"


if __name__ == "__main__":
    for name in _MARCH.values():
        build(name, _SOURCE.parent / _file_name(name, ""))
    sys.exit(0)
