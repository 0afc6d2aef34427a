from __future__ import annotations

import errno
import logging
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache.block_record import RecordFormat
from cache.stores import disk
from cache.stores.disk import DiskStore
from tests.block_events import replay
from tests.cache.held import cached_hashes
from tests.cache.stores.store_parts import (
    PAYLOAD_BYTES,
    RECORD,
    chain,
    open_disk,
    reads_exactly,
    segments,
    write,
)

LINKS = chain([0, 1, 1, 0, 1, 0])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1_000.0]
    monkeypatch.setattr(disk, "monotonic", lambda: now[0])
    return now


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_no_other_user_can_read_the_files(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        write(open_disk(tmp_path / "blocks"), *LINKS)
    finally:
        os.umask(old)
    folder = tmp_path / "blocks"
    assert [mode_of(folder), mode_of(folder / "0")] == [0o700, 0o700]
    files = list((folder / "0").iterdir())
    assert len(files) == 3
    assert {mode_of(file) for file in files} == {0o600}


def test_an_open_folder_of_ours_is_closed(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0").chmod(0o755)
    open_disk(tmp_path)
    assert mode_of(tmp_path / "0") == 0o700


def test_each_process_has_a_folder(tmp_path: Path) -> None:
    first, second = open_disk(tmp_path), open_disk(tmp_path)
    write(first, *LINKS)
    write(second, *LINKS[:2])
    assert len(segments(tmp_path)) == 3
    first.close()
    third = open_disk(tmp_path)
    assert [len(second), len(third)] == [2, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_killed_process_leaves_its_folder_to_the_next(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from tests.cache.stores.store_parts import chain, open_disk, write
store = open_disk(Path({str(tmp_path)!r}))
print(write(store, *chain([0, 1, 1])), flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"[True, True, True]\n"
        other = open_disk(tmp_path)
        assert len(other) == 0
        process.kill()
        process.wait()
    assert len(open_disk(tmp_path)) == 3


def test_a_folder_of_another_user_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "1").symlink_to(tmp_path)
    (tmp_path / "2").write_bytes(b"")
    lstat = Path.lstat

    def owned_by_another(path: Path) -> os.stat_result:
        status = lstat(path)
        return os.stat_result((*status[:4], status.st_uid + 1, *status[5:])) if path.name == "0" else status

    monkeypatch.setattr(Path, "lstat", owned_by_another)
    assert open_disk(tmp_path)._folder == tmp_path / "3"


def test_a_directory_that_cannot_hold_blocks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="is not a directory"):
        open_disk(file)
    with pytest.raises(ValueError, match="cannot hold blocks: Not a directory"):
        open_disk(file / "below")
    with pytest.raises(ValueError, match="cannot hold blocks: No such file"):
        open_disk(tmp_path / "no" / "parent")
    for call in ("mkdir", "open"):
        (folder := tmp_path / call).mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(errno.EROFS))
            with pytest.raises(ValueError, match="cannot hold blocks: Read-only file system"):
                open_disk(folder)


@pytest.mark.parametrize(("mode", "is_refused"), [(0o777, True), (0o1777, True), (0o775, True), (0o755, False)])
def test_a_directory_that_others_may_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_refused: bool
) -> None:
    tmp_path.chmod(mode)
    open_disk(tmp_path).close()  # owned by this user
    status = tmp_path.stat
    monkeypatch.setattr(os, "geteuid", lambda: status().st_uid + 1)
    if is_refused:
        with pytest.raises(ValueError, match="name a folder in it"):
            open_disk(tmp_path)
    else:
        with monkeypatch.context() as patch:
            patch.setattr("cache.stores.disk._claim", lambda path: (path, os.open(path.parent, os.O_RDONLY)))
            patch.setattr(DiskStore, "_recover", lambda self: None)
            open_disk(tmp_path).close()


def test_files_of_other_formats_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    for secret in (b"", b"old"):
        store = open_disk(tmp_path, record=RecordFormat(bytes(16), PAYLOAD_BYTES, secret))
        write(store, *LINKS)
        store.close()
    own = tmp_path / "0"
    keep = [own / "notes.blocks", own / f"{'0' * 32}-x.blocks", own / f"{'0' * 32}-1.blocks.txt", own / "lock"]
    for path in keep[:-1]:
        path.write_bytes(b"")
    (own / f"{'0' * 32}-7.blocks").mkdir()
    assert len(open_disk(tmp_path)) == 0
    assert set(own.iterdir()) == {*keep, own / f"{'0' * 32}-7.blocks"}


def test_a_smaller_disk_keeps_what_fits(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    write(store, *LINKS)
    store.close()
    for num_records in (5, 3, 9):
        store = open_disk(tmp_path, num_records)
        assert cached_hashes(store) == [link.block_hash for link in LINKS[: min(5, len(store))]]
        assert len(store) == min(num_records, 3 if num_records == 9 else num_records)
        assert sum(path.stat().st_size for path in segments(tmp_path)) == len(store) * RECORD.record_bytes
        store.close()
    store = open_disk(tmp_path, 9)
    assert write(store, *LINKS) == [True] * 6


def test_a_write_under_way_leaves_no_file_after_a_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_disk(tmp_path)
    for name in ("open", "pwritev"):
        write(store, *LINKS[:3])
        call = getattr(os, name)

        def clear_first(*arguments: Any, name: str = name, call: Any = call) -> Any:
            monkeypatch.setattr(os, name, call)
            store.clear()
            return call(*arguments)

        monkeypatch.setattr(os, name, clear_first)
        assert write(store, LINKS[3]) == [False]
        assert segments(tmp_path) == []
        assert len(store) == 0
    assert write(store, *LINKS) == [True] * 6, "the disk is fine"


def test_a_file_that_cannot_be_deleted_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_disk(tmp_path)
    write(store, *LINKS)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing(errno.EPERM))
        patch.setattr(Path, "unlink", failing(errno.EPERM))
        store.clear()
    assert [path.stat().st_size for path in segments(tmp_path)] == [0, 0]
    store.close()
    assert len(open_disk(tmp_path)) == 0
    assert segments(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("call", ["open", "pwritev", "close"])
def test_a_failed_write_pauses_writing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: list[float],
    caplog: pytest.LogCaptureFixture,
    call: str,
    code: int,
) -> None:
    caplog.set_level(logging.INFO)
    store = open_disk(tmp_path, 4)
    write(store, *LINKS[:2])
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(code, getattr(os, call) if call == "close" else None))
        for _ in range(3):
            assert write(store, LINKS[2]) == [False]
            clock[0] += disk.WRITE_PAUSE_S
    clock[0] -= 0.001
    assert write(store, LINKS[2]) == [False], "the pause is over too early"
    assert all(reads_exactly(store, link) for link in LINKS[:2]), "a failing write costs blocks"
    clock[0] += 0.001
    assert write(store, LINKS[2], LINKS[3]) == [True, True], "a record was lost"
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert replay(store.take_events()) == {link.block_hash for link in LINKS[:4]}


