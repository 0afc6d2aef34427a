"""The systems that are asked: Headstart of this or another checkout, llama.cpp's server, and vLLM's own API."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.dev.engines_load.vllm import engines, write_model
from benchmarks.dev.first_token_load.marks import MarkReader
from benchmarks.dev.gateway_load.processes import MODEL, cpu_s, ended, free_ports
from server.cli.serve import find_redis_server, redis_command
from worker.model.load import find_checkpoint

START_TIMEOUT_S: Final = 600.0
_POLL_S: Final = 0.05
OWN: Final = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class System:
    name: str
    url: str
    model: str
    marks: Sequence[MarkReader] = field(default_factory=list)
    """Empty: the way of an answer is not seen."""
    pids: Sequence[int] = ()

    def take_marks(self) -> list[tuple[str, float]]:
        return [mark for reader in self.marks for mark in reader.take()]

    def cpu_s(self) -> float:
        """Return the processor time of its processes."""
        return sum(map(cpu_s, self.pids))


@contextmanager
def headstart(
    name: str, checkout: Path, folder: Path, worker: Sequence[str], *, is_noted: bool = True
) -> Iterator[System]:
    """Start Redis, one worker and one gateway, as `headstart serve` does. `is_noted`: with the marks of this checkout.

    `worker`: options of the worker.
    """
    folder = folder / name
    folder.mkdir()
    redis = folder / "redis.sock"
    url = f"unix://{redis}"
    with ExitStack() as stack:
        _start(stack, redis_command(find_redis_server(), redis), folder / "redis.log")
        _until(redis.exists, folder / "redis.log")
        files = {part: folder / f"{part}.marks" for part in ("gateway", "worker")}
        python = str(checkout / ".venv" / "bin" / "python")

        def command(part: str, module: str) -> list[str]:
            if not is_noted:
                return [python, "-m", module]
            return [python, "-m", "benchmarks.dev.first_token_load.marks", str(files[part]), part]

        port, worker_port, ops_port = free_ports(3)
        shared = ["--redis", url, "--drain-grace-s", "0", "--log-level", "error"]
        one = [*command("worker", "worker"), "--port", str(worker_port), *shared, *worker]
        two = [*command("gateway", "server.gateway"), "--port", str(port), "--ops-port", str(ops_port), *shared]
        parts = {"worker": one, "gateway": two}
        pids = [_start(stack, line, folder / f"{part}.log", checkout) for part, line in parts.items()]
        base = f"http://127.0.0.1:{port}"
        _until(lambda: bool(_models(base)), folder / "worker.log")
        readers = [MarkReader(file) for file in files.values()] if is_noted else []
        yield System(name, base, _models(base)[0], readers, pids)


@contextmanager
def llama_server(program: Path, num_threads: int, folder: Path) -> Iterator[System]:
    """llama.cpp's server with the GGUF of the default model."""
    (port,) = free_ports(1)
    command = [str(program), "-m", str(find_checkpoint("").path), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-t", str(num_threads), "-c", "8192", "-np", "1", "--no-webui"]
    with ExitStack() as stack:
        pid = _start(stack, command, folder / "llama.log")
        base = f"http://127.0.0.1:{port}"
        _until(lambda: bool(_models(base)), folder / "llama.log")
        yield System("llama", base, _models(base)[0], pids=[pid])


@contextmanager
def vllm(environment: Path, folder: Path) -> Iterator[tuple[System, System]]:
    """A vLLM with a small random model, and Headstart in front of it through an adapter."""
    model = folder / "model"
    model.mkdir()
    write_model(model, 512, 8)
    with engines(environment, model, folder, count=1, num_blocks=None) as [engine]:
        options = ["--engine", "vllm", "--engine-url", engine.url, "--events-exposed"]
        with headstart("adapter", OWN, folder, options, is_noted=False) as adapter:
            yield System("vllm", engine.url, MODEL, pids=[engine.pid]), adapter


def _start(stack: ExitStack, command: Sequence[str], log: Path, cwd: Path | None = None) -> int:
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, cwd=cwd)
    return stack.enter_context(ended(process)).pid


def _models(url: str) -> list[str]:
    """Return the models that a server has; none while it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return [model["id"] for model in json.load(answer)["data"]]
    except OSError:
        return []


def _until(condition: object, log: Path) -> None:
    """Raises SystemExit with the end of the log."""
    assert callable(condition)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"a part did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(_POLL_S)
