"""Real vLLM servers for tests, in an environment of their own (tools/install_vllm.py), with SmolLM2 as their model.

    with Engine(folder, Options(events="tcp://127.0.0.1:5557")) as engine: ...

starts one, waits for its /health, and ends all its processes. After `kill` or `stop` it may be started again, with the
same ports and log.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
from safetensors.torch import save_file

from tests import smollm2
from tests.e2e.serving import free_ports
from tests.faults.part import Part, get, metrics
from tests.waiting import HANG_S, wait_until
from worker.files.tokenizer_files import canonical_json

ROOT: Final = Path(__file__).parents[2]
INSTALLED: Final = ROOT / ".venv-vllm"
MODEL: Final = "SmolLM2-135M-Instruct"
START_S: Final = 4 * HANG_S
"""Three processes import torch: a minute on two idle cores, and several when the tests' other processes want them."""
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    # By default, vLLM pins itself to all cores but one.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Or the first request with logprobs compiles, for a minute, and all others wait: --enforce-eager doesn't cover it.
    "TORCH_COMPILE_DISABLE": "1",
    # For /reset_prefix_cache and /server_info.
    "VLLM_SERVER_DEV_MODE": "1",
}


@functools.cache
def write_model(folder: Path = INSTALLED / "models") -> Path:
    """Return SmolLM2's folder for vLLM, written when it isn't there: float32 weights, and Headstart's own tokenizer."""
    checkpoint, tokenizer = smollm2.checkpoint(), smollm2.tokenizer()
    target = folder / f"{MODEL}-{checkpoint.revision[:12]}"
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    metadata, bos_and_eos = checkpoint.metadata, _bos_and_eos()
    bos, eos = (metadata["tokenizer.ggml.tokens"][token_id] for token_id in bos_and_eos)
    model = smollm2.reference_model()
    # transformers calls what it read from a GGUF file quantised, and save_pretrained refuses that.
    config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    # Without the class, transformers takes LlamaTokenizer for a model of this type, which splits text otherwise.
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "config": config | {"architectures": ["LlamaForCausalLM"], "dtype": "float32"},
        "generation_config": dict(zip(("bos_token_id", "eos_token_id"), bos_and_eos, strict=True)),
        "tokenizer_config": tokenizer_config,
        "tokenizer": json.loads(canonical_json(tokenizer)),
    }
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        written = Path(temporary) / MODEL
        written.mkdir()
        for name, content in files.items():
            (written / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        # The output layer is the embedding, and stored once.
        tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name != "lm_head.weight"}
        save_file(tensors, written / "model.safetensors", metadata={"format": "pt"})
        with contextlib.suppress(OSError):  # another process was faster
            written.rename(target)
    return target


def _bos_and_eos() -> tuple[int, int]:
    metadata = smollm2.checkpoint().metadata
    return int(metadata["tokenizer.ggml.bos_token_id"]), int(metadata["tokenizer.ggml.eos_token_id"])


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of a test about an engine. An event endpoint of "" publishes nothing."""

    events: str = ""
    """vLLM binds it when it has `*` or `::`, or is `ipc://`; otherwise it connects, and the test has to bind."""
    replay: str = ""
    """vLLM always binds it."""
    topic: str = ""
    block_size: int = 32
    """In tokens. On a CPU it has to be a multiple of 32."""
    num_blocks: int | None = None
    """Blocks of the KV pool, one of which vLLM keeps for itself. None: as many as fill `kv_cache_gib`."""
    kv_cache_gib: int = 1
    max_model_len: int = 8192
    """vLLM refuses to start when the pool cannot hold one request of this length."""
    api_key: str = ""
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    niceness: int = 0
    model: Path | None = None
    """Another folder than that of SmolLM2."""
    name: str = MODEL
    """The served name."""
    command: Sequence[str] = ("serve",)

    def arguments(self) -> list[str]:
        """Return those of `vllm serve`, after the model and the port."""
        arguments = ["--served-model-name", self.name, "--dtype", "float32", "--max-model-len", str(self.max_model_len)]
        arguments += ["--block-size", str(self.block_size), "--max-num-seqs", "64", "--enforce-eager"]
        arguments += ["--distributed-executor-backend", "uni", "--enable-scale-out"]
        arguments += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        if self.num_blocks is not None:
            arguments += ["--num-gpu-blocks-override", str(self.num_blocks)]
        if self.api_key:
            arguments += ["--api-key", self.api_key]
        if self.events:
            events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.events, "topic": self.topic}
            if self.replay:
                events["replay_endpoint"] = self.replay
            arguments += ["--kv-events-config", json.dumps(events)]
        return [*arguments, *self.args]


class Engine(Part):
    """One `vllm serve` with all its processes; use it as a context manager. Signals go to all of them."""

    def __init__(self, folder: Path, options: Options | None = None, name: str = "vllm") -> None:
        super().__init__(name, free_ports(1)[0], folder / f"{name}.log")
        self.options = options or Options()
        self.start_s = 0.0
        """How long the last start took."""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Engine:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Return before it is ready."""
        assert self.poll() is not None, f"{self.name} runs"
        program = INSTALLED / "bin" / "vllm"
        if not program.exists():
            raise RuntimeError("this test needs vLLM: python tools/install_vllm.py")
        command = [program, *self.options.command, self.options.model or write_model()]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        # Of pytest's own environment, vLLM gets neither the path to our modules nor options that CI sets for us.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VLLM_"))}
        environment = inherited | ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": str(self.options.kv_cache_gib)}
        environment |= {"PATH": f"{INSTALLED / 'bin'}:{inherited.get('PATH', '')}", **self.options.env}
        self._began_s = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["nice", "-n", str(self.options.niceness), *map(str, command), *self.options.arguments()],
                cwd=self.log.parent,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # No session of its own: Linux schedules each session as a group, and niceness counts within one.
                # Two processes of an engine yield in a loop, and as a group they keep others waiting for seconds.
                process_group=0,
            )
        self.pid = self._process.pid

    def wait_ready(self) -> None:
        """Wait until /health answers; AssertionError with the end of the log when the engine ends instead."""
        wait_until(lambda: self.poll() is not None or self.is_ready(), START_S, f"ready: {self.log}")
        assert self.poll() is None, f"{self.name} ended with {self.poll()}\n{self.tail()}"
        self.start_s = time.monotonic() - self._began_s

    def is_ready(self) -> bool:
        get(f"{self.url}/health")
        return True

    def poll(self) -> int | None:
        return 0 if self._process is None else self._process.poll()

    def family(self) -> list[psutil.Process]:
        """Return all its processes that live, those of an ended leader included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if self.pid and os.getpgid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def send(self, number: int) -> None:
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL all of its processes, and wait for their end."""
        family = self.family()
        self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(HANG_S)
        _, alive = psutil.wait_procs(family, timeout=HANG_S)
        assert not alive, f"orphans: {alive}"

    def interrupt(self) -> int:
        """End it as an operator does; return the exit code."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(HANG_S)
        finally:
            self.kill()

    def metrics(self) -> dict[str, float]:
        return metrics(self.url)

    def request(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = HANG_S) -> Any:
        """Return the JSON that it answers to a GET, or a POST of `body`; raise OSError for a status of 400 and more."""
        headers = {"authorization": f"Bearer {self.options.api_key}"} if self.options.api_key else {}
        method = "GET" if body is None else "POST"
        answer = httpx.request(method, f"{self.url}{path}", json=body, headers=headers, timeout=timeout_s)
        if answer.status_code >= 400:
            raise OSError(f"{answer.status_code}: {answer.text}")
        return answer.json() if answer.content else None
