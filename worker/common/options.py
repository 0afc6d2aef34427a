"""The options that a gateway and a worker share."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cache.redis_index import check_key_part, check_url
from worker.common.logs import LOG_FORMATS, LogFormat
from worker.common.tls import ServerCertificate

SECRET_VARIABLE: Final = "HEADSTART_CLUSTER_SECRET"
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class SharedConfig:
    """The options of either process. Raises ValueError that names the option."""

    host: str = "127.0.0.1"
    port: int = 0
    tls_cert: str | None = None
    tls_key: str | None = None
    redis: str | None = None
    redis_prefix: str = "headstart"
    redis_shards: int = 1
    redis_username: str | None = None
    redis_password_file: str | None = None
    cluster_secret_file: str | None = None
    drain_grace_s: float = 30.0
    log_level: str = "info"
    log_format: LogFormat = "text"
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        self.require("port", 0, (1 << 16) - 1)
        self.require("redis_shards", 1)
        self.require("drain_grace_s", 0)
        if self.redis is not None:
            check_url("--redis", self.redis)
            check_key_part("--redis-prefix", self.redis_prefix)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together: give both or none")

    def require(self, name: str, least: float, most: float | None = None) -> None:
        """Raise ValueError for an option outside of its bounds; None is within."""
        value = getattr(self, name)
        if value is not None and not (least <= value and (most is None or value <= most)):
            bounds = f"at least {least}" if most is None else f"{least} to {most}"
            raise ValueError(f"{option_name(name)} must be {bounds}, got {value}")

    def redis_password(self) -> str | None:
        """Read --redis-password-file; None stands for the URL's own. Raises ValueError."""
        file = self.redis_password_file
        return None if file is None else read_secret("--redis-password-file", file).decode()

    def cluster_secret(self) -> bytes:
        """Read --cluster-secret-file, else the environment; empty: there is none. Raises ValueError."""
        if self.cluster_secret_file is not None:
            return read_secret("--cluster-secret-file", self.cluster_secret_file)
        return os.environ.get(SECRET_VARIABLE, "").encode()

    def certificate(self) -> ServerCertificate | None:
        """Load the certificate that is shown to clients. Raises ValueError."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return ServerCertificate(self.tls_cert, self.tls_key)


def read_secret(option: str, file: str) -> bytes:
    """Raises ValueError that names the option."""
    try:
        return Path(file).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"{option}: {error}") from error


def option_name(field: str) -> str:
    return f"--{field.removesuffix('_bytes').replace('_', '-')}"


def num_bytes(text: str) -> int:
    """Parse `512M`, `1.5G` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"a size such as 512M or 4G is needed, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def add_redis_options(group: argparse._ArgumentGroup, purpose: str) -> None:
    group.add_argument("--redis", metavar="URL", help=purpose)
    group.add_argument("--redis-prefix", default="headstart", help="prefix of every key (default headstart)")
    group.add_argument("--redis-shards", type=int, default=1, help="slots over which the index is spread (default 1)")
    group.add_argument("--redis-username", metavar="NAME", help="the ACL user (default: the URL's)")
    group.add_argument("--redis-password-file", metavar="FILE", help="its password (default: the URL's)")
    group.add_argument(
        "--cluster-secret-file",
        metavar="FILE",
        help=f"the secret that gateways and workers share (default: ${SECRET_VARIABLE})",
    )


def add_tls_options(group: argparse._ArgumentGroup, of: str) -> None:
    group.add_argument("--tls-cert", metavar="FILE", help=f"certificate {of}, PEM with its chain (default: none)")
    group.add_argument("--tls-key", metavar="FILE", help="its key; both are reloaded when they change")


def add_log_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--log-level", default="info", choices=LOG_LEVELS)
    group.add_argument("--log-format", default="text", choices=LOG_FORMATS, help="json: one object a line")
    group.add_argument(
        "--otlp-endpoint", metavar="URL", help="send traces there, e.g. http://127.0.0.1:4318 (default: as OTEL_* say)"
    )