def test_a_file_that_cannot_be_made_pauses_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    store = open_disk(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(errno.ENOSPC))
        assert write(store, *LINKS[:2]) == [False, False]
    assert write(store, LINKS[0]) == [False]
    clock[0] += disk.WRITE_PAUSE_S
    assert write(store, LINKS[0]) == [True]


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit files to 3.5 records: the kernel writes a part of the fourth."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (RECORD.record_bytes * 7 // 2, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_part_of_a_record_is_none(tmp_path: Path, clock: list[float]) -> None:
    store = open_disk(tmp_path)
    assert write(store, *LINKS) == [True, True, True, False, False, False]
    assert segments(tmp_path)[0].stat().st_size == RECORD.record_bytes * 7 // 2
    assert [reads_exactly(store, link) for link in LINKS[:4]] == [True, True, True, False]
    clock[0] += disk.WRITE_PAUSE_S
    assert write(store, LINKS[3]) == [False]
    store.close()
    assert len(open_disk(tmp_path)) == 3
    assert segments(tmp_path)[0].stat().st_size == RECORD.record_bytes * 3


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_an_unreadable_block_is_dropped_with_all_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    store = open_disk(tmp_path, 6)
    write(store, *LINKS)
    store.take_events()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(code))
        assert not reads_exactly(store, LINKS[2])
    assert [link.block_hash for link in LINKS[:2]] == cached_hashes(store)
    assert [event.block_hash for event in store.take_events()] == [link.block_hash for link in LINKS[:1:-1]]
    assert write(store, *LINKS) == [True] * 6, "a record was lost"


