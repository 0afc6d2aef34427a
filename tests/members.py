"""Registry members of workers that do not run."""

from __future__ import annotations

from typing import Any

from cache.records import WorkerMember
from cache.types import Epoch, WorkerId
from worker.wire import PROTOCOL_VERSION


def make_member(name: str = "w", epoch: str = "e", **changes: Any) -> WorkerMember:
    """Return the unsigned member of a worker, with these fields changed."""
    fields: dict[str, Any] = {
        "url": f"http://{name}",
        "model": "m",
        "namespace": "n",
        "numerics": "cpu",
        "block_size": 16,
        "max_model_len": 4096,
        "protocol": PROTOCOL_VERSION,
    }
    return WorkerMember(worker_id=WorkerId(name), epoch=Epoch(epoch), **{**fields, **changes})
