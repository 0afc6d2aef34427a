"""The options of a gateway, from the command line into one frozen dataclass."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Final

from cache.redis_index import ReaderSettings
from server.router.policies import POLICIES
from server.text.tool_formats import MARKERS, ToolFormat
from server.workers.networks import DEFAULT_NETWORKS, WorkerNetworks
from worker.common.options import (
    SharedConfig,
    add_log_options,
    add_redis_options,
    add_tls_options,
    num_bytes,
    option_name,
    read_secret,
)
from worker.common.tls import WorkerCa

_HOST_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,253}")
_ABOVE_ZERO: Final = (
    "max_body_bytes",
    "max_header_bytes",
    "header_timeout_s",
    "body_timeout_s",
    "max_connections",
    "request_timeout_s",
    "keepalive_s",
    "lookup_deadline_s",
    "stall_s",
)


@dataclass(frozen=True, slots=True)
class GatewayConfig(SharedConfig):
    """Raises ValueError that names the option."""

    port: int = 8000
    share_port: bool = False
    ops_host: str = "127.0.0.1"
    ops_port: int = 8001
    ops_hosts: tuple[str, ...] = ()
    ops_key_file: str | None = None
    lookup_deadline_s: float = 0.025
    workers: tuple[str, ...] = ()
    policy: str = "headstart"
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    tool_parser: ToolFormat | None = None
    reasoning: bool | None = None
    control_tokens_in_content: bool = False
    worker_networks: tuple[str, ...] = DEFAULT_NETWORKS
    worker_ca: str | None = None
    worker_tls_name: str | None = None
    api_keys: str | None = None
    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 64 << 10
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    max_connections: int = 8192
    request_timeout_s: float = 3600.0
    keepalive_s: float = 15.0
    stall_s: float = 5.0
    max_queued_tokens: int = 1 << 22
    access_log: bool = False

    def __post_init__(self) -> None:
        SharedConfig.__post_init__(self)
        self.require("ops_port", 0, (1 << 16) - 1)
        self.require("max_queued_tokens", 1)
        for name in _ABOVE_ZERO:
            if not getattr(self, name) > 0:
                raise ValueError(f"{option_name(name)} must be above 0, got {getattr(self, name)}")
        WorkerNetworks(self.worker_networks)
        for name in self.ops_hosts:
            if _HOST_NAME.fullmatch(name) is None:
                raise ValueError(f"--ops-hosts takes names without scheme and port, got {name!r}")
        if self.worker_ca is not None and (plain := [url for url in self.workers if url.startswith("http:")]):
            raise ValueError(f"--workers {plain[0]}: --worker-ca asks for TLS, so give https://HOST:PORT")
        if self.worker_tls_name is not None and self.worker_ca is None:
            raise ValueError("--worker-tls-name needs --worker-ca: whose certificates are checked for that name?")
        if self.policy not in POLICIES:
            raise ValueError(f"--policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.redis is None and not self.workers:
            raise ValueError("give --redis URL, --workers URL, or both: else no worker can be found")

    def reader_settings(self) -> ReaderSettings:
        """Return how this gateway reads the shared index. Raises ValueError."""
        return ReaderSettings(
            prefix=self.redis_prefix,
            num_shards=self.redis_shards,
            deadline_s=self.lookup_deadline_s,
            username=self.redis_username,
            password=self.redis_password(),
            cluster_secret=self.cluster_secret(),
        )

    def ops_key(self) -> bytes | None:
        """Read --ops-key-file. Raises ValueError, also for an empty one."""
        if self.ops_key_file is None:
            return None
        key = read_secret("--ops-key-file", self.ops_key_file)
        if not key:
            raise ValueError(f"--ops-key-file {self.ops_key_file} is empty")
        return key

    def workers_ca(self) -> WorkerCa | None:
        """Load the CA of workers; None: they are spoken to as their URLs say. Raises ValueError."""
        return None if self.worker_ca is None else WorkerCa(self.worker_ca, self.worker_tls_name)


def _comma_separated(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def model_alias(text: str) -> tuple[str, str]:
    """Parse `NAME=MODEL`."""
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
    net = p.add_argument_group("network")
    net.add_argument("--host", help="address of the public port (default 127.0.0.1)")
    net.add_argument("--port", type=int, help="the OpenAI API and health (default 8000)")
    net.add_argument("--ops-host", help="address of the ops port (default 127.0.0.1)")
    net.add_argument("--ops-port", type=int, help="metrics, workers, explain (default 8001)")
    net.add_argument(
        "--ops-hosts",
        type=_comma_separated,
        metavar="NAME,...",
        help="names that the ops port answers to, next to addresses and localhost (default: --ops-host)",
    )
    net.add_argument(
        "--share-port", action="store_true", help="let other gateways listen on the public port too (SO_REUSEPORT)"
    )
    net.add_argument("--max-body", dest="max_body_bytes", type=num_bytes, metavar="SIZE", help="default 32M")
    net.add_argument("--max-header", dest="max_header_bytes", type=num_bytes, metavar="SIZE", help="64K")
    net.add_argument("--header-timeout-s", type=float, help="for a head (10)")
    net.add_argument("--body-timeout-s", type=float, help="for 30 KiB of a body (30)")
    net.add_argument("--max-connections", type=int, help="open at a time, on each port (8192)")
    add_tls_options(net, "of both ports")
    net.add_argument("--ops-key-file", metavar="FILE", help="what drain and purge need (default: ops port on loopback)")
    net.add_argument("--request-timeout-s", type=float, help="default 3600")
    net.add_argument("--keepalive-s", type=float, help="of silent streams (default 15)")
    net.add_argument("--stall-s", type=float, help="silence after which a worker is asked (5)")
    net.add_argument("--drain-grace-s", type=float, help="time for open requests (30)")
    net.add_argument("--max-queued-tokens", type=int, help="prompt tokens that may wait (4M)")

    fleet = p.add_argument_group("workers")
    add_redis_options(fleet, "the registry and prefix index")
    fleet.add_argument("--lookup-deadline-s", type=float, help="then route without (0.025)")
    fleet.add_argument("--workers", action="extend", nargs="+", metavar="URL", help="http://HOST:PORT or dns:NAME:PORT")
    fleet.add_argument(
        "--worker-networks",
        type=_comma_separated,
        metavar="CIDR,...",
        help="where workers may be (default: loopback and private addresses)",
    )
    fleet.add_argument("--worker-ca", metavar="FILE", help="speak TLS alone to workers, whose certificates it signed")
    fleet.add_argument("--worker-tls-name", metavar="NAME", help="what they are for (default: each worker's address)")
    fleet.add_argument("--policy", choices=tuple(POLICIES), help="default headstart")

    api = p.add_argument_group("API")
    api.add_argument("--api-keys", metavar="FILE", help="who may use it, see `headstart keys` (default: anyone)")
    api.add_argument(
        "--alias",
        dest="aliases",
        action="append",
        type=model_alias,
        metavar="NAME=MODEL",
        help="a further name of a model",
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
    add_log_options(watch)
    watch.add_argument("--access-log", action="store_true", help="a line for each answer: status, seconds, tokens")
    defaults = GatewayConfig(workers=("http://unused",))
    p.set_defaults(**{option.name: getattr(defaults, option.name) for option in fields(defaults)})
    p.set_defaults(workers=[], aliases=[])
    return p


def parse(argv: Sequence[str]) -> GatewayConfig:
    """Parse a command line. Exits as argparse does on an unknown option; raises ValueError on a bad value."""
    args = vars(parser().parse_args(argv))
    args["workers"] = tuple(args["workers"])
    args["aliases"] = MappingProxyType(dict(args["aliases"]))
    return GatewayConfig(**args)