@pytest.mark.parametrize("replacement", ["nothing", "a directory", "an empty file"])
def test_a_segment_that_is_gone_makes_room_for_another(tmp_path: Path, replacement: str, clock: list[float]) -> None:
    store = open_disk(tmp_path, 6)
    write(store, *LINKS)
    for path in segments(tmp_path):
        path.unlink()
        if replacement == "a directory":
            path.mkdir()
        elif replacement == "an empty file":
            path.touch()
    assert not any(reads_exactly(store, link) for link in LINKS)
    assert write(store, chain([1])[0], *LINKS)[1:] == [True] * 6
    assert all(reads_exactly(store, link) for link in LINKS)


def test_a_write_to_a_segment_that_is_gone_costs_that_segment(tmp_path: Path, clock: list[float]) -> None:
    store = open_disk(tmp_path, 6)
    write(store, *LINKS)
    segments(tmp_path)[1].unlink()
    others = chain([1, 1])
    assert write(store, others[0]) == [False]
    assert set(cached_hashes(store)) == {link.block_hash for link in LINKS[:4]}
    assert write(store, *others) == [True, True], "a pause for a file that was removed"


def test_a_folder_that_is_gone_is_no_error(tmp_path: Path, clock: list[float]) -> None:
    store = open_disk(tmp_path / "blocks")
    write(store, *LINKS)
    (tmp_path / "blocks").rename(tmp_path / "elsewhere")
    assert not any(reads_exactly(store, link) for link in LINKS)
    assert not any(write(store, *LINKS))
    store.clear()
    store.close()


def test_a_copy_of_a_forgotten_block_is_a_free_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_disk(tmp_path)
    write(store, *LINKS[:3])
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO))
        reads_exactly(store, LINKS[1])
    other = chain([1])[0]
    write(store, other, *LINKS[:2])  # each record is another block's now, and one block has two
    store.close()
    store = open_disk(tmp_path)
    held = cached_hashes(store)
    assert len(held) == len(set(held))
    assert {other.block_hash, *(link.block_hash for link in LINKS[:2])} <= set(held)
    assert reads_exactly(store, other)
    assert all(reads_exactly(store, link) for link in LINKS[:2])
    assert write(store, *LINKS) == [True] * 6


def test_a_folder_that_cannot_be_read_is_refused_and_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", failing(errno.EIO))
        with pytest.raises(ValueError, match="cannot be read: Input/output error"):
            open_disk(tmp_path)
    assert open_disk(tmp_path)._folder == tmp_path / "0"


def test_a_segment_whose_headers_cannot_be_read_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_disk(tmp_path)
    write(store, *LINKS)
    store.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", failing(errno.EIO))
        store = open_disk(tmp_path)
    assert len(store) == 0
    assert write(store, *LINKS) == [True] * 6
    assert len(segments(tmp_path)) == 2


def failing(code: int, call: Any = None) -> Any:
    """Return a system call that fails, after `call` if there is one."""

    def fail(*arguments: Any, **options: Any) -> Any:
        if call is not None:
            call(*arguments, **options)
        raise OSError(code, os.strerror(code))

    return fail
