"""A worker process, and a client that times its answers."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.dev.gateway_load.processes import ended
from worker.common.command_line import module_command
from worker.common.frames import FrameReader
from worker.wire import (
    BlockSource,
    ChoiceState,
    End,
    Failed,
    Frame,
    GenerateRequest,
    SamplingParams,
    Started,
    Tokens,
    pack_request,
)

TIMEOUT_S: Final = 300.0
_ROOT: Final = b"benchmark--tiers"
_READ_BYTES: Final = 1 << 16


@dataclass(slots=True)
class Answer:
    """The answer to one prompt. `fetched_tokens`: those that came into the pool for it, by place."""

    ttft_s: float = 0.0
    queue_s: float = 0.0
    cached_tokens: int = 0
    fetched_tokens: dict[str, int] | None = None
    token_ids: tuple[int, ...] = ()
    gaps_s: list[float] = field(default_factory=list)
    """Times between tokens."""
    last_s: float = 0.0

    def add(self, frame: Frame, now_s: float) -> None:
        """Take a frame that arrived `now_s` after the request. Raises SystemExit for a failure."""
        match frame:
            case Started():
                self.cached_tokens, self.fetched_tokens = frame.num_cached_tokens, frame.fetched_tokens
            case Tokens():
                if self.ttft_s:
                    self.gaps_s.append(now_s - self.last_s)
                self.ttft_s, self.last_s = self.ttft_s or now_s, now_s
                self.token_ids += frame.token_ids
            case End():
                self.queue_s = frame.queue_s
            case Failed():
                raise SystemExit(f"a worker gave no answer: {frame.message}")


class BenchWorker:
    """A worker process that can end and start again. Owns the process."""

    def __init__(self, options: Sequence[str]) -> None:
        """`options`: of `headstart worker`. It starts at `start`."""
        self._command = [*module_command("worker"), "--port", "0", "--log-level", "error", *options]
        self._parts = ExitStack()
        """Ends the process when it is closed."""
        self.pid = 0
        self._host, self._port = "", 0
        self.url = self.epoch = ""

    def start(self) -> None:
        """Return once it serves. Raises SystemExit if it cannot."""
        env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        said = self._parts.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 (`_parts` closes it)
        worker = subprocess.Popen(self._command, env=env, stdout=subprocess.PIPE, stderr=said, text=True)
        process = self._parts.enter_context(ended(worker))
        assert process.stdout is not None
        self.pid = process.pid
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                self.url, self.epoch = event["url"], event["epoch"]
                parts = urlsplit(self.url)
                self._host, self._port = parts.hostname or "", parts.port or 0
                return
        said.seek(0)
        raise SystemExit(f"a worker is not ready: {said.read()[-2000:]}")

    def stop(self) -> None:
        """End the process as an operator would."""
        self._parts.close()

    def __enter__(self) -> BenchWorker:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(
        self,
        prompt_ids: Sequence[int],
        num_tokens: int,
        source: BlockSource | None = None,
        output_ids: tuple[int, ...] = (),
    ) -> Answer:
        """Return the greedy answer of `num_tokens` tokens, from after its first `output_ids`. Any thread may ask."""
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            gateway_id="bench",
            epoch=self.epoch,
            root=_ROOT,
            prompt_ids=list(prompt_ids),
            choices=(ChoiceState(0, 0, output_ids),),
            sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
            source=source,
        )
        body, reader, answer = pack_request(request), FrameReader(), Answer()
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        try:
            begun_s = time.perf_counter()
            connection.request("POST", "/generate", body)
            response = connection.getresponse()
            while data := response.read1(_READ_BYTES):
                now_s = time.perf_counter() - begun_s
                for frame in reader.feed(data):
                    answer.add(frame, now_s)
        finally:
            connection.close()
        if len(output_ids) + len(answer.token_ids) != num_tokens:
            raise SystemExit(f"a worker gave {len(answer.token_ids)} of {num_tokens} tokens")
        return answer

    def tokens_per_s(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Return the output tokens per second of all prompts at once."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            begun_s = time.perf_counter()
            list(threads.map(lambda prompt: self.ask(prompt, num_tokens), prompts))
            return len(prompts) * num_tokens / (time.perf_counter() - begun_s)

    def metric(self, name: str, **labels: str) -> float:
        """Return `headstart_worker_<name>` with these labels; 0.0: nothing was counted."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return next((s.value for s in samples if s.name == f"headstart_worker_{name}" and s.labels == labels), 0.0)

    def device_read_bytes(self) -> int:
        """Return the bytes that the process has read from a device, not from the page cache."""
        lines = Path(f"/proc/{self.pid}/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def drop_page_cache(folder: Path) -> None:
    """Drop the files in `folder` from the page cache, so that the next reads go to the device."""
    for path in folder.rglob("*.blocks"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)  # dirty pages stay
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
