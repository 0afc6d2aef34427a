"""An engine's server over HTTP: JSON calls, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
import socket
import ssl
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any, Final, Self
from urllib.parse import urlsplit
from weakref import WeakSet

import msgspec

from worker.adapter.api import EngineApi, EngineLostError, EngineModel, EngineRefusedError
from worker.common.http_client import HttpConnection

CALL_TIMEOUT_S: Final = 5.0  # for questions that an engine answers without a step
_CLOSING_S: Final = 0.05
"""Time until the ends of connections that the engine has closed are known."""
CONNECT_TIMEOUT_S: Final = 5.0  # a lost SYN packet is sent again after 1 s and 3 s
KEEPALIVE_S: Final = 3.0
"""Engines close idle connections (vLLM after 5 s). This side closes first, so no request meets a closed one."""
_MAX_ANSWER_BYTES: Final = 16 << 20  # bounds an answer, and an event, which may have all ids of a prompt
_MAX_ERROR_BYTES: Final = 64 << 10  # and an error, whose message is cut to _MAX_MESSAGE
_MAX_MESSAGE: Final = 8 << 10
"""Characters of an error's message."""
_OWN_ERRORS: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
"""Errors of this side, as a name that is not found is one."""
_JSON: Final = {"content-type": "application/json"}
_SAMPLE: Final = re.compile(rb"^([a-zA-Z_:]+)(?:\{([^}]*)\})? ([^ \n]+)", re.MULTILINE)
_LABEL: Final = re.compile(rb'(\w+)="([^"]*)"')


class EngineServer(EngineApi):
    """One engine's server, with the calls that all engines answer alike. Owned by the event loop.

    Every call raises EngineLostError. All but `call` raise EngineRefusedError for a status other than 200.
    """

    def __init__(self, url: str, *, key: str = "", rank: int | None = None, tls: ssl.SSLContext | None = None) -> None:
        """`key` is sent with every request, as a bearer token. A `url` of unix:PATH is a socket there.

        `rank`: the data-parallel rank, if the engine has several.
        """
        self._rank = rank
        self._url = url.rstrip("/").removesuffix("/v1")
        self._socket = socket_path(self._url)
        self._address = urlsplit("http://localhost" if self._socket else self._url)
        self._headers = {"host": self._address.netloc} | ({"authorization": f"Bearer {key}"} if key else {})
        self._tls = tls
        self._idle: list[_EngineConnection] = []
        """Connections whose answers have ended."""
        self._open = WeakSet[_EngineConnection]()

    async def call(
        self, method: str, path: str, body: object = None, timeout_s: float | None = CALL_TIMEOUT_S, num_tries: int = 1
    ) -> tuple[int, bytes]:
        """Return the status and the body of an answer; an error body may be truncated.

        It is sent again if its connection ends without an answer, in `num_tries` all together. A GET is sent twice: the
        engine may have closed an idle connection.
        """
        for tries_left in reversed(range(2 if method == "GET" else num_tries)):
            try:
                async with asyncio.timeout(timeout_s):
                    with await self._asked(method, path, body) as connection:
                        status = await connection.head()
                        answer = await connection.read_start(_MAX_ANSWER_BYTES if status == 200 else _MAX_ERROR_BYTES)
                break
            except TimeoutError as error:
                raise EngineLostError(self._why(error)) from error
            except EngineLostError as error:
                if not (tries_left and error.closed):
                    raise
            await asyncio.sleep(_CLOSING_S)
        if status == 200 and len(answer) > _MAX_ANSWER_BYTES:
            raise AnswerTooLongError
        return status, answer

    async def content(
        self, method: str, path: str, body: object = None, timeout_s: float | None = CALL_TIMEOUT_S, num_tries: int = 1
    ) -> bytes:
        """Return the body of an answer with status 200."""
        status, answer = await self.call(method, path, body, timeout_s, num_tries)
        if status != 200:
            raise refused(status, answer)
        return answer

    async def json(self, method: str, path: str, body: object = None, timeout_s: float | None = CALL_TIMEOUT_S) -> Any:
        """Return the parsed body; None for an empty one."""
        answer = await self.content(method, path, body, timeout_s)
        try:
            return json.loads(answer) if answer else None
        except (ValueError, RecursionError) as error:
            raise EngineLostError(f"{self._url}{path} did not answer in JSON") from error

    async def events(self, path: str, body: object, take: Callable[[bytes], None]) -> None:
        """Post `body` and hand the data of each event to `take`, up to [DONE]. To cancel it closes the connection."""
        rest, is_done = b"", False

        def split(part: bytes) -> None:
            nonlocal rest, is_done
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > _MAX_ANSWER_BYTES:
                raise AnswerTooLongError
            for line in lines:
                if line.startswith(b"data:") and not is_done:
                    data = line[5:].strip()
                    is_done = data == b"[DONE]"
                    if not is_done:
                        take(data)

        with await self._asked("POST", path, body) as connection:
            if (status := await connection.head()) != 200:
                raise refused(status, await connection.read_start(_MAX_ERROR_BYTES))
            await connection.pass_on(split)  # up to its end, so that the connection can be reused
            if not is_done:
                raise EngineLostError("the answer ended early")

    async def _asked(self, method: str, path: str, body: object) -> _EngineConnection:
        """Send a request. Return the connection, which has the answer."""
        content, headers = (b"", self._headers) if body is None else (msgspec.json.encode(body), self._headers | _JSON)
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        connection = await self._connect()
        connection.send(f"{method} {self._address.path}{path}".encode(), lines.encode(), content)
        return connection

    async def _connect(self) -> _EngineConnection:
        """Return an idle connection, or a new one."""
        while self._idle:
            if (connection := self._idle.pop()).usable:
                return connection
        loop, address = asyncio.get_running_loop(), self._address
        make = partial(_EngineConnection, self._idle, self._open, self._url)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if self._socket:
                    return (await loop.create_unix_connection(make, self._socket))[1]
                is_tls = address.scheme == "https"
                port, tls = address.port or (443 if is_tls else 80), (self._tls or True) if is_tls else None
                return (await loop.create_connection(make, address.hostname or "", port, ssl=tls))[1]
        except OSError as error:
            is_own = isinstance(error, socket.gaierror | TimeoutError) or error.errno in _OWN_ERRORS
            remedy = "; give its authority as --engine-ca" * isinstance(error, ssl.SSLCertVerificationError)
            raise EngineLostError(self._why(error) + remedy, gone=not is_own, unsent=True) from error

    async def model(self) -> EngineModel:
        """Return the model that the server lists, and the LoRA adapters that name it as their parent."""
        answer = await self.json("GET", "/v1/models")
        with understood("/v1/models"):
            bases = [model for model in answer["data"] if not model.get("parent")]
            loras = tuple(sorted(str(model["id"]) for model in answer["data"] if model.get("parent")))
            if bases:
                name, *aliases = [str(model["id"]) for model in bases]
                source, max_model_len = str(bases[0].get("root") or ""), int(bases[0]["max_model_len"])
                return EngineModel(name, source, max_model_len, loras, tuple(sorted(aliases)))
        raise EngineRefusedError(404, "it lists no model")

    async def is_healthy(self) -> bool:
        status, _ = await self.call("GET", "/health")
        return status == 200

    async def tokenize(self, text: str) -> list[int]:
        return await self.token_ids({"prompt": text, "add_special_tokens": False})

    async def token_ids(self, body: object, timeout_s: float = CALL_TIMEOUT_S) -> list[int]:
        """Return the ids that `/tokenize` gives for a body."""
        answer = await self.json("POST", "/tokenize", body, timeout_s)
        with understood("/tokenize"):
            return [int(token_id) for token_id in answer["tokens"]]

    async def close(self) -> None:
        """Close every connection."""
        for connection in [*self._open]:
            connection.close()
        await asyncio.sleep(0)  # in which their sockets are closed

    def _why(self, error: Exception) -> str:
        return f"{self._url}: {type(error).__name__}: {error!s:.300}"


