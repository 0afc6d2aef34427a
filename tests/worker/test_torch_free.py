"""The half of the worker that an adapter for another engine needs, without torch on the machine."""

from __future__ import annotations

import subprocess
import sys

MODULES = (
    "worker.http.app",
    "worker.wire",
    "worker.common.tracing",
    "worker.config",
    "worker.publishing.publisher",
    "worker.adapter.blocks",
    "worker.adapter.subscriber",
)
ENGINE_THREAD = ("worker.engine.engine", "worker.scheduler.scheduler")
PROGRAM = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from importlib import import_module
for name in sys.argv[1:]:
    import_module(name)
loaded = [name for name in ("worker.scheduler", "worker.engine.engine", "worker.engine.grammar") if name in sys.modules]
print(*loaded)
"""


def loaded_engine_parts(*modules: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", PROGRAM, *modules], check=True, capture_output=True, text=True)
    return run.stdout.split()


def test_http_side_and_publisher_import_no_torch_and_no_engine() -> None:
    without_config = [name for name in MODULES if name != "worker.config"]
    assert loaded_engine_parts(*without_config) == []
    loaded_engine_parts(*MODULES)


def test_engine_thread_imports_without_torch() -> None:
    assert loaded_engine_parts(*ENGINE_THREAD)
