"""Start vLLM servers for measurements: two small processes of one random model, on this machine's CPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from benchmarks.dev.gateway_load.processes import MODEL, free_ports, make_bundle
from worker.wire import TokenizerBundle

BLOCK_SIZE: Final = 32
"""The least on a CPU."""
MAX_MODEL_LEN: Final = 8192
START_TIMEOUT_S: Final = 900.0
_POLL_S: Final = 0.5
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


@dataclass(frozen=True, slots=True)
class Engine:
    """A running server."""

    url: str
    events: str
    """Endpoint of its cache events, as the server reports it."""
    replay: str
    pid: int = 0
    """The process of its API server; 0: not started here."""

    async def counters(self, session: aiohttp.ClientSession) -> dict[str, float]:
        """Return its metrics, summed over their labels."""
        async with session.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        totals: dict[str, float] = {}
        for line in lines:
            if not line.startswith("#"):
                sample, _, value = line.rpartition(" ")
                name = sample.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    async def reset(self, session: aiohttp.ClientSession, model: str) -> None:
        """Empty its cache, and store a block: the engine publishes the reset with the next stored block."""
        async with session.post(self.url + "/reset_prefix_cache") as response:
            response.raise_for_status()
        body = {"model": model, "prompt": list(range(100, 100 + 2 * BLOCK_SIZE)), "max_tokens": 1}
        async with session.post(self.url + "/v1/completions", json=body) as response:
            response.raise_for_status()


def write_model(folder: Path, hidden_size: int, num_layers: int) -> None:
    """Write a random Llama with SmolLM2's tokenizer: its prefills take time, and its text is noise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    bundle, _ = make_bundle()
    config = LlamaConfig(
        vocab_size=bundle.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        max_position_embeddings=bundle.max_model_len,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    _write_tokenizer(bundle, folder)
    LlamaForCausalLM(config).save_pretrained(folder)  # replaces the tokenizer's config.json


@contextmanager
def engines(
    environment: Path, model: Path, folder: Path, *, count: int, num_blocks: int | None
) -> Iterator[list[Engine]]:
    """Start `count` at once, wait until all serve, and end them. `num_blocks`: of each pool, by default 1 GiB.

    Each has a core of its own where there are enough, as engines have accelerators of their own: two that share their
    cores are fastest while one of them rests. Raises SystemExit with the end of its log.
    """
    program = environment.absolute() / "bin" / "vllm"
    if not program.exists():
        raise SystemExit(f"{program} is not there: run tools/install_vllm.py, or name its environment with --vllm")
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        started = [
            stack.enter_context(_engine(program, model, folder, i, cores[i % len(cores)], num_blocks))
            for i in range(count)
        ]
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for engine, process in started:
            while not _is_ready(engine.url):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    logs = "".join(log.read_text(errors="replace")[-2000:] for log in folder.glob("*.log"))
                    raise SystemExit(f"vLLM does not serve:\n{logs}")
                time.sleep(_POLL_S)
        yield [engine for engine, _ in started]


@contextmanager
def _engine(
    program: Path, model: Path, folder: Path, number: int, core: int, num_blocks: int | None
) -> Iterator[tuple[Engine, subprocess.Popen[bytes]]]:
    port, events_port, replay_port = free_ports(3)
    # Bound by vLLM for any number of readers, which it does at all addresses only; the events hold public recordings.
    events, replay = f"tcp://*:{events_port}", f"tcp://127.0.0.1:{replay_port}"
    sources = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events, "replay_endpoint": replay}
    command = [str(program), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--block-size", str(BLOCK_SIZE), "--max-num-seqs", "64", "--enforce-eager", "--enable-scale-out"]
    command += ["--distributed-executor-backend", "uni", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    command += ["--kv-events-config", json.dumps(sources)]
    command += [] if num_blocks is None else ["--num-gpu-blocks-override", str(num_blocks)]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VLLM_"))}
    env: dict[str, Any] = inherited | _ENVIRONMENT | {"PATH": f"{program.parent}:{inherited.get('PATH', '')}"}
    with (folder / f"engine-{number}.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    os.sched_setaffinity(process.pid, {core})
    try:
        yield Engine(f"http://127.0.0.1:{port}", events, replay, process.pid), process
    finally:
        with contextlib.suppress(ProcessLookupError):  # its processes outlive their leader
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def running(url: str) -> Engine:
    """Return a server that runs already, with the event endpoints that it reports."""
    with urllib.request.urlopen(f"{url}/kv_event_sources", timeout=5) as answer:
        source = json.load(answer)["0"]
    return Engine(url, source["endpoint"], source["replay_endpoint"])


def _write_tokenizer(bundle: TokenizerBundle, folder: Path) -> None:
    """Write the files of the bundle's tokenizer."""
    (folder / "tokenizer.json").write_bytes(bundle.tokenizer_json)
    fields = {name: getattr(bundle, name) for name in ("chat_template", "bos_token", "eos_token")}
    # Without the class, transformers takes LlamaTokenizer for a Llama, which splits text otherwise.
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    (folder / "config.json").write_text(json.dumps({"vocab_size": bundle.vocab_size}))