class _EngineConnection(HttpConnection):
    """A connection to the engine. `opened` has it while its transport does."""

    def __init__(self, idle: list[Self], opened: WeakSet[Self], url: str) -> None:
        super().__init__(idle, KEEPALIVE_S)
        opened.add(self)
        self._url = url

    def lost(self, why: str, *, is_stale: bool) -> EngineLostError:
        return EngineLostError(f"{self._url}: {why}", closed=self._status is None)


def socket_path(url: str) -> str:
    """Return the path of a URL unix:PATH or unix://PATH; empty for another."""
    return url.removeprefix("unix:").removeprefix("//") if url.startswith("unix:") else ""


@contextlib.contextmanager
def understood(path: str) -> Iterator[None]:
    """Raise EngineLostError for an unexpected answer: another server may listen there."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EngineLostError(f"{path} has an unexpected answer: {type(error).__name__}: {error!s:.200}") from error


def samples(page: bytes, names: Container[bytes]) -> list[tuple[bytes, dict[bytes, bytes], float]]:
    """Return name, labels and value of the samples of these metrics, in the Prometheus text format. Raises ValueError.

    The parser of prometheus_client reads every sample of a page, which is asked for each second.
    """
    found = [(name, labels, value) for name, labels, value in _SAMPLE.findall(page) if name in names]
    return [(name, dict(_LABEL.findall(labels)), float(value)) for name, labels, value in found]


class AnswerTooLongError(EngineLostError):
    """An answer is larger than its bound."""

    def __init__(self) -> None:
        super().__init__(f"the engine's answer has more than {_MAX_ANSWER_BYTES >> 20} MiB")


def refused(status: int, body: bytes) -> EngineRefusedError:
    """Return the exception for an answer with an error status."""
    try:
        answer = json.loads(body)
        error = answer.get("error", answer)
    except (ValueError, AttributeError, RecursionError):
        return EngineRefusedError(status, body[:300].decode(errors="replace"))
    return refusal_of(status, error)


def refusal_of(status: int, error: Any) -> EngineRefusedError:
    """Return the exception for an engine's error, which is an object or a text."""
    fields = error if isinstance(error, dict) else {}
    param = fields.get("param")
    message = str(fields.get("message", error))[:_MAX_MESSAGE]
    return EngineRefusedError(status, message, param if isinstance(param, str) else None)
