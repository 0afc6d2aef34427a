"""The routers of the head to head, each started afresh in front of the same engines."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.dev.engines_load.vllm import BLOCK_SIZE, Engine
from benchmarks.dev.gateway_load.processes import MODEL, adapter_process, free_ports, gateway_process, started
from benchmarks.dev.private_redis import private_redis

Opened = AbstractContextManager[str]
"""A running router; entering it gives its URL."""


@dataclass(frozen=True, slots=True)
class Router:
    name: str
    """As its figures begin."""
    opened: Callable[[Sequence[Engine]], Opened]


def routers(folder: Path) -> list[Router]:
    """Headstart, and the others with their policies for prefixes; their programs are in `folder`."""

    def other(name: str, program: str, *options: str, events: bool = False) -> Router:
        return Router(name, lambda engines: _other(folder / program, options, engines, events))

    balance = ("--policy", "cache_aware", "--balance-abs-threshold", "2", "--balance-rel-threshold", "1.1")
    return [
        Router("headstart", headstart),
        other("vllm_router", "vllm-router", *balance),
        other("vllm_router_kv_aware", "vllm-router", "--policy", "kv_aware", events=True),
        other("sglang_router", "sglang-router", "launch", *balance),
        other("round_robin", "vllm-router", "--policy", "round_robin"),
    ]


BALANCE: Final = "cache_aware with --balance-abs-threshold 2 --balance-rel-threshold 1.1"
"""By default they balance only from 64 more requests on at one engine than at another: never, here."""


@contextmanager
def headstart(engines: Sequence[Engine]) -> Iterator[str]:
    """Start Redis, an adapter for each engine, and a gateway."""
    with ExitStack() as stack:
        redis = stack.enter_context(private_redis())
        workers = [
            stack.enter_context(adapter_process(engine.url, None, redis, "--events-exposed"))[0] for engine in engines
        ]
        yield stack.enter_context(gateway_process(workers[0], None, redis))[0]


@contextmanager
def _other(program: Path, options: Sequence[str], engines: Sequence[Engine], events: bool) -> Iterator[str]:
    port, metrics_port = free_ports(2)
    command = [str(program), *options, "--log-level", "error", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command += ["--worker-urls", *(engine.url for engine in engines)]
    if events:
        for engine in engines:
            command += ["--kv-event-source", f"{engine.url}={engine.events.replace('*', '127.0.0.1')}"]
            command += ["--kv-event-replay-source", f"{engine.url}={engine.replay}"]
        command += ["--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", MODEL]
    with tempfile.TemporaryFile() as said, started(command, None, stdout=said.fileno(), stderr=subprocess.STDOUT):
        yield f"http://127.0.0.1:{port}"
