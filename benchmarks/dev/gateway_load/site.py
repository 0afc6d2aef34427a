"""Where a gateway is measured: one core for it, another for Redis, the stub workers and whoever asks."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.dev.gateway_load.processes import (
    MODEL,
    gateway_process,
    make_bundle,
    started,
    stub_server,
    until,
)
from benchmarks.dev.gateway_load.traffic import Traffic
from server.cli.serve import find_redis_server, redis_command
from worker.wire import pack


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    folder: Path
    gateway_core: int
    other_core: int
    redis: str
    traffic: Traffic

    def stub(self, *, pace_s: float = 0.0, num_workers: int = 1) -> AbstractContextManager[str]:
        """See `stub_server`."""
        return stub_server(self.folder, self.other_core, redis=self.redis, pace_s=pace_s, num_workers=num_workers)

    def gateway(self, stub: str) -> AbstractContextManager[tuple[str, str, int]]:
        """See `gateway_process`."""
        return gateway_process(stub, self.gateway_core, self.redis)


async def prepare(stack: ExitStack, *, max_model_len: int = 8192) -> Site:
    """Starts Redis, which ends with the stack, and keeps this process off the gateway's core."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    cores = sorted(os.sched_getaffinity(0))
    gateway_core, other_core = cores[0], cores[-1]
    os.sched_setaffinity(0, {other_core})
    bundle, tokenizer = make_bundle(max_model_len)
    (folder / "bundle").write_bytes(pack(bundle))
    redis = folder / "redis.sock"
    stack.enter_context(started(redis_command(find_redis_server(), redis), other_core, stdout=subprocess.DEVNULL))
    await until(redis.exists)
    return Site(folder, gateway_core, other_core, f"unix://{redis}", Traffic(MODEL, tokenizer))
