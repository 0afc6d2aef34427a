"""Where a Redis is, and how a connection to it is opened: one server, a unix socket, TLS, Sentinel or a Cluster.

redis://[user:password@]host[:port][/db]      rediss://... the same over TLS (ssl_ca_certs=... and so on)
unix:///path/to/socket[?db=0]
redis+sentinel://[user:password@]host:port,host:port/service[?db=0]        rediss+sentinel:// over TLS
redis+cluster://[user:password@]host:port,host:port        rediss+cluster:// over TLS
"""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio.connection import AbstractConnection, Connection, DefaultParser, SSLConnection, parse_url
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import ConnectionError, InvalidResponse, RedisError

_PLAIN: Final = ("redis", "rediss", "unix")
_SENTINEL: Final = ("redis+sentinel", "rediss+sentinel")
_DEFAULT_PORT: Final = 6379
_DEFAULT_SENTINEL_PORT: Final = 26379
MAX_REPLY_BYTES: Final = 64 << 20
"""Twice a registry of 20,000 workers. Whoever may write to Redis could otherwise fill the memory of every reader."""


_MILLIONS: Final = re.compile(rb"[*~%>|][0-9]{7}")
_SHORT_BYTES: Final = 2048


class BoundedParser(DefaultParser):  # type: ignore[misc, valid-type]
    """Redis-py's parser, with an end to how much one reply may take.

    The parser below reserves memory for as many elements as a list announces, and visits them all to free it: seconds.
    Such headers are looked for in short reads and at the start of long ones; a search of every read would cost a lookup
    among 64 workers 3 %.
    """

    __slots__ = ("_num_read",)

    async def read_response(self, disable_decoding: bool = False, push_request: bool = False) -> Any:
        self._num_read = 0
        return await super().read_response(disable_decoding=disable_decoding, push_request=push_request)

    async def read_from_socket(self) -> bool:
        """Raises ConnectionError at the end of the stream, InvalidResponse past MAX_REPLY_BYTES."""
        data = await self._stream.read(self._read_size)
        if not data:
            raise ConnectionError("connection closed by Redis")
        self._num_read += len(data)
        if self._num_read > MAX_REPLY_BYTES:
            raise InvalidResponse(f"a reply of more than {MAX_REPLY_BYTES} bytes")
        suspect = _MILLIONS.search(data) if len(data) <= _SHORT_BYTES else _MILLIONS.match(data)
        if suspect and not self._reader.has_data() and _announces_millions(data):
            raise InvalidResponse("a reply of millions of elements")
        self._reader.feed(data)
        return True


def _announces_millions(data: bytes) -> bool:
    """Whether one of the headers of replies that begin with `data` is that of such a list. Values are passed over."""
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        kind, number = data[at : at + 1], data[at + 1 : end]
        if kind in (b"*", b"~", b"%", b">", b"|") and len(number) >= 7:
            return True
        at = end + 2
        if kind in (b"$", b"=", b"!") and number.isdigit():
            at += int(number[:12]) + 2
    return False


