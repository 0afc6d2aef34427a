"""`headstart bench first-token`: from the client's request to its first token, stage by stage.

Real processes on sockets: a gateway, a worker with SmolLM2, and a Redis of their own. Each cell is a prompt of 30, 400
or 2,000 words: warm or cold, plain or streamed. Its requests go back to back on a kept connection. Then warm prompts of
30 words go on new connections, after pauses, and from 16 clients. All systems are asked in turn, so that each round is
a pair:

    here     this checkout            before   the checkout that --before names
    step     the engine's own steps for as many tokens, in this process
    llama    llama.cpp's server, if there is one (--llama-server)
    vllm     a vLLM's own API, and Headstart in front of it, if there is one (--vllm)

A stage is the time between two functions of the real path (`first_token_load/marks.py`). What no stage explains is
printed as `left`.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.dev.engine import Engine
from benchmarks.dev.first_token_load.client import Client, Timed
from benchmarks.dev.first_token_load.stages import STAGES, Walk, walk
from benchmarks.dev.first_token_load.systems import OWN, System, headstart, llama_server, vllm
from benchmarks.report import Figure, Report, option_parser, percentile, publish
from worker.common.cores import num_cores
from worker.model.config import LoadOptions
from worker.model.load import load_model

SIZES: Final = (30, 400, 2000)
PAUSES_S: Final = (0.05, 0.2, 1.0)
NUM_CLIENTS: Final = 16
NUM_TOKENS: Final = 8
BLOCK_SIZE: Final = 16
BUCKETS_MS: Final = (1, 2, 4, 6, 8, 10, 12, 15, 20, 30, 40, 60, 100, 200, 500)
WORDS: Final = (
    *("the", "of", "and", "to", "in", "is", "was", "he", "for", "it", "with", "as", "his", "on", "be", "at", "by"),
    *("had", "not", "are", "but", "from", "or", "have", "an", "they", "which", "one", "you", "were", "all", "her"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to ask."""

    num_words: int
    is_warm: bool = True
    stream: bool = True
    is_new: bool = False
    """On a new connection."""
    pause_s: float = 0.0
    """Before the request."""
    num_clients: int = 1

    @property
    def name(self) -> str:
        parts = ["warm" if self.is_warm else "cold", str(self.num_words), "stream" if self.stream else "plain"]
        parts += ["new"] if self.is_new else []
        parts += [f"after_{self.pause_s * 1000:.0f}_ms"] if self.pause_s else []
        parts += [f"{self.num_clients}_clients"] if self.num_clients > 1 else []
        return "_".join(parts)


def cells(sizes: Sequence[int], *, is_short: bool) -> Iterator[Cell]:
    """Yield what is asked; `is_short`: without the variations."""
    for num_words in sizes:
        for is_warm in (True, False):
            for stream in (True, False):
                yield Cell(num_words, is_warm, stream)
    if not is_short:
        yield Cell(sizes[0], is_new=True)
        yield from (Cell(sizes[0], pause_s=pause_s) for pause_s in PAUSES_S)
        yield Cell(sizes[0], num_clients=NUM_CLIENTS)
        yield Cell(sizes[0], is_warm=False, num_clients=NUM_CLIENTS)


class Times:
    """The times of one system in one cell."""

    def __init__(self) -> None:
        self.ttfts_s: list[float] = []
        self.gaps_s: list[float] = []
        self.walks: list[Walk] = []
        self.cpu_s = 0.0

    def add(self, timed: Timed) -> None:
        self.ttfts_s.append(timed.ttft_s)
        self.gaps_s += timed.gaps_s


