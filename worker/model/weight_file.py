"""Prepared weights in a file of the user's cache folder: made once, and mapped by every worker of the machine.

    tensors, each 64-byte aligned | index as JSON | checksum of both | size of the index, 8 bytes | MAGIC

The index has the key, and offset, dtype and shape of each tensor by name. A file is written atomically. A damaged file,
or one of another key, is made again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import mmap
import os
import shutil
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from worker.common.folders import cache_folder, delete_unused

logger = logging.getLogger(__name__)
Loaded = TypeVar("Loaded")
Weights = Callable[[str, Callable[[], Tensor]], Tensor]
"""The source of a decoder's tensors. Returns the one of a unique name, or makes it."""

MAGIC: Final = b"headstart weights 1\n"
MAX_BYTES: Final = 8 << 30  # a larger model is not prepared: it would fill the disk for a start now and then
DISK_SHARE: Final = 0.25
"""Part of the free disk space that a file may take."""
_ALIGNMENT: Final = 64  # a cache line, and a vector of AVX-512
_CHUNK_WORDS: Final = 1 << 13  # 64 KiB
_CHECKSUM_BYTES: Final = 16  # 128 bits
_SIZE_BYTES: Final = 8  # 64 bits


def make_weight(name: str, make: Callable[[], Tensor]) -> Tensor:
    """Make the tensor: the `Weights` of a model without a file."""
    return make()


def load_prepared(key: str, load: Callable[[Weights], Loaded]) -> Loaded:
    """Return what `load` makes of the weights in the file of this key.

    If there is none, one process makes it while others wait. Without a cache folder, no file is written.
    """
    if (folder := cache_folder()) is None:
        return load(make_weight)
    path = folder / f"weights-{key}.bin"
    with (folder / f"weights-{key}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tensors = map_file(path, key)
        if tensors is None:
            made = make_file(path, key, load)
            if (tensors := map_file(path, key)) is None:
                return made
    os.utime(path)
    return load(lambda name, make: tensors[name])


def make_file(path: Path, key: str, load: Callable[[Weights], Loaded]) -> Loaded:
    """Load the model, and write its weights if there is room. Raise what `load` raises."""
    made: dict[str, Tensor] = {}

    def keep(name: str, make: Callable[[], Tensor]) -> Tensor:
        tensor = made[name] = make()
        return tensor

    loaded = load(keep)
    delete_unused(path.parent, "weights-*")
    temporary = path.with_suffix(".new")
    try:
        max_bytes = min(MAX_BYTES, int(DISK_SHARE * shutil.disk_usage(path.parent).free))
        if sum(tensor.nbytes for tensor in made.values()) > max_bytes:
            raise OSError(f"they take more than {max_bytes} bytes")
        with temporary.open("w+b") as file:
            _write(file, key, made)
        temporary.replace(path)
    except OSError as error:
        logger.info("the prepared weights are not stored, so every start prepares them: %s", error)
    finally:
        temporary.unlink(missing_ok=True)
    return loaded


def _write(file: BinaryIO, key: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a whole file. Raise OSError."""
    places = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        places[name] = {"offset": file.tell(), "dtype": dtype, "shape": list(tensor.shape)}
        file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        file.write(bytes(-file.tell() % _ALIGNMENT))
    index = json.dumps({"key": key, "tensors": places}).encode()
    file.write(index)
    file.flush()
    digest = checksum(np.memmap(file, dtype=np.uint8, mode="r", shape=(file.tell(),)))
    file.write(digest + len(index).to_bytes(_SIZE_BYTES, "little") + MAGIC)
    file.flush()
    os.fsync(file.fileno())


def map_file(path: Path, key: str) -> Mapping[str, Tensor] | None:
    """Return the tensors of a file, mapped copy-on-write and checked. None: it is missing or invalid."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        size_at = len(mapped) - len(MAGIC) - _SIZE_BYTES
        end = size_at - _CHECKSUM_BYTES
        index_at = end - int.from_bytes(mapped[size_at : size_at + _SIZE_BYTES], "little")
        if end < 0 or index_at < 0 or mapped[size_at + _SIZE_BYTES :] != MAGIC:
            raise ValueError("it is no whole file of weights")
        if mapped[end:size_at] != checksum(np.frombuffer(mapped, np.uint8, end)):
            raise ValueError("its checksum is wrong")
        index = json.loads(mapped[index_at:end])
        if index["key"] != key:
            raise ValueError("it is of other weights")
        return {name: _tensor(mapped, **place) for name, place in index["tensors"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is made again: %s", path, error)
        return None


def _tensor(mapped: mmap.mmap, offset: int, dtype: str, shape: list[int]) -> Tensor:
    if (count := math.prod(shape)) == 0:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(mapped, dtype=getattr(torch, dtype), count=count, offset=offset).view(shape)


def checksum(data: np.ndarray) -> bytes:
    """Digest the sums of pieces of 64 KiB, as fast as memory. Detects damage, not forgery."""
    words = data[: len(data) // 8 * 8].view(np.uint64)
    pieces = [words[i : i + (1 << 10) * _CHUNK_WORDS] for i in range(0, len(words), (1 << 10) * _CHUNK_WORDS)]
    sums = [np.add.reduceat(piece, np.arange(0, len(piece), _CHUNK_WORDS), dtype=np.uint64) for piece in pieces]
    digest = blake2b(len(data).to_bytes(8, "little"), digest_size=_CHECKSUM_BYTES)
    for part in (*sums, data[len(words) * 8 :]):
        digest.update(part.tobytes())
    return digest.digest()
