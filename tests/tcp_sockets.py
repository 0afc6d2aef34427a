"""The TCP sockets of a process, asked for their options as the kernel has them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.waiting import wait_until

_PIDFD_GETFD: Final = 438
"""The number of the system call on every architecture of Linux. Python has no function for it."""


@dataclass(frozen=True)
class TcpSocket:
    """An established connection of a process, at one of its two ends."""

    pid: int
    local_port: int
    remote_port: int
    no_delay: bool


def established(pid: int) -> Iterator[TcpSocket]:
    """Yield the established TCP connections of a process: this one, or a child of it."""
    with _opened(pid) as process:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed since, or not connected
                if os.readlink(entry).startswith("socket:") and (found := _ask(pid, process, int(entry.name))):
                    yield found


def check_connections(pids: list[int], accepted: dict[str, int], opened: dict[str, int]) -> None:
    """Check the connections of these processes. There has to be one at each port, given by name."""
    found: list[TcpSocket] = []

    def is_complete() -> bool:
        found[:] = [sock for pid in pids for sock in established(pid)]
        local, remote = {sock.local_port for sock in found}, {sock.remote_port for sock in found}
        return local >= set(accepted.values()) and remote >= set(opened.values())

    wait_until(is_complete, what="a connection at each port")
    names = {port: name for name, port in (accepted | opened).items()}
    delayed = [(names.get(s.local_port, s.local_port), names.get(s.remote_port, s.remote_port), s) for s in found]
    assert not [sock for sock in delayed if not sock[2].no_delay]


@contextlib.contextmanager
def _opened(pid: int) -> Iterator[int]:
    try:
        process = os.pidfd_open(pid)
    except (AttributeError, OSError) as error:
        pytest.skip(f"this system shows no sockets of other processes: {error}")
    try:
        yield process
    finally:
        os.close(process)


def _ask(pid: int, process: int, number: int) -> TcpSocket | None:
    copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, number, 0)
    if copy < 0:
        if ctypes.get_errno() in (errno.EPERM, errno.ENOSYS):
            pytest.skip("this system shows no sockets of other processes")
        return None
    with socket.socket(fileno=copy) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return None
        no_delay = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        return TcpSocket(pid, sock.getsockname()[1], sock.getpeername()[1], bool(no_delay))