class Bench:
    """Asks the systems in turn."""

    def __init__(self, systems: Sequence[System], engine: Engine | None, seed: int) -> None:
        """`engine` makes the steps in this process; None: there are none to compare with."""
        self._systems = systems
        self._engine = engine
        self._random = random.Random(seed)
        self._clients = {system.name: Client(system.url, system.model) for system in systems}
        self._num_prompt_tokens: dict[int, int] = {}
        self.times: dict[tuple[Cell, str], Times] = defaultdict(Times)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def run(self, cell: Cell, num_rounds: int) -> None:
        warm = self._prompt(cell.num_words)
        warm_ids = [self._random.randrange(100, 40_000) for _ in range(4096)]
        runs: list[Callable[[bool], None]] = [
            lambda is_counted, s=system: self._ask(s, cell, warm, is_counted=is_counted)  # type: ignore[misc]
            for system in self._systems
        ]
        if self._engine is not None and cell.num_clients == 1:
            runs.append(lambda is_counted: self._step(cell, warm_ids, is_counted=is_counted))
        for number in range(num_rounds + 2):  # the first two fill the pools
            for run in runs[::-1] if number % 2 else runs:
                run(number > 1)

    def _prompt(self, num_words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=num_words))

    def _ask(self, system: System, cell: Cell, warm: str, *, is_counted: bool) -> None:
        prompts = [warm if cell.is_warm else self._prompt(cell.num_words) for _ in range(cell.num_clients)]
        times = self.times[cell, system.name] if is_counted else Times()
        client = self._clients[system.name]
        if cell.is_new:
            client.close()
        system.take_marks()
        time.sleep(cell.pause_s)
        cpu_s = system.cpu_s()
        if cell.num_clients == 1:
            timed = client.ask(prompts[0], NUM_TOKENS if cell.stream else 1, stream=cell.stream)
            self._num_prompt_tokens[cell.num_words] = timed.num_prompt_tokens
            times.add(timed)
            if system.marks:
                times.walks.append(walk(timed.begun_s, timed.first_s, system.take_marks()))
        else:
            _ask_at_once(system, prompts, times)
        times.cpu_s += (system.cpu_s() - cpu_s) / cell.num_clients

    def _step(self, cell: Cell, warm_ids: Sequence[int], *, is_counted: bool) -> None:
        assert self._engine is not None
        num_tokens = self._num_prompt_tokens[cell.num_words]
        ids = warm_ids[:num_tokens]
        if not cell.is_warm:
            ids = [self._random.randrange(100, 40_000) for _ in range(num_tokens)]
        timed = Timed(time.monotonic())
        self._engine.submit(ids, NUM_TOKENS if cell.stream else 1)
        last_s = 0.0
        while (done := self._engine.step()) is not None:
            now_s = time.monotonic()
            if done[1]:
                if timed.first_s:
                    timed.gaps_s.append(now_s - last_s)
                timed.first_s, last_s = timed.first_s or now_s, now_s
        if is_counted:
            self.times[cell, "step"].add(timed)


