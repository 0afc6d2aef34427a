"""A reverse proxy that keeps what programs send and get."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import httpx

from tests.waiting import HANG_S

Body = dict[str, Any]
_HOP_BY_HOP: Final = frozenset(("connection", "content-length", "host", "keep-alive", "transfer-encoding"))
GENERATING: Final = ("/chat/completions", "/responses", "/messages")


@dataclass(eq=False)
class Exchange:
    """One request as the program sent it, and its answer as the server gave it."""

    method: str
    target: str
    headers: dict[str, str]
    raw: bytes
    status: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""
    is_cut: bool = False
    """The program left before the answer's end."""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def generates(self) -> bool:
        return self.method == "POST" and self.path.endswith(GENERATING)

    @property
    def body(self) -> Body:
        body: Body = json.loads(self.raw)
        return body


@dataclass(eq=False)
class Recorder:
    """Owns its exchanges, in the order of arrival."""

    upstream: str
    change: Callable[[str, Body], Body] = lambda path, body: body
    """Makes the body for the server of the program's path and body."""
    exchanges: list[Exchange] = field(default_factory=list)
    url: str = ""

    @property
    def requests(self) -> list[Exchange]:
        """Those that ask a model for an answer."""
        return [exchange for exchange in self.exchanges if exchange.generates]


@contextmanager
def recording(upstream: str, change: Callable[[str, Body], Body] = lambda path, body: body) -> Iterator[Recorder]:
    """Pass all requests to `upstream` while the context is open."""
    recorder = Recorder(upstream, change)

    class Handler(_Relay):
        owner = recorder

    with _Server(("127.0.0.1", 0), Handler) as server, httpx.Client(timeout=HANG_S, trust_env=False) as client:
        Handler.client = client
        recorder.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield recorder
        finally:
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False


class _Relay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Recorder
    client: httpx.Client

    def _relay(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        headers = {name.lower(): value for name, value in self.headers.items()}
        exchange = Exchange(self.command, self.path, headers, self.rfile.read(length))
        self.owner.exchanges.append(exchange)
        sent = exchange.raw
        if exchange.generates:
            sent = json.dumps(self.owner.change(exchange.path, exchange.body)).encode()
        passed = {name: value for name, value in headers.items() if name not in _HOP_BY_HOP}
        passed["accept-encoding"] = "identity"
        url = f"{self.owner.upstream}{self.path}"
        with self.client.stream(self.command, url, headers=passed, content=sent) as answer:
            exchange.status = answer.status_code
            exchange.answer_headers = dict(answer.headers)
            self.send_response(answer.status_code)
            for name, value in answer.headers.items():
                if name not in _HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            try:
                for chunk in answer.iter_raw():
                    exchange.answer += chunk
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                self.wfile.write(b"0\r\n\r\n")
            except OSError:  # the program has left; so do we, and the server sees it
                exchange.is_cut = True
                self.close_connection = True

    do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = _relay

    def log_message(self, format: str, *arguments: object) -> None:
        pass
