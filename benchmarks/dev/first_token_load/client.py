"""A client on a plain socket: it times the first token and the gaps, and adds nothing of its own."""

from __future__ import annotations

import json
import re
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

TIMEOUT_S: Final = 300.0
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TEXT: Final = re.compile(rb'"(?:content|text)": ?"[^"]')
_END: Final = b"0\r\n\r\n"


@dataclass(slots=True)
class Timed:
    """One answer, on the monotonic clock."""

    begun_s: float
    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Between the arrivals of text."""
    num_prompt_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.begun_s


class Client:
    """One connection to one server, opened when it is needed."""

    def __init__(self, url: str, model: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._model = model
        self._socket: socket.socket | None = None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ask(self, prompt: str, num_tokens: int, *, stream: bool) -> Timed:
        """Ask for an answer. Raises SystemExit if there is none."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._address[0]}\r\nContent-Type: application/json\r\n"
        message = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        timed = Timed(time.monotonic())
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=TIMEOUT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(message)
        return self._read(self._socket, timed, stream=stream)

    def _read(self, sock: socket.socket, timed: Timed, *, stream: bool) -> Timed:
        answer, seen, last_s = b"", 0, 0.0
        while True:
            part = sock.recv(1 << 16)
            now_s = time.monotonic()
            answer += part
            if stream and len(_TEXT.findall(answer)) > seen:
                seen = len(_TEXT.findall(answer))
                if timed.first_s:
                    timed.gaps_s.append(now_s - last_s)
                timed.first_s, last_s = timed.first_s or now_s, now_s
            if not part or _is_whole(answer, stream=stream):
                break
        timed.first_s = timed.first_s or now_s
        usage = re.search(rb'"prompt_tokens": ?(\d+)', answer)
        if not answer.startswith(b"HTTP/1.1 200") or usage is None:
            raise SystemExit(f"no answer: {answer[:2000]!r}")
        timed.num_prompt_tokens = int(usage[1])
        return timed


def _is_whole(answer: bytes, *, stream: bool) -> bool:
    head, mark, body = answer.partition(b"\r\n\r\n")
    if not mark:
        return False
    length = _LENGTH.search(head)
    return len(body) >= int(length[1]) if length else body.endswith(_END)
