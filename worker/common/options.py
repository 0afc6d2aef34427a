"""The options that a gateway and a worker share, and how both declare theirs: each is one field of a dataclass."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, Final, TypeVar

from cache.redis_index import ReaderSettings, WriterSettings, check_key_part, check_url
from worker.common.command_line import SECRET_VARIABLE, CommandParser, read_secret, read_text, reason
from worker.common.logs import LOG_FORMATS, LogFormat
from worker.common.tls import TlsFiles, ca_files, certificate_files

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_Settings = TypeVar("_Settings", ReaderSettings, WriterSettings)
MAX_PORT: Final = (1 << 16) - 1  # a port has 16 bits
ENGINE_TEMPLATE: Final = (
    "--chat-template: an engine that writes the text has its own template: give it to the engine (vllm serve "
    "--chat-template FILE)"
)
"""The refusal of a template that would not be used."""
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def option(
    group: str,
    default: Any,
    text: str = "",
    metavar: str | None = None,
    *,
    flag: str | None = None,
    least: float | None = None,
    most: float = math.inf,
    **arguments: Any,
) -> Any:
    """Return a field that is an option too. A number is above 0, or `least` to `most`. A list may be given in parts.

    `arguments` are those of `add_argument`, some derived from the default.
    """
    arguments |= {"help": text} if metavar is None else {"help": text, "metavar": metavar}
    if isinstance(default, bool):
        arguments["action"] = "store_false" if default else "store_true"
    elif isinstance(default, int | float):
        arguments = {"type": type(default), **arguments}
    elif isinstance(default, tuple | frozenset):
        arguments = {"type": methodcaller("split", ","), **arguments, "action": "extend"}
    if isinstance(default, int | float | str):
        arguments["default"] = default
    metadata = {"group": group, "flag": flag, "least": least, "most": most, "arguments": arguments}
    return field(default=default, metadata=metadata)


_net = partial(option, "network")
_index = partial(option, "shared index")
_watch = partial(option, "observability")


@dataclass(frozen=True, slots=True)
class SharedConfig:
    """The options of either process. Raises ValueError that names the option."""

    host: str = _net("127.0.0.1", "address to listen on (default 127.0.0.1)")
    port: int = _net(0, "port; 0 takes a free one", least=0, most=MAX_PORT)
    drain_grace_s: float = _net(30.0, "time for open requests after SIGTERM (default 30)", least=0)
    tls_cert: str | None = _net(None, "certificate for clients, PEM with its chain (default: none)", "FILE")
    tls_key: str | None = _net(None, "key of the certificate; both are reloaded when they change", "FILE")
    worker_ca: str | None = _net(
        None, "CA of the workers' certificates; with it, only TLS is spoken to workers", "FILE"
    )
    worker_tls_name: str | None = _net(
        None, "name in the workers' certificates (default: each worker's address)", "NAME"
    )
    redis: str | None = _index(None, "the registry and prefix index", "URL")
    redis_prefix: str = _index("headstart", "prefix of every key (default headstart)")
    redis_shards: int = _index(1, "slots of a Redis Cluster over which the index is spread (default 1)")
    redis_username: str | None = _index(None, "ACL user in Redis (default: the URL's)", "NAME")
    redis_password_file: str | None = _index(None, "password of the ACL user (default: the URL's)", "FILE")
    cluster_secret_file: str | None = _index(
        None, f"secret that all gateways and workers share (default: ${SECRET_VARIABLE})", "FILE"
    )
    log_level: str = _watch("info", "least severe line that is logged (default info)", choices=LOG_LEVELS)
    log_format: LogFormat = _watch("text", "json: one object a line (default text)", choices=LOG_FORMATS)  # noqa: RUF009 (a field)
    otlp_endpoint: str | None = _watch(
        None, "where to send traces, e.g. http://127.0.0.1:4318 (default: the OTEL_* variables)", "URL"
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            value, metadata = getattr(self, each.name), each.metadata
            name = metadata["flag"] or option_name(each.name)
            choices = metadata["arguments"].get("choices")
            if choices is not None and value is not None and value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
            least, most = metadata["least"], metadata["most"]
            if value == math.inf:
                raise ValueError(f"{name} must be finite")
            if type(value) in (int, float) and not (value > 0 if least is None else least <= value <= most):
                raise ValueError(f"{name} must be {'above 0' if least is None else f'{least} to {most}'}, got {value}")
        if self.redis is not None:
            check_url("--redis", self.redis)
            check_key_part("--redis-prefix", self.redis_prefix)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together: give both or none")
        if self.worker_tls_name is not None and self.worker_ca is None:
            raise ValueError("--worker-tls-name needs --worker-ca: whose certificates are checked for that name?")

    def cluster_secret(self) -> bytes:
        """Read --cluster-secret-file, else the environment; empty: there is none. Raises ValueError."""
        if self.cluster_secret_file is not None:
            return read_secret("--cluster-secret-file", self.cluster_secret_file)
        return os.environ.get(SECRET_VARIABLE, "").encode()

    def index_settings(self, kind: type[_Settings]) -> _Settings:
        """Return how to read or write the shared index. Raises ValueError for a file that cannot be read."""
        file = self.redis_password_file
        return kind(
            prefix=self.redis_prefix,
            num_shards=self.redis_shards,
            username=self.redis_username,
            password=None if file is None else read_text("--redis-password-file", file),
            cluster_secret=self.cluster_secret(),
        )

    def certificate(self) -> TlsFiles | None:
        """Load the certificate that is shown to clients. Raises ValueError."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return certificate_files(self.tls_cert, self.tls_key)

    def workers_ca(self) -> TlsFiles | None:
        """Load the CA of the workers. Raises ValueError."""
        return None if self.worker_ca is None else ca_files(self.worker_ca, self.worker_tls_name)


def option_name(field: str) -> str:
    return f"--{field.removesuffix('_bytes').replace('_', '-')}"


def num_bytes(text: str) -> int:
    """Parse `512M`, `1.5G` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"a size such as 512M or 4G is needed, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def template_text(file: str) -> str:
    """Read the chat template in a file."""
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{file}: {reason(error)}") from error


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is needed, got {text!r:.200}")
    return value


def make_parser(config: type[SharedConfig], groups: Sequence[str], name: str, text: str) -> CommandParser:
    """Build the parser of a config's options. It leaves out what is not given and has no plain default."""
    p = CommandParser(f"headstart {name}", command=name, description=text, argument_default=argparse.SUPPRESS)
    group_of = {title: p.add_argument_group(title) for title in groups}
    for each in fields(config):
        metadata, flag = each.metadata, each.metadata["flag"] or option_name(each.name)
        group_of[metadata["group"]].add_argument(flag, dest=each.name, **metadata["arguments"])
    return p