def _ask_at_once(system: System, prompts: Sequence[str], times: Times) -> None:
    """Ask on a thread and a connection for each prompt."""
    clients = [Client(system.url, system.model) for _ in prompts]
    found: list[Timed] = []

    def ask(client: Client, prompt: str) -> None:
        found.append(client.ask(prompt, NUM_TOKENS, stream=True))

    threads = [threading.Thread(target=ask, args=pair) for pair in zip(clients, prompts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    if len(found) < len(prompts):
        raise SystemExit(f"{system.name} gave {len(found)} of {len(prompts)} answers")
    for timed in found:
        times.add(timed)


def figures(bench: Bench) -> list[Figure]:
    """Return the first tokens and the gaps of every cell and system."""
    found = []
    for (cell, system), times in bench.times.items():
        name = f"{cell.name}_{system}"
        step = bench.times.get((cell, "step"), Times()).ttfts_s
        p50_s = percentile(times.ttfts_s, 0.5)
        note = f"{len(times.ttfts_s)} answers"
        if step and system != "step":
            note += f", the engine's step + {1000 * (p50_s - percentile(step, 0.5)):.2f} ms"
        found.append(Figure(f"{name}_p50_s", p50_s, "s", note))
        found.append(Figure(f"{name}_p99_s", percentile(times.ttfts_s, 0.99), "s"))
        if times.gaps_s:
            found.append(Figure(f"{name}_gap_p50_s", percentile(times.gaps_s, 0.5), "s"))
        if times.cpu_s:
            found.append(Figure(f"{name}_cpu_s", times.cpu_s / max(1, len(times.ttfts_s)), "s", "of an answer"))
    return found


def cell_lines(bench: Bench, cell: Cell) -> Iterator[str]:
    """Yield a line for each system in this cell, and one for the stages of this checkout: ms, p50 / p99."""
    for (asked, system), times in bench.times.items():
        if asked == cell:
            yield f"{cell.name:22} {system:7} {_milliseconds(times.ttfts_s)}  gap {_milliseconds(times.gaps_s)}  " + (
                histogram(times)
            )
    if walks := bench.times.get((cell, "here"), Times()).walks:
        stages = {stage: [each.stages.get(stage, 0.0) for each in walks] for stage, _ in STAGES}
        stages["left"] = [each.left_s for each in walks]
        yield "  " + ", ".join(f"{stage} {_milliseconds(spent)}" for stage, spent in stages.items())


def _milliseconds(times_s: Sequence[float]) -> str:
    if not times_s:
        return "-"
    return f"{1000 * percentile(times_s, 0.5):.2f} / {1000 * percentile(times_s, 0.99):.2f}"


def histogram(times: Times) -> str:
    """Return the counts of first tokens by their milliseconds. A second mode shows as a second hill."""
    counts = [0] * (len(BUCKETS_MS) + 1)
    for ttft_s in times.ttfts_s:
        counts[sum(1000 * ttft_s >= bound for bound in BUCKETS_MS)] += 1
    bounds = [*(f"<{bound}" for bound in BUCKETS_MS), f">={BUCKETS_MS[-1]}"]
    return " ".join(f"{bound}:{count}" for bound, count in zip(bounds, counts, strict=True) if count)


def main(argv: list[str]) -> int:
    options = _parse(argv)
    worker = ["--model", options.model, "--threads", str(options.threads), "--num-blocks", str(options.num_blocks)]
    worker += ["--dtype", options.dtype]
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder, engine = Path(place), None
        if options.vllm is None:
            systems = [stack.enter_context(headstart("here", OWN, folder, worker))]
            engine = Engine(load_model(options.model, LoadOptions(dtype=options.dtype)), options.num_blocks, BLOCK_SIZE)
        else:
            systems = list(stack.enter_context(vllm(options.vllm, folder)))
        if options.before is not None:
            before = headstart("before", options.before.absolute(), folder, worker, is_noted=False)
            systems.append(stack.enter_context(before))
        if options.llama_server is not None:
            systems.append(stack.enter_context(llama_server(options.llama_server, options.threads, folder)))
        bench = Bench(systems, engine, options.seed)
        stack.callback(bench.close)
        for cell in cells(options.sizes, is_short=options.short):
            bench.run(cell, options.rounds)
            print(*cell_lines(bench, cell), sep="\n", flush=True)
    env = {"threads": options.threads, "dtype": options.dtype, "rounds": options.rounds}
    publish(Report("first-token", figures(bench), env), options)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    assert __doc__ is not None
    parser = option_parser("first-token", __doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=20, help="answers of each system in a cell (default 20)")
    add("--sizes", type=int, nargs="+", default=SIZES, metavar="N", help="words of the prompts (default 30 400 2000)")
    add("--short", action="store_true", help="only kept connections, back to back, one client")
    add("--model", default="", help="of Headstart's engine (default: SmolLM2)")
    add("--threads", type=int, default=num_cores(), help="CPU threads of each engine (default: the cores)")
    add("--num-blocks", type=int, default=4096, help="blocks of each pool (default 4096)")
    add("--dtype", default="float32", help="of Headstart's engine (default float32)")
    add("--before", type=Path, metavar="DIR", help="another checkout, with its .venv, asked in turn")
    found = shutil.which("llama-server")
    add("--llama-server", type=Path, default=found, metavar="FILE", help="llama.cpp's server (default: on the PATH)")
    add("--vllm", type=Path, metavar="DIR", help="an environment with vLLM: compares its API with an adapter in front")
    add("--seed", type=int, default=0, help="of the prompts (default 0)")
    return parser.parse_args(argv)
