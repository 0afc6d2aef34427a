"""Connections to Redis: one server, a unix socket, TLS, Sentinel or a Cluster, each with a limit on a reply's size."""

from __future__ import annotations

import asyncio
import re
from asyncio import StreamReader
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from os.path import isfile
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio.connection import AbstractConnection, Connection, DefaultParser, SSLConnection, parse_url
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import ConnectionError, InvalidResponse, RedisError

MAX_REPLY_BYTES: Final = 8 << 20
"""The default limit for a reply: other users of Redis must not fill a reader's memory."""
_REST_BYTES: Final = 1 << 20  # parsed between two rests of the loop
_SHORT_BYTES: Final = 2048  # longer reads are not searched whole: it would slow lookups by 3 %
_MILLIONS: Final = re.compile(rb"[*~%>|][0-9]{7}")
_DEFAULT_PORTS: Final = {"": 6379, "cluster": 6379, "sentinel": 26379}
_FORMS: Final = "redis://, rediss://, unix://, redis[s]+sentinel:// or redis[s]+cluster://"


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """The settings that all readers and writers of one index share."""

    prefix: str = "headstart"
    num_shards: int = 1
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    cluster_secret: bytes = field(default=b"", repr=False)
    """Signs every entry; entries without its signature are ignored. Empty: nothing is signed or checked."""


@dataclass(frozen=True, slots=True)
class WriterSettings(IndexSettings):
    lease_s: float = 6.0
    set_ttl_s: float = 120.0
    timeout_s: float = 2.0
    chunk: int = 1000
    """Entries per SADD; lookups wait while Redis executes it."""
    chunks_in_flight: int = 8
    dead_after_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class ClientSettings:
    username: str | None = None
    """Replaces the user in the URL, like `password`, so that secrets can come from files."""
    password: str | None = field(default=None, repr=False)
    connect_timeout_s: float = 2.0
    stall_s: float = 2.0
    """Reconnect when the oldest reply is this late."""
    max_pending: int = 4096
    first_backoff_s: float = 0.05
    max_backoff_s: float = 2.0


class BoundedParser(DefaultParser):  # type: ignore[misc, valid-type]
    """Redis-py's parser with a limit on the size of a reply. A reply takes twice its size in memory.

    The base class allocates as many elements as a list announces, and takes seconds to free millions. So this class
    searches short reads, and the start of long reads, for such headers. Searching every read would slow a lookup among
    64 workers by 3 %.
    """

    __slots__ = ("_limit", "_num_read", "_num_rests")

    def __init__(self, limit: Callable[[], int] = lambda: MAX_REPLY_BYTES, *, socket_read_size: int) -> None:
        """`limit` returns the maximum size of the current reply in bytes."""
        super().__init__(socket_read_size=socket_read_size)
        self._limit = limit

    async def read_response(self, disable_decoding: bool = False, push_request: bool = False) -> Any:
        self._num_read = self._num_rests = 0
        return await super().read_response(disable_decoding=disable_decoding, push_request=push_request)

    async def read_from_socket(self) -> bool:
        """Raises ConnectionError at the end of the stream, InvalidResponse past the limit."""
        if self._num_read // _REST_BYTES > self._num_rests:  # the stream may have more data: yield to other tasks
            self._num_rests += 1
            await asyncio.sleep(0)
        stream: StreamReader | None = self._stream
        data = b"" if stream is None else await stream.read(self._read_size)
        reader: Any = self._reader
        if not data or reader is None:
            raise ConnectionError("connection closed by Redis")
        self._num_read += len(data)
        if self._num_read > (limit := self._limit()):
            raise InvalidResponse(f"a reply of more than {limit} bytes")
        suspect = _MILLIONS.search(data) if len(data) <= _SHORT_BYTES else _MILLIONS.match(data)
        if suspect and not reader.has_data() and _announces_millions(data):
            raise InvalidResponse("a reply of millions of elements")
        reader.feed(data)
        return True

    def on_disconnect(self) -> None:
        """Free a partial reply: the connection is in a cycle with its transport, and may live long."""
        super().on_disconnect()
        self._reader = self._stream = None  # type: ignore[misc]


