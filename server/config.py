"""The options of a gateway, from the command line into one frozen dataclass."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from cache.redis_index import check_key_part, check_url
from server.http.tls import ServerCertificate, WorkerCa
from server.logs import LOG_FORMATS, LogFormat
from server.router.policies import POLICIES
from server.text.parsing.formats import MARKERS, ToolFormat
from server.workers.networks import DEFAULT_NETWORKS, WorkerNetworks

_SECRET_VARIABLE: Final = "HEADSTART_CLUSTER_SECRET"
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,253}")
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Raises ValueError that names the option."""

    host: str = "127.0.0.1"
    port: int = 8000
    ops_host: str = "127.0.0.1"
    ops_port: int = 8001
    ops_hosts: tuple[str, ...] = ()
    share_port: bool = False
    redis: str | None = None
    redis_prefix: str = "headstart"
    redis_shards: int = 1
    redis_username: str | None = None
    redis_password_file: str | None = None
    lookup_deadline_s: float = 0.025
    workers: tuple[str, ...] = ()
    policy: str = "headstart"
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    tool_parser: ToolFormat | None = None
    reasoning: bool | None = None
    control_tokens_in_content: bool = False
    cluster_secret_file: str | None = None
    worker_networks: tuple[str, ...] = DEFAULT_NETWORKS
    worker_ca: str | None = None
    worker_tls_name: str | None = None
    api_keys: str | None = None
    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 64 << 10
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    max_connections: int = 8192
    ops_key_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    request_timeout_s: float = 3600.0
    keepalive_s: float = 15.0
    drain_grace_s: float = 30.0
    stall_s: float = 5.0
    max_queued_tokens: int = 1 << 22
    log_level: str = "info"
    log_format: LogFormat = "text"
    access_log: bool = False
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        for name in ("port", "ops_port"):
            if not 0 <= getattr(self, name) < 1 << 16:
                raise ValueError(f"{_option(name)} must be 0 to 65535, got {getattr(self, name)}")
        for name in (
            "max_body_bytes",
            "max_header_bytes",
            "header_timeout_s",
            "body_timeout_s",
            "max_connections",
            "request_timeout_s",
            "keepalive_s",
            "lookup_deadline_s",
            "stall_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{_option(name)} must be above 0, got {getattr(self, name)}")
        if self.max_queued_tokens < 1:
            raise ValueError(f"--max-queued-tokens must be at least 1, got {self.max_queued_tokens}")
        if self.drain_grace_s < 0:
            raise ValueError(f"--drain-grace-s must not be negative, got {self.drain_grace_s}")
        if self.redis_shards < 1:
            raise ValueError(f"--redis-shards must be at least 1, got {self.redis_shards}")
        if self.redis is not None:
            check_url("--redis", self.redis)
            check_key_part("--redis-prefix", self.redis_prefix)
        WorkerNetworks(self.worker_networks)
        for name in self.ops_hosts:
            if _HOST_NAME.fullmatch(name) is None:
                raise ValueError(f"--ops-hosts takes names without scheme and port, got {name!r}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together: give both or none")
        if self.worker_ca is not None and (plain := [url for url in self.workers if url.startswith("http:")]):
            raise ValueError(f"--workers {plain[0]}: --worker-ca asks for TLS, so give https://HOST:PORT")
        if self.worker_tls_name is not None and self.worker_ca is None:
            raise ValueError("--worker-tls-name needs --worker-ca: whose certificates are checked for that name?")
        if self.policy not in POLICIES:
            raise ValueError(f"--policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.redis is None and not self.workers:
            raise ValueError("give --redis URL, --workers URL, or both: else no worker can be found")

    def redis_password(self) -> str | None:
        """From --redis-password-file; None: the URL's own, if any. Raises OSError."""
        return None if self.redis_password_file is None else Path(self.redis_password_file).read_text().strip()

    def ops_key(self) -> bytes | None:
        """From --ops-key-file. Raises OSError, and ValueError for an empty one."""
        if self.ops_key_file is None:
            return None
        key = Path(self.ops_key_file).read_bytes().strip()
        if not key:
            raise ValueError(f"--ops-key-file {self.ops_key_file} is empty")
        return key

    def certificate(self) -> ServerCertificate | None:
        """What both ports show. Raises ValueError."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return ServerCertificate(self.tls_cert, self.tls_key)

    def workers_ca(self) -> WorkerCa | None:
        """Who vouches for workers; None: they are spoken to as their URLs say. Raises ValueError."""
        return None if self.worker_ca is None else WorkerCa(self.worker_ca, self.worker_tls_name)

    def cluster_secret(self) -> bytes:
        """From --cluster-secret-file or the environment; empty: none. Raises OSError."""
        if self.cluster_secret_file is not None:
            return Path(self.cluster_secret_file).read_bytes().strip()
        return os.environ.get(_SECRET_VARIABLE, "").encode()


def _option(name: str) -> str:
    return {"max_body_bytes": "--max-body", "max_header_bytes": "--max-header"}.get(name, f"--{name.replace('_', '-')}")


def num_bytes(text: str) -> int:
    """`32M`, `1G` or a plain number."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"a size such as 32M is needed, got {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]


def alias(text: str) -> tuple[str, str]:
    """`NAME=MODEL`."""
    name, equals, model = text.partition("=")
    if not (name and equals and model):
        raise argparse.ArgumentTypeError(f"NAME=MODEL is needed, got {text!r}")
    return name, model


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="headstart gateway",
        description="The OpenAI API in front of the workers. Holds no model files: workers serve their tokenizers.",
        allow_abbrev=False,
    )
    defaults = GatewayConfig(workers=("http://unused",))
    net = p.add_argument_group("network")
    net.add_argument("--host", default=defaults.host, help="address of the public port (default 127.0.0.1)")
    net.add_argument("--port", type=int, default=defaults.port, help="the OpenAI API and health (default 8000)")
    net.add_argument("--ops-host", default=defaults.ops_host, help="address of the ops port (default 127.0.0.1)")
    net.add_argument("--ops-port", type=int, default=defaults.ops_port, help="metrics, workers, explain (default 8001)")
    net.add_argument(
        "--ops-hosts",
        type=lambda text: tuple(text.split(",")),
        default=defaults.ops_hosts,
        metavar="NAME,...",
        help="names that the ops port answers to, beside addresses and localhost (default: --ops-host)",
    )
    net.add_argument(
        "--share-port", action="store_true", help="let other gateways listen on the public port too (SO_REUSEPORT)"
    )
    net.add_argument("--max-body", type=num_bytes, default=defaults.max_body_bytes, metavar="SIZE", help="default 32M")
    net.add_argument("--max-header", type=num_bytes, default=defaults.max_header_bytes, metavar="SIZE", help="64K")
    net.add_argument("--header-timeout-s", type=float, default=defaults.header_timeout_s, help="for a head (10)")
    net.add_argument("--body-timeout-s", type=float, default=defaults.body_timeout_s, help="for 30 KiB of a body (30)")
    net.add_argument(
        "--max-connections", type=int, default=defaults.max_connections, help="open at a time, on each port (8192)"
    )
    net.add_argument("--tls-cert", metavar="FILE", help="certificate of both ports, PEM with its chain (default: none)")
    net.add_argument("--tls-key", metavar="FILE", help="its key; both are read anew when they change")
    net.add_argument("--ops-key-file", metavar="FILE", help="what drain and purge need (default: ops port on loopback)")
    net.add_argument("--request-timeout-s", type=float, default=defaults.request_timeout_s, help="default 3600")
    net.add_argument("--keepalive-s", type=float, default=defaults.keepalive_s, help="of silent streams (default 15)")
    net.add_argument(
        "--stall-s", type=float, default=defaults.stall_s, help="silence after which a worker is asked (5)"
    )
    net.add_argument("--drain-grace-s", type=float, default=defaults.drain_grace_s, help="time for open requests (30)")

    net.add_argument(
        "--max-queued-tokens", type=int, default=defaults.max_queued_tokens, help="prompt tokens that may wait (4M)"
    )

    fleet = p.add_argument_group("workers")
    fleet.add_argument("--redis", metavar="URL", help="the registry and prefix index")
    fleet.add_argument("--redis-prefix", default=defaults.redis_prefix, help="prefix of every key (default headstart)")
    fleet.add_argument("--redis-shards", type=int, default=defaults.redis_shards, help="as the workers have it (1)")
    fleet.add_argument("--redis-username", metavar="NAME", help="the ACL user (default: the URL's)")
    fleet.add_argument("--redis-password-file", metavar="FILE", help="its password (default: the URL's)")
    fleet.add_argument(
        "--lookup-deadline-s", type=float, default=defaults.lookup_deadline_s, help="then route without (0.025)"
    )
    fleet.add_argument(
        "--workers", action="extend", nargs="+", default=[], metavar="URL", help="http://HOST:PORT or dns:NAME:PORT"
    )
    fleet.add_argument(
        "--worker-networks",
        type=lambda text: tuple(text.split(",")),
        default=defaults.worker_networks,
        metavar="CIDR,...",
        help="where workers may be (default: loopback and private addresses)",
    )
    fleet.add_argument("--worker-ca", metavar="FILE", help="speak TLS alone to workers, whose certificates it signed")
    fleet.add_argument("--worker-tls-name", metavar="NAME", help="what they are for (default: each worker's address)")
    fleet.add_argument("--policy", default=defaults.policy, choices=tuple(POLICIES), help="default headstart")
    fleet.add_argument(
        "--cluster-secret-file", metavar="FILE", help=f"shared with the workers (default: ${_SECRET_VARIABLE})"
    )

    api = p.add_argument_group("API")
    api.add_argument("--api-keys", metavar="FILE", help="who may use it, see `headstart keys` (default: everybody)")
    api.add_argument(
        "--alias", action="append", type=alias, default=[], metavar="NAME=MODEL", help="a further name of a model"
    )
    api.add_argument("--tool-parser", choices=tuple(MARKERS), help="how models write tool calls (default: by template)")
    api.add_argument(
        "--reasoning",
        action=argparse.BooleanOptionalAction,
        help="split <think> ... </think> from the answer (default: by template)",
    )
    api.add_argument(
        "--control-tokens-in-content",
        action="store_true",
        help="control tokens that messages hold are control tokens: clients can forge turns (default: they are text)",
    )

    watch = p.add_argument_group("observability")
    watch.add_argument("--log-level", default=defaults.log_level, choices=("debug", "info", "warning", "error"))
    watch.add_argument("--log-format", default=defaults.log_format, choices=LOG_FORMATS, help="json: one object a line")
    watch.add_argument("--access-log", action="store_true", help="a line for each answer: status, seconds, tokens")
    watch.add_argument(
        "--otlp-endpoint", metavar="URL", help="send traces there, e.g. http://127.0.0.1:4318 (default: as OTEL_* say)"
    )
    return p


def parse(argv: Sequence[str]) -> GatewayConfig:
    """Exits like argparse on an unknown option; raises ValueError on a bad value."""
    args = vars(parser().parse_args(argv))
    return GatewayConfig(
        workers=tuple(args.pop("workers")),
        aliases=MappingProxyType(dict(args.pop("alias"))),
        max_body_bytes=args.pop("max_body"),
        max_header_bytes=args.pop("max_header"),
        **args,
    )
