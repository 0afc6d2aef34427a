"""An engine's server over HTTP: JSON calls, and streams of server-sent events."""

from __future__ import annotations

import contextlib
import errno
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import aiohttp
import msgspec

from worker.adapter.api import EngineApi, EngineLostError, EngineModel, EngineRefusedError

CALL_TIMEOUT_S: Final = 5.0  # for questions that an engine answers without a step
CONNECT_TIMEOUT_S: Final = 5.0  # a lost SYN packet is sent again after 1 s and 3 s
KEEPALIVE_S: Final = 3.0
"""Engines close idle connections (vLLM after 5 s). This side closes first, so no request meets a closed one."""
_MAX_ANSWER_BYTES: Final = 16 << 20  # bounds an answer, and an event, which may have all ids of a prompt
_MAX_ERROR_BYTES: Final = 64 << 10  # and an error, whose message is cut to _MAX_MESSAGE
_MAX_MESSAGE: Final = 8 << 10
"""Characters of an error's message."""
_READ_BYTES: Final = 1 << 20  # aiohttp pauses a connection with twice as many unread bytes
_OWN_ERRORS: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
"""Errors of this side, as a name that is not found is one."""
_JSON: Final = {"content-type": "application/json"}


class EngineServer(EngineApi):
    """One engine's server, with the calls that all engines answer alike. Owned by the event loop.

    Every call raises EngineLostError, or EngineRefusedError for a status other than 200.
    """

    def __init__(self, url: str, *, key: str = "", rank: int | None = None, tls: ssl.SSLContext | None = None) -> None:
        """`key` is sent with every request, as a bearer token. A `url` of unix:PATH is a socket there.

        `rank`: the data-parallel rank, if the engine has several.
        """
        self._rank = rank
        self._url = url.rstrip("/").removesuffix("/v1")
        path = socket_path(self._url)
        self._base = "http://localhost" if path else self._url
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, limit=0, keepalive_timeout=KEEPALIVE_S)
            if path
            else aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=True if tls is None else tls),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_READ_BYTES,
        )

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: object, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data, headers = (None, {}) if body is None else (msgspec.json.encode(body), _JSON)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(
                method,
                self._base + path,
                data=data,
                headers=self._headers | headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._lost(error) from error

    async def call(
        self, method: str, path: str, body: object = None, timeout_s: float | None = CALL_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Return the status and the body of an answer; an error body may be truncated."""
        async with self._answer(method, path, body, timeout_s) as response:
            return response.status, await _body(response)

    async def json(self, method: str, path: str, body: object = None, timeout_s: float | None = CALL_TIMEOUT_S) -> Any:
        """Return the parsed body; None for an empty one."""
        status, answer = await self.call(method, path, body, timeout_s)
        if status != 200:
            raise refused(status, answer)
        try:
            return json.loads(answer) if answer else None
        except (ValueError, RecursionError) as error:
            raise EngineLostError(f"{self._url}{path} did not answer in JSON") from error

    async def events(self, path: str, body: object) -> AsyncIterator[bytes]:
        """Post `body` and yield the data of each event up to [DONE]. Closing the iterator closes the connection."""
        async with self._answer("POST", path, body, None) as response:
            if response.status != 200:
                raise refused(response.status, await _body(response))
            rest, is_done = b"", False
            async for part in response.content.iter_any():  # up to its end, so that the connection can be reused
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > _MAX_ANSWER_BYTES:
                    raise AnswerTooLongError
                for line in lines:
                    if line.startswith(b"data:") and not is_done:
                        data = line[5:].strip()
                        if data == b"[DONE]":
                            is_done = True
                        else:
                            yield data
        if not is_done:
            raise EngineLostError("the answer ended early")

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
        await self._session.close()

    def _lost(self, error: Exception) -> EngineLostError:
        is_own = isinstance(error, aiohttp.ClientConnectorDNSError) or getattr(error, "errno", None) in _OWN_ERRORS
        is_unconnected = isinstance(error, aiohttp.ClientConnectorError | ConnectionRefusedError)
        is_closed = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError) and not is_unconnected
        remedy = "; give its authority as --engine-ca" * isinstance(error, aiohttp.ClientConnectorCertificateError)
        why = f"{self._url}: {type(error).__name__}: {error!s:.300}{remedy}"
        return EngineLostError(why, gone=is_unconnected and not is_own, closed=is_closed, unsent=is_unconnected)


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


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """Read the body of an answer, or the start of an error. Raises EngineLostError if an answer is too long."""
    parts, num_bytes = [], 0
    async for part in response.content.iter_any():
        num_bytes += len(part)
        if num_bytes > (_MAX_ANSWER_BYTES if response.status == 200 else _MAX_ERROR_BYTES):
            if response.status != 200:
                break
            raise AnswerTooLongError
        parts.append(part)
    return b"".join(parts)


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
