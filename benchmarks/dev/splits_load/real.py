"""Real worker processes in float32: prompts next to decodes, at one worker, at two mixed ones, and split over two.

All have the same threads in sum. A split is what a gateway makes of it: the prompt and one token at the first worker,
the rest at the second, which fetches the blocks.
"""

from __future__ import annotations

import random
import statistics
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from benchmarks.dev.tiers_load.worker import Answer, BenchWorker
from benchmarks.report import Figure, percentile
from worker.wire import BlockSource

BLOCK_SIZE: Final = 16
ANSWER_TOKENS: Final = 32
DECODE_PROMPT_TOKENS: Final = 32
DECODE_TOKENS: Final = 64
_VOCAB_SIZE: Final = 1000


class Decodes:
    """Sequences that decode at a worker, one after another in each thread."""

    def __init__(self, worker: BenchWorker, num_threads: int) -> None:
        self._worker = worker
        self.num_threads = num_threads
        self.stopping = threading.Event()
        self.answers: list[Answer] = []

    def run(self, number: int) -> None:
        """Decode until it is `stopping`. What began before counts."""
        draw = random.Random(number)
        while not self.stopping.is_set():
            prompt_ids = draw.choices(range(_VOCAB_SIZE), k=DECODE_PROMPT_TOKENS)
            self.answers.append(self._worker.ask(prompt_ids, DECODE_TOKENS))


@contextmanager
def running(listed: Sequence[Decodes]) -> Iterator[None]:
    """Decode until this is left."""
    with ThreadPoolExecutor(sum(each.num_threads for each in listed)) as threads:
        futures = [threads.submit(each.run, number) for each in listed for number in range(each.num_threads)]
        try:
            yield
        finally:
            for each in listed:
                each.stopping.set()
    for future in futures:
        future.result()


def real_figures(options: Namespace) -> Iterator[Figure]:
    draw = random.Random(0)
    prompts = [draw.choices(range(_VOCAB_SIZE), k=options.prompt_tokens) for _ in range(1 + options.rounds)]
    num_blocks = 2 * (options.prompt_tokens + 1024) * (2 + options.rounds) // BLOCK_SIZE
    common = ["--model", options.model, "--device", "cpu", "--dtype", "float32", "--deterministic"]
    common += ["--num-blocks", str(num_blocks)]
    with BenchWorker([*common, "--threads", str(options.threads)]) as worker:
        decodes = [Decodes(worker, options.decodes)]
        with running(decodes):
            whole = [worker.ask(prompt, ANSWER_TOKENS) for prompt in prompts]
    yield from _figures("one", whole[1:], decodes)

    half = [*common, "--threads", str(max(1, options.threads // 2))]
    with BenchWorker(half) as even, BenchWorker(half) as odd:
        decodes = [Decodes(even, options.decodes - options.decodes // 2), Decodes(odd, options.decodes // 2)]
        with running(decodes):
            mixed = [(odd if at % 2 else even).ask(prompt, ANSWER_TOKENS) for at, prompt in enumerate(prompts)]
    yield from _figures("mixed", mixed[1:], decodes)

    with BenchWorker([*half, "--role", "prefill"]) as prefill, BenchWorker(half) as other:
        decodes = [Decodes(other, options.decodes)]
        with running(decodes):
            split = [_split(prefill, other, prompt) for prompt in prompts]
    yield from _figures("split", split[1:], decodes)
    if not [a.token_ids for a in whole] == [a.token_ids for a in mixed] == [a.token_ids for a in split]:
        raise SystemExit("a split changed an answer")
    gap_s = statistics.median(answer.gaps_s[0] for answer in split[1:])
    yield Figure("split.second_token_s", gap_s, "s", "from the first token: fetch and start at the second worker")
    num_fetched = sum((answer.loaded_tokens or {}).get("peer", 0) for answer in split[1:])
    most = options.rounds * (options.prompt_tokens // BLOCK_SIZE * BLOCK_SIZE)
    yield Figure("split.fetched", num_fetched / most, "", "tokens of whole blocks that were fetched", "1")


def _split(prefill: BenchWorker, mixed: BenchWorker, prompt_ids: list[int]) -> Answer:
    first = prefill.ask(prompt_ids, 1)
    source = BlockSource(prefill.url, prefill.epoch, len(prompt_ids) // BLOCK_SIZE)
    rest = mixed.ask(prompt_ids, ANSWER_TOKENS, source, first.token_ids)
    token_ids, gaps_s = first.token_ids + rest.token_ids, [rest.ttft_s, *rest.gaps_s]
    return Answer(first.ttft_s, first.queue_s, first.cached_tokens, rest.loaded_tokens, token_ids, gaps_s)


def _figures(name: str, answers: list[Answer], decodes: Sequence[Decodes]) -> Iterator[Figure]:
    gaps_s = [gap_s for each in decodes for answer in each.answers for gap_s in answer.gaps_s]
    tokens_per_s = [len(answer.gaps_s) / sum(answer.gaps_s) for answer in answers]
    num_streams = sum(each.num_threads for each in decodes)
    yield Figure(f"{name}.ttft_s", statistics.median(answer.ttft_s for answer in answers), "s", "of the prompts")
    yield Figure(f"{name}.tokens_per_s", statistics.median(tokens_per_s), "1/s", "of one prompt's answer")
    yield Figure(f"{name}.decode_tokens_per_s", len(gaps_s) / sum(gaps_s) * num_streams, "1/s", "of the decodes")
    yield Figure(f"{name}.decode_gap_p50_s", percentile(gaps_s, 0.5), "s")
    yield Figure(f"{name}.decode_gap_p99_s", percentile(gaps_s, 0.99), "s")
