"""The parts of the check of a GPU, in order: commands, and the time that each may take on a GPU.

All limits together are 8 minutes. The interpreter, which needs longer, has no limit but one against hangs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from worker.common.command_line import module_command

Mode = Literal["cuda", "interpreter"]
READY: Final = "ready"
TESTS: Final = {
    "attention": ("every attention kernel: shapes, head sizes, windows, dtypes", 95.0),
    "triton_ops": ("our Triton kernels", 20.0),
    "sampling": ("rules and draws of tokens against the reference", 15.0),
    "recordings": ("CUDA graphs against launches kernel by kernel", 60.0),
    "families": ("every model family against transformers", 75.0),
    "launches_ahead": ("steps launched before the one before is read", 30.0),
    "host_store": ("blocks to pinned host memory and back", 15.0),
    "parity": ("greedy tokens of 32 prompts against transformers", 25.0),
}
"""Module of tests/worker/gpu to title and limit."""
NAMES: Final = (READY, *TESTS, "bench", "profile")
READY_LIMIT_S: Final = 25.0
BENCH_LIMIT_S: Final = 90.0
PROFILE_LIMIT_S: Final = 30.0
HANG_S: Final = 3600.0
ALONE_BYTES: Final = 40 << 30
"""Memory for the bench of Llama 8B: its weights, those of the floor, and a pool."""
COMPARED_BYTES: Final = 60 << 30
"""... and for the model of transformers next to them."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    title: str
    command: tuple[str, ...]
    limit_s: float
    skipped: str = ""
    """Why it does not run; empty when it does."""


def ready(device: str) -> Part:
    """Return the part that comes first, and reports missing requirements."""
    command = (*module_command("benchmarks.gpu.missing", "-W", "ignore"), "--device", device)
    return Part(READY, "what this host lacks", command, 3 * READY_LIMIT_S if device == "cpu" else READY_LIMIT_S)


def parts(mode: Mode, folder: Path, free_bytes: int, *, quick: bool) -> Iterator[Part]:
    """Yield the parts behind `ready`. With `quick` one case of each test, and the bench without transformers."""
    on_gpu = mode == "cuda"
    for name, (title, limit_s) in TESTS.items():
        yield Part(name, title, _test(name, quick=quick), limit_s if on_gpu else HANG_S)
    shape = "llama-8b" if on_gpu else "tiny"
    given = ["--shape", shape, "--device", "cuda" if on_gpu else "cpu", "--dtype", "bfloat16" if on_gpu else "float16"]
    short = [] if on_gpu else ["--steps", "2", "--tokens", "2", "--rounds", "1", "--chunk", "256"]
    alone = ["--no-transformers"] if quick or (on_gpu and free_bytes < COMPARED_BYTES) else []
    yield Part(
        "bench",
        f"headstart bench engine --shape {shape}: shares of memory rate and matrix rate",
        _module(mode, "benchmarks.dev.engine", [*given, *short, *alone, "--json"]),
        BENCH_LIMIT_S if on_gpu else HANG_S,
        f"needs {ALONE_BYTES >> 30} GiB of free memory" if on_gpu and free_bytes < ALONE_BYTES else "",
    )
    yield Part(
        "profile",
        "one decode and one prefill step, kernel by kernel",
        _module(mode, "benchmarks.gpu.profile_step", [*given, "--out", str(folder)]),
        PROFILE_LIMIT_S if on_gpu else HANG_S,
        f"needs {ALONE_BYTES >> 31} GiB of free memory" if on_gpu and free_bytes < ALONE_BYTES // 2 else "",
    )


def _test(name: str, *, quick: bool) -> tuple[str, ...]:
    command = [*module_command("pytest", "-W", "ignore"), "-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider"]
    command += ["-W", "ignore", "-m", "gpu", "-v", "--durations=5", "--color=no", *(["--quick"] if quick else [])]
    return (*command, f"tests/worker/gpu/test_{name}.py")


def _module(mode: Mode, module: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a module's `main`: a bench by its name, in the interpreter with the patches."""
    if mode == "interpreter":
        return (*module_command("benchmarks.gpu.interpreter", "-W", "ignore"), module, *arguments)
    package, _, name = module.rpartition(".")
    module, words = ("benchmarks", [name]) if package == "benchmarks.dev" else (module, [])
    return (*module_command(module, "-W", "ignore"), *words, *arguments)
