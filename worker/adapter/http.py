"""An engine's server over HTTP: JSON calls, and streams of server-sent events."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import aiohttp
import msgspec

from worker.adapter.api import EngineLostError, EngineModel, EngineRefusedError

CALL_TIMEOUT_S: Final = 5.0
CONNECT_TIMEOUT_S: Final = 5.0
KEEPALIVE_S: Final = 3.0
"""An engine closes idle connections (vLLM after 5 s): this side does it first, so no request meets the close."""
_READ_BYTES: Final = 1 << 20
_JSON: Final = {"content-type": "application/json"}


class EngineServer:
    """One engine's server, with the calls that vLLM and SGLang answer alike. Owned by the event loop.

    Every call raises EngineLostError, and EngineRefusedError for a status but 200.
    """

    def __init__(self, url: str, key: str, tls: ssl.SSLContext | None, headers: Mapping[str, str]) -> None:
        """`headers` are sent with every request, `key` as a bearer token."""
        self._url = url.rstrip("/")
        self._headers = dict(headers) | ({"authorization": f"Bearer {key}"} if key else {})
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=True if tls is None else tls),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def call(
        self, method: str, path: str, body: object = None, timeout_s: float | None = CALL_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        data, headers = (None, {}) if body is None else (msgspec.json.encode(body), _JSON)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(
                method, self._url + path, data=data, headers=self._headers | headers, timeout=timeout
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._lost(error) from error

    async def json(self, method: str, path: str, body: object = None, timeout_s: float | None = CALL_TIMEOUT_S) -> Any:
        """Return the parsed body; None for an empty one."""
        status, answer = await self.call(method, path, body, timeout_s)
        if status != 200:
            raise EngineRefusedError(status, _message(answer))
        try:
            return json.loads(answer) if answer else None
        except ValueError as error:
            raise EngineLostError(f"{self._url}{path} did not answer in JSON") from error

    async def events(self, path: str, body: object) -> AsyncIterator[bytes]:
        """Post `body` and yield the data of each event up to [DONE]. Closing the iterator closes the connection."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.post(
                self._url + path,
                data=msgspec.json.encode(body),
                headers=self._headers | _JSON,
                timeout=timeout,
                read_bufsize=_READ_BYTES,
            ) as response:
                if response.status != 200:
                    raise EngineRefusedError(response.status, _message(await response.read()))
                rest, is_done = b"", False
                async for part in response.content.iter_any():  # to its very end, so that the connection is kept
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data:") and not is_done:
                            data = line[5:].strip()
                            if data == b"[DONE]":
                                is_done = True
                            else:
                                yield data
                if is_done:
                    return
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._lost(error) from error
        raise EngineLostError("the answer broke off")

    async def model(self) -> EngineModel:
        """Return the model that the server lists, and the LoRA adapters that name it as their parent."""
        listed = (await self.json("GET", "/v1/models"))["data"]
        base = [model for model in listed if not model.get("parent")]
        if not base:
            raise EngineRefusedError(404, "it lists no model")
        adapters = tuple(sorted(model["id"] for model in listed if model.get("parent")))
        return EngineModel(base[0]["id"], str(base[0].get("root") or ""), int(base[0]["max_model_len"]), adapters)

    async def is_healthy(self) -> bool:
        status, _ = await self.call("GET", "/health")
        return status == 200

    async def tokenize(self, text: str) -> list[int]:
        answer = await self.json("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})
        return [int(token_id) for token_id in answer["tokens"]]

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    def _lost(self, error: Exception) -> EngineLostError:
        gone = isinstance(error, (aiohttp.ClientConnectorError, ConnectionRefusedError))
        return EngineLostError(f"{self._url}: {type(error).__name__}: {error!s:.300}", gone=gone)


def _message(body: bytes) -> str:
    """Return the engine's own words from the body of an error."""
    try:
        answer = json.loads(body)
        error = answer.get("error", answer)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:1000]
    except (ValueError, AttributeError):
        return body[:300].decode(errors="replace")
