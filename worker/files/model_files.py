"""The identity of a model: a digest of every byte of its files, made once and kept in the user's cache folder.

Without torch: adapters, which load no model, name it as a worker does.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worker.common.command_line import reason
from worker.common.cores import num_cores
from worker.common.folders import cache_folder, delete_unused
from worker.files.errors import CheckpointError

logger = logging.getLogger(__name__)

_PIECE_BYTES: Final = 32 << 20
"""A file is digested in pieces, by as many threads as there are processors. It is part of the digest."""
_SAMPLE_BYTES: Final = 64 << 10  # of each of _NUM_SAMPLES pieces
_NUM_SAMPLES: Final = 32  # 2 MB of a file of any size
_READ_BYTES: Final = 1 << 20  # a thread reads and hashes this without the interpreter
_MAX_THREADS: Final = 16  # bounds the memory: each has `_READ_BYTES`
MIN_KEPT_BYTES: Final = 16 << 20
"""The digest of a smaller file takes milliseconds, and is not kept."""
SETTLED_S: Final = 2.0
"""A file that changed less than this ago may change again within one tick of its clock: its digest is not kept."""
_FOLDER_PATTERNS: Final = ("config.json", "*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class FileStatus:
    """A file's size, times and place. No program can set the time of the last change (`ctime_ns`)."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStatus:
        """Raise OSError."""
        found = path.stat()
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files that a model is made of, as they were when they were digested."""

    digest: str
    """32 hex digits of all names and bytes: equal files have equal digests on every machine."""
    statuses: tuple[tuple[Path, FileStatus], ...]

    @property
    def num_bytes(self) -> int:
        return sum(status.size for _, status in self.statuses)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file is no longer what was digested."""
        for path, status in self.statuses:
            try:
                now = FileStatus.of(path)
            except OSError as error:
                raise _unreadable(path, error) from error
            if now != status:
                raise _changed(path)


def folder_files(folder: Path) -> ModelFiles:
    """Digest what makes the KV of a folder of Hugging Face files: shape and weights. Raise CheckpointError."""
    return digest_files(_paths(folder))


def sampled_digest(folder: Path) -> str:
    """Return the identity of a model that another engine has loaded. Raise CheckpointError.

    It reads names, sizes and pieces at even distances: of weights of 140 GB a few megabytes. A training changes all.
    """
    digest = hashlib.sha256()
    for path in sorted(_paths(folder), key=lambda path: path.name):
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name}\0{size}\0".encode())
                for start in _sampled(size):
                    file.seek(start)
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise _unreadable(path, error) from error
    return digest.hexdigest()[:32]


def _sampled(size: int) -> list[int]:
    """Return where the pieces of a file begin: all of a small one, and its end."""
    starts = range(0, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES))
    return [*starts, max(0, size - _SAMPLE_BYTES)]


def _paths(folder: Path) -> list[Path]:
    return [path for pattern in _FOLDER_PATTERNS for path in folder.glob(pattern)]


def digest_files(paths: Iterable[Path]) -> ModelFiles:
    """Digest names and contents, or take kept digests of unchanged files. Raise CheckpointError."""
    digest, statuses = hashlib.sha256(), []
    for path in sorted(paths, key=lambda path: path.name):
        try:
            status = FileStatus.of(path)
            content = _kept(path, status) or _digest(path, status)
        except OSError as error:
            raise _unreadable(path, error) from error
        digest.update(f"{path.name}\0{status.size}\0{content}\0".encode())
        statuses.append((path, status))
    return ModelFiles(digest.hexdigest()[:32], tuple(statuses))


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {reason(error)}")


def _changed(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} changed while it was loaded; start again when it is written")


def _digest(path: Path, status: FileStatus) -> str:
    """Return the digest of a file's pieces, and keep it. Raise OSError, CheckpointError."""
    begun_s = time.time()
    pieces = range(0, status.size, _PIECE_BYTES)
    num_threads = max(1, min(len(pieces), _MAX_THREADS, num_cores()))
    with path.open("rb") as file, ThreadPoolExecutor(num_threads, "digest") as threads:
        digests = threads.map(lambda start: _digest_piece(file.fileno(), start), pieces)
        content = hashlib.sha256(b"".join(digests)).hexdigest()
    if FileStatus.of(path) != status:
        raise _changed(path)
    last_change_s = max(status.mtime_ns, status.ctime_ns) / 1e9
    if status.size >= MIN_KEPT_BYTES:
        logger.info("%s digested in %.1f s: %d bytes", path, time.time() - begun_s, status.size)
    if begun_s - last_change_s > SETTLED_S:
        _keep(path, status, content)
    return content


def _digest_piece(descriptor: int, start: int) -> bytes:
    """hashlib and the system call run without the interpreter's lock."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    position, stop = start, start + _PIECE_BYTES
    while position < stop and (count := os.preadv(descriptor, [buffer[: stop - position]], position)):
        digest.update(buffer[:count])
        position += count
    return digest.digest()


def _kept_file(path: Path, status: FileStatus) -> Path | None:
    """Return where the digest of a file with this status is kept. None: it is not."""
    if status.size < MIN_KEPT_BYTES or (folder := cache_folder()) is None:
        return None
    return folder / f"digest-{hashlib.sha256(repr((path.resolve(), status)).encode()).hexdigest()[:32]}"


def _kept(path: Path, status: FileStatus) -> str | None:
    """Return the kept digest. None: there is none, or it is damaged."""
    if (kept := _kept_file(path, status)) is not None:
        with suppress(OSError, ValueError):
            text = kept.read_text()
            if text == _record(kept, content := text[:64]):
                os.utime(kept)
                return content
    return None


def _record(kept: Path, content: str) -> str:
    """Return what is written. The check detects damage: only the user can write to the folder."""
    return f"{content} {hashlib.sha256(f'{kept.name} {content}'.encode()).hexdigest()}"


def _keep(path: Path, status: FileStatus, content: str) -> None:
    """Write the digest. The file appears whole or not at all; starts at once write the same."""
    if (kept := _kept_file(path, status)) is None:
        return
    try:
        delete_unused(kept.parent, "digest-*")
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, prefix="digest-", suffix=".new", delete=False) as file:
            file.write(_record(kept, content))
        Path(file.name).replace(kept)
    except OSError as error:
        logger.info("the digest of %s is not kept, so the next start makes it again: %s", path, error)
