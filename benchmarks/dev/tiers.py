"""`headstart bench tiers`: the first token of a long prompt whose blocks are elsewhere, and what keeping blocks costs.

Two worker processes, in float32 and deterministic: one has a disk below its pool, the other fetches from it. A pool
holds one prompt, so every other prompt empties it. A round, with a prompt that is new:

    computed | in the pool | fetched by the peer | the prompt before, from disk | from disk without the page cache

Then the first worker ends and starts again, and the prompts come from disk once more. Then a third worker
computes each prompt, and a fourth joins and gets it with its warm start. Every answer has to be that of the
computed prompt. At last both first workers decode batches of 8 new prompts, in alternating pairs: blocks are written
that no one reads. The disk is that of the temporary folder: TMPDIR names another.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.dev.private_redis import private_redis
from benchmarks.dev.tiers_load.saver import SaverBench
from benchmarks.dev.tiers_load.worker import TIMEOUT_S, Answer, BenchWorker, drop_page_cache
from benchmarks.report import Figure, Report, option_parser, publish
from worker.wire import BlockSource

BLOCK_SIZE: Final = 16
ANSWER_TOKENS: Final = 8
BATCH_SIZE: Final = 8
BATCH_PROMPT_TOKENS: Final = 32
BATCH_ANSWER_TOKENS: Final = 96
MIN_PROMPT_TOKENS: Final = 1024
"""The pool of one prompt holds a batch too."""
PLACES: Final = {
    "pool": "in the pool",
    "disk": "from disk, in the page cache",
    "disk_uncached": "from disk, page cache dropped",
    "peer": "from another worker",
    "restart": "from disk after a restart, page cache dropped",
    "join": "at a worker that has just joined",
}
_VOCAB_SIZE: Final = 1000
_POLL_S: Final = 0.02
_NUM_RESAMPLES: Final = 2000


class TiersBench:
    """The two workers, and what they gave."""

    def __init__(self, options: argparse.Namespace, folder: Path, block_bytes: int) -> None:
        """The keeper's disk is `folder`. A block has `block_bytes`."""
        num_tokens = options.prompt_tokens + ANSWER_TOKENS
        pool = ["--num-blocks", str(1 + -(-num_tokens // BLOCK_SIZE))]
        self._common = ["--model", options.model, "--device", "cpu", "--dtype", "float32", "--deterministic"]
        self.keeper = BenchWorker([*self._common, *pool, "--kv-disk", str(folder)])
        self.peer = BenchWorker([*self._common, *pool])
        self._num_loadable = (options.prompt_tokens - 1) // BLOCK_SIZE
        self.loadable_bytes = self._num_loadable * block_bytes
        """Size of the blocks of one prompt that may come from elsewhere."""
        self.answers: dict[str, list[Answer]] = {place: [] for place in ("cold", *PLACES)}
        """One for each round."""
        self.num_short_loads = 0
        """Loads that did not bring all blocks: the rest was computed."""
        self.written_bytes = self.read_bytes = 0.0
        self.device_shares: list[float] = []
        """The part of each load without the page cache that was read from the device."""
        self._folder = folder
        self._random = random.Random(0)
        self._prompts = [self._new_prompt(options.prompt_tokens) for _ in range(1 + options.rounds)]
        self._stored_per_prompt = (num_tokens - 1) // BLOCK_SIZE  # the last token of an answer has no KV

    def measure_first_tokens(self) -> None:
        previous = self._compute(0)
        source = BlockSource(self.keeper.url, self.keeper.epoch, self._num_loadable)
        self.peer.ask(self._prompts[0], ANSWER_TOKENS, source)
        for number in range(1, len(self._prompts)):
            cold = self._compute(number)
            self.answers["cold"].append(cold)
            self._ask("pool", self.keeper, number, cold)
            self._ask("peer", self.peer, number, cold, source)
            self._ask("disk", self.keeper, number - 1, previous)
            self._ask_uncached("disk_uncached", number, cold)
            previous = cold
        self._count_bytes()

    def measure_restart(self) -> None:
        self.keeper.stop()
        self.keeper.start()
        for number, cold in enumerate(self.answers["cold"], 1):
            self._ask_uncached("restart", number, cold)
        self._count_bytes()

    def measure_join(self, redis: str) -> None:
        """Ask a worker that has just joined for what a peer has computed."""
        num_blocks = 4 + 2 * (self._stored_per_prompt + 1)  # a warm start fills half of a pool
        options = [*self._common, "--num-blocks", str(num_blocks), "--redis", redis]
        with BenchWorker([*options, "--worker-id", "holder"]) as holder:
            for number, cold in enumerate(self.answers["cold"], 1):
                holder.ask(self._prompts[number], ANSWER_TOKENS)
                with BenchWorker([*options, "--worker-id", f"joiner-{number}"]) as joiner:
                    self._ask("join", joiner, number, cold)

    def measure_batches(self, num_pairs: int) -> list[tuple[float, float]]:
        """Return the tokens per second of each pair: with the disk, and without."""
        workers = (self.keeper, self.peer)
        for worker in workers:
            self._tokens_per_s(worker)
        pairs = []
        for number in range(num_pairs):
            order = workers if number % 2 else workers[::-1]
            rates = {worker: self._tokens_per_s(worker) for worker in order}
            pairs.append((rates[self.keeper], rates[self.peer]))
        return pairs

    def _tokens_per_s(self, worker: BenchWorker) -> float:
        prompts = [self._new_prompt(BATCH_PROMPT_TOKENS) for _ in range(BATCH_SIZE)]
        return worker.tokens_per_s(prompts, BATCH_ANSWER_TOKENS)

    def _new_prompt(self, num_tokens: int) -> list[int]:
        return self._random.choices(range(_VOCAB_SIZE), k=num_tokens)

    def _compute(self, number: int) -> Answer:
        """Ask for a new prompt, and wait until the disk has its blocks."""
        answer = self.keeper.ask(self._prompts[number], ANSWER_TOKENS)
        assert answer.cached_tokens == 0, "a new prompt was found"
        num_stored, deadline_s = (1 + number) * self._stored_per_prompt, time.monotonic() + TIMEOUT_S
        while (found := self.keeper.metric("kv_stored_blocks", tier="disk")) < num_stored:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{found:.0f} of {num_stored} blocks were saved to {self._folder}")
            time.sleep(_POLL_S)
        return answer

    def _ask(
        self, place: str, worker: BenchWorker, number: int, cold: Answer, source: BlockSource | None = None
    ) -> Answer:
        """Ask for a prompt again. Raises SystemExit for another answer than the computed one."""
        answer = worker.ask(self._prompts[number], ANSWER_TOKENS, source)
        if answer.token_ids != cold.token_ids:
            raise SystemExit(f"{PLACES[place]}: {answer.token_ids} instead of {cold.token_ids} was answered")
        self.num_short_loads += answer.cached_tokens != self._num_loadable * BLOCK_SIZE
        self.answers[place].append(answer)
        return answer

    def _ask_uncached(self, place: str, number: int, cold: Answer) -> None:
        drop_page_cache(self._folder)
        before = self.keeper.device_read_bytes()
        self._ask(place, self.keeper, number, cold)
        self.device_shares.append((self.keeper.device_read_bytes() - before) / self.loadable_bytes)

    def _count_bytes(self) -> None:
        """Add what this process of the keeper has written and read."""
        self.written_bytes += self.keeper.metric("kv_saved_bytes_total", tier="disk")
        self.read_bytes += self.keeper.metric("kv_loaded_bytes_total", place="disk")


def median_interval(values: Sequence[float], share: float = 0.9) -> tuple[float, float]:
    """Return an interval that holds the median with this probability, by resampling."""
    choose = random.Random(0)
    medians = sorted(statistics.median(choose.choices(values, k=len(values))) for _ in range(_NUM_RESAMPLES))
    cut = round((1 - share) / 2 * _NUM_RESAMPLES)
    return medians[cut], medians[-1 - cut]


def median_figure(name: str, values: Sequence[float], unit: str, note: str, goal: str = "") -> Figure:
    low, high = median_interval(values)
    return Figure(name, statistics.median(values), unit, f"{note} (90 %: {low:.4g} to {high:.4g})", goal)


def first_token_figures(bench: TiersBench, saver_s: Sequence[tuple[float, float]], saver_bytes: int) -> list[Figure]:
    seconds = {place: [answer.ttft_s for answer in answers] for place, answers in bench.answers.items()}
    figures = [median_figure("ttft_cold_s", seconds["cold"], "s", "computed")]
    for place, what in PLACES.items():
        ratios = [each / cold for each, cold in zip(seconds[place], seconds["cold"], strict=True)]
        figures.append(median_figure(f"ttft_{place}_s", seconds[place], "s", what))
        figures.append(median_figure(f"{place}_of_cold", ratios, "", what, "" if place == "pool" else "<= 0.1"))
    for place in ("disk", "disk_uncached", "peer"):
        rates = [bench.loadable_bytes / answer.queue_s / 1e6 for answer in bench.answers[place]]
        figures.append(median_figure(f"{place}_read_mb_per_s", rates, "MB/s", "until the prefill begins"))
    rates = [saver_bytes / saved_s / 1e6 for saved_s, _ in saver_s]
    synced = statistics.median(saver_bytes / synced_s / 1e6 for _, synced_s in saver_s)
    note = f"only the saver; {synced:.0f} until the device has them"
    figures.append(median_figure("disk_write_mb_per_s", rates, "MB/s", note))
    ratio = bench.written_bytes / bench.read_bytes if bench.read_bytes else 0.0
    note = "every prompt is written once; most are loaded three times"
    figures.append(Figure("written_bytes_per_read_byte", ratio, "", note))
    share = statistics.median(bench.device_shares)
    figures.append(Figure("uncached_device_share", share, "", "read from the device with the page cache dropped"))
    figures.append(Figure("short_loads", bench.num_short_loads, "", "did not bring all blocks", "0"))
    return figures


def overhead_figures(pairs: Sequence[tuple[float, float]]) -> list[Figure]:
    note = f"{BATCH_SIZE} streams of {BATCH_ANSWER_TOKENS} tokens"
    ratios = [with_disk / without for with_disk, without in pairs]
    return [
        median_figure("tokens_per_s_b8_disk", [with_disk for with_disk, _ in pairs], "1/s", f"{note}, blocks saved"),
        median_figure("tokens_per_s_b8", [without for _, without in pairs], "1/s", f"{note}, no store"),
        median_figure("overhead_ratio_b8", ratios, "", f"the one over the other, {len(pairs)} pairs", ">= 0.98"),
    ]


def main(argv: list[str]) -> int:
    options = _parse(argv)
    saver = SaverBench(options.model, options.prompt_tokens // BLOCK_SIZE, BLOCK_SIZE)
    saver_s = [saver.seconds() for _ in range(options.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        bench = TiersBench(options, Path(folder) / "blocks", saver.block_bytes)
        with bench.keeper, bench.peer:
            bench.measure_first_tokens()
            bench.measure_restart()
            with private_redis() as redis:
                bench.measure_join(redis)
            pairs = bench.measure_batches(options.pairs)
    figures = [*first_token_figures(bench, saver_s, saver.num_bytes), *overhead_figures(pairs)]
    env = {name: getattr(options, name) for name in ("prompt_tokens", "rounds", "pairs")}
    publish(Report("tiers", figures, env | {"block_bytes": saver.block_bytes}), options)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = option_parser("tiers", "First tokens whose blocks are in other places, and what keeping blocks costs.")
    parser.add_argument("--model", default="", help="as of `headstart worker` (default: the model that is installed)")
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="length of a prompt (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of first tokens (default %(default)s)")
    parser.add_argument(
        "--pairs", type=int, default=12, help="of batches, with a disk and without (default %(default)s)"
    )
    options = parser.parse_args(argv)
    if options.prompt_tokens < MIN_PROMPT_TOKENS:
        parser.error(f"--prompt-tokens: at least {MIN_PROMPT_TOKENS}, so that the pool of one prompt holds a batch")
    for name in ("rounds", "pairs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: at least 1")
    return options