def _announces_millions(data: bytes) -> bool:
    """Return whether `data`, which begins with a reply, has the header of such a list. Skips values."""
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
    """Opens connections to the current server of a URL: Sentinel's primary, or the cluster node of the slot.

    redis://[user:password@]host[:port][/db]      rediss://... over TLS (ssl_ca_certs=... and so on)
    unix:///path/to/socket[?db=0]
    redis[s]+sentinel://[user:password@]host:port,host:port/service[?db=0]
    redis[s]+cluster://[user:password@]host:port,host:port
    """

    def __init__(self, url: str, settings: ClientSettings) -> None:
        """Raises ValueError for any other URL."""
        parts = urlsplit(url)
        self.label = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
        """The URL without its password."""
        scheme, _, kind = parts.scheme.partition("+")
        is_known = scheme in (("redis", "rediss") if kind else ("redis", "rediss", "unix")) and kind in _DEFAULT_PORTS
        if not is_known or not (kind or scheme == "unix" or re.fullmatch(r"/?\d*", parts.path)):
            raise ValueError(f"Redis URL {self.label!r}: use {_FORMS}")
        self.is_cluster = kind == "cluster"
        self._timeout_s = settings.connect_timeout_s
        self._service = ""
        self._nodes: list[tuple[str, int]] = []
        self._num_failures = 0
        self._moved: tuple[str, int] | None = None
        self._options: dict[str, Any] = dict(parse_url(self._one_host(url, scheme, kind) if kind else url))
        self._kind: type[AbstractConnection] = self._options.pop("connection_class", Connection)
        self._options |= {
            "socket_connect_timeout": settings.connect_timeout_s,
            "socket_timeout": None,
            "protocol": 2,
            "driver_info": None,
        }
        credentials = {"username": settings.username, "password": settings.password}
        self._options |= {name: value for name, value in credentials.items() if value}
        files = (self._options.get(name) for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"))
        if missing := next((file for file in files if file and not isfile(file)), None):
            raise ValueError(f"Redis URL {self.label!r}: there is no file {missing}")
        try:
            self._kind(**self._options)
        except (AttributeError, TypeError, RedisError) as error:  # redis-py checks the names and values of the query
            raise ValueError(f"Redis URL {self.label!r}: {str(error).rpartition('() ')[2]}") from error

    def _one_host(self, url: str, scheme: str, kind: str) -> str:
        """Extract the hosts and the service from `url`, and return redis-py's form of it, with one host."""
        parts = urlsplit(url)
        credentials, at, hosts = parts.netloc.rpartition("@")
        self._nodes = [_host_and_port(host, _DEFAULT_PORTS[kind]) for host in hosts.split(",") if host]
        if not self._nodes:
            raise ValueError(f"Redis URL {self.label!r} names no host")
        single = f"{scheme}://{credentials}{at}localhost"  # which `open` replaces
        query = dict(parse_qsl(parts.query))
        if kind == "sentinel":
            self._service = unquote(parts.path.strip("/"))
            if not self._service:
                raise ValueError(f"Redis URL {self.label!r} names no Sentinel service: redis+sentinel://host:port/NAME")
            single += f"/{query.pop('db', '0')}"
        return single + "?" + "&".join(f"{name}={value}" for name, value in query.items())

    async def open(self, limit: Callable[[], int] = lambda: MAX_REPLY_BYTES) -> AbstractConnection:
        """Return a connected, authenticated connection. Raises RedisError, OSError or TimeoutError.

        `limit` is that of `BoundedParser`.
        """
        options = {**self._options, "parser_class": partial(BoundedParser, limit)}
        if self._service:
            options["host"], options["port"] = await self._primary()
        elif self._nodes:
            options["host"], options["port"] = self._moved or self._nodes[self._num_failures % len(self._nodes)]
        connection = self._kind(**options)
        await connection.connect()  # type: ignore[no-untyped-call]
        return connection

    async def _primary(self) -> tuple[str, int]:
        options: dict[str, Any] = {"socket_timeout": self._timeout_s, "socket_connect_timeout": self._timeout_s}
        if issubclass(self._kind, SSLConnection):
            options |= {name: value for name, value in self._options.items() if name.startswith("ssl_")} | {"ssl": True}
        sentinel = Sentinel(self._nodes, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
        for client in sentinel.sentinels:
            client.connection_pool.connection_kwargs["parser_class"] = BoundedParser
        try:
            host, port = await sentinel.discover_master(self._service)
        finally:
            for client in sentinel.sentinels:
                await client.aclose()
        return str(host), int(port)

    def redirect(self, host: str, port: int) -> None:
        """Open the next connection to the cluster node that owns the slot."""
        self._moved = (host, port)

    def failed(self) -> None:
        """Forget the redirection and try the next host, after a connection has failed."""
        self._moved = None
        self._num_failures += 1


def check_url(name: str, url: str) -> None:
    """Raises a ValueError that begins with `name` for a URL of unknown form."""
    try:
        Endpoint(url, ClientSettings())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _host_and_port(text: str, default: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    return parts.hostname or "localhost", parts.port or default