class Endpoint:
    """Opens connections to the server that is right now: the primary of a Sentinel service, the owner of a slot.

    `password` and `username`, when given, replace those of the URL, so that secrets can come from files.
    """

    def __init__(
        self, url: str, *, connect_timeout_s: float, username: str | None = None, password: str | None = None
    ) -> None:
        scheme = urlsplit(url).scheme
        if scheme not in (*_PLAIN, *_SENTINEL, "redis+cluster", "rediss+cluster"):
            raise ValueError(
                f"Redis URL {_without_password(url)!r}: use redis://, rediss://, unix://, redis[s]+sentinel://"
                " or redis[s]+cluster://"
            )
        self._common: dict[str, Any] = {
            "socket_connect_timeout": connect_timeout_s,
            "socket_timeout": None,
            "protocol": 2,
            "driver_info": None,
            "parser_class": BoundedParser,
        }
        if username:
            self._common["username"] = username
        if password:
            self._common["password"] = password
        self.is_cluster = scheme in ("redis+cluster", "rediss+cluster")
        self._timeout_s = connect_timeout_s
        self._service = ""
        self._turn = 0
        self._moved: tuple[str, int] | None = None
        self._nodes: list[tuple[str, int]] = []
        self.label = _without_password(url)
        if scheme in _PLAIN:
            self._options: dict[str, Any] = dict(parse_url(url))
            self._kind: type[AbstractConnection] = self._options.pop("connection_class", Connection)
        else:
            self._parse_nodes(url, scheme)

    def _parse_nodes(self, url: str, scheme: str) -> None:
        """`user:password@host:port,host:port/service`: parse_url knows one host only, so it gets the first."""
        parts = urlsplit(url)
        credentials, _, hosts = parts.netloc.rpartition("@")
        default = _DEFAULT_SENTINEL_PORT if scheme in _SENTINEL else _DEFAULT_PORT
        self._nodes = [_host_and_port(host, default) for host in hosts.split(",") if host]
        if not self._nodes:
            raise ValueError(f"Redis URL {self.label!r} names no host")
        single = f"{scheme.partition('+')[0]}://{credentials + '@' if credentials else ''}{self._nodes[0][0]}"
        query = dict(parse_qsl(parts.query))
        if scheme in _SENTINEL:
            self._service = unquote(parts.path.strip("/"))
            if not self._service:
                raise ValueError(f"Redis URL {self.label!r} names no Sentinel service: redis+sentinel://host:port/NAME")
            single += f"/{query.pop('db', '0')}"
        if query:
            single += "?" + "&".join(f"{name}={value}" for name, value in query.items())
        self._options = dict(parse_url(single))
        self._kind = self._options.pop("connection_class", Connection)

    async def open(self) -> AbstractConnection:
        """A connected, authenticated connection. Raises RedisError, OSError or TimeoutError."""
        address: dict[str, Any] = {}
        if self._moved is not None:
            address = {"host": self._moved[0], "port": self._moved[1]}
        elif self._service:
            host, port = await self._primary()
            address = {"host": host, "port": port}
        elif self._nodes:
            host, port = self._nodes[self._turn % len(self._nodes)]
            address = {"host": host, "port": port}
        connection = self._kind(**{**self._options, **self._common, **address})
        await connection.connect()  # type: ignore[no-untyped-call]
        return connection

    async def _primary(self) -> tuple[str, int]:
        options: dict[str, Any] = {"socket_timeout": self._timeout_s, "socket_connect_timeout": self._timeout_s}
        if issubclass(self._kind, SSLConnection):
            options |= {name: value for name, value in self._options.items() if name.startswith("ssl_")} | {"ssl": True}
        sentinel = Sentinel(self._nodes, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
        try:
            host, port = await sentinel.discover_master(self._service)
        finally:
            for client in sentinel.sentinels:
                await client.aclose()
        return str(host), int(port)

    def redirect(self, host: str, port: int) -> None:
        """The server said that another node of the cluster owns our slot: the next `open` goes there."""
        self._moved = (host, port)

    def failed(self) -> None:
        """The last connection could not be opened or broke: forget the redirection and try the next seed."""
        self._moved = None
        self._turn += 1


def check_url(name: str, url: str) -> None:
    """Raises ValueError, which begins with `name`, for what is no address of a Redis."""
    try:
        Endpoint(url, connect_timeout_s=0.0)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def moved_to(error: RedisError) -> tuple[str, int] | None:
    """Host and port of a cluster's MOVED answer, or None for any other error."""
    host, port = getattr(error, "host", None), getattr(error, "port", None)
    if type(error).__name__ == "MovedError" and isinstance(host, str) and isinstance(port, int):
        return host, port
    return None


def _host_and_port(text: str, default: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    return parts.hostname or "localhost", parts.port or default


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
