"""`headstart bench speculation`: tokens per second of one worker's engine with drafts and without, in pairs.

Quoting: the model copies the answer of a tool from a recorded conversation. Editing: it copies it with one change.
Writing: it goes on after random tokens at temperature 1, so that nothing repeats. Prompts are cached before they are
timed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from benchmarks.dev.engine import Engine
from benchmarks.dev.simulation.traces import TOOL_CHAT
from benchmarks.dev.tiers import median_figure
from benchmarks.report import Figure, Report, option_parser, publish
from worker.config import WorkerConfig
from worker.contracts.rates import StepCost
from worker.loading.engine import build_bundle
from worker.model.config import LoadOptions
from worker.model.load import load_model
from worker.scheduler.speculation import Speculation

TASKS: Final = {
    "quoting": "Repeat this record exactly, and nothing else.",
    "editing": "Write this record again with every date moved to 2025, and nothing else.",
}
BATCH_SIZES: Final = (1, 16)
BLOCK_SIZE: Final = 16
GOALS: Final = {("quoting", 1): ">= 1.7", ("editing", 1): ">= 1.7"}
_CHARACTERS: Final = (300, 1200)
"""The sizes of tools' answers that are taken."""
_BEGUN: Final = 60
"""Characters of the copy that the prompt ends with: a model this small would write a program instead."""


def tool_answers(path: Path) -> Iterator[str]:
    """Yield the different answers of tools in the recorded conversations."""
    seen = set()
    with gzip.open(path, "rt") as lines:
        for line in lines:
            for message in json.loads(line)["messages"]:
                text = message.get("content") or ""
                if message["role"] == "tool" and text not in seen and _CHARACTERS[0] < len(text) < _CHARACTERS[1]:
                    seen.add(text)
                    yield text


def prompts(kind: str, answers: Sequence[str], tokenizer: Tokenizer, count: int) -> list[list[int]]:
    choose = random.Random(kind)
    if kind == "writing":
        return [choose.choices(range(tokenizer.get_vocab_size()), k=200) for _ in range(count)]
    turn = "<|im_start|>user\n{}\n\n{}<|im_end|>\n<|im_start|>assistant\n{}"
    chosen = islice(cycle(choose.sample(answers, len(answers))), count)
    texts = [turn.format(answer, TASKS[kind], answer[:_BEGUN]) for answer in chosen]
    return [tokenizer.encode(text).ids for text in texts]


def tokens_per_s(engine: Engine, batch: Sequence[Sequence[int]], num_tokens: int, temperature: float) -> float:
    """Decode the batch, whose prompts are cached but for their last block."""
    for prompt in batch:
        engine.submit(prompt, num_tokens, temperature)
    begun_s = time.perf_counter()
    return engine.drain() / (time.perf_counter() - begun_s)


def main(argv: list[str]) -> int:
    options = _parse(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = load_model(options.model, LoadOptions(dtype=options.dtype))
    bundle = build_bundle(WorkerConfig(block_size=BLOCK_SIZE), model, model.config.max_model_len)
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json.decode())
    answers = list(tool_answers(options.traces / TOOL_CHAT))
    figures: list[Figure] = []
    new_engine = partial(Engine, model, options.blocks, BLOCK_SIZE)
    for kind in (*TASKS, "writing"):
        temperature = 1.0 if kind == "writing" else 0.0
        for size in BATCH_SIZES:
            given = prompts(kind, answers, tokenizer, size * options.pairs)
            ratios = []
            engines = (new_engine(), new_engine(speculation=Speculation(options.speculate, StepCost(0.001, 20.0))))
            for number in range(options.pairs):
                batch = given[size * number : size * (number + 1)]
                rates = {}
                for engine in engines[:: 1 if number % 2 else -1]:
                    tokens_per_s(engine, batch, 1, temperature)
                    rates[engine] = tokens_per_s(engine, batch, options.tokens, temperature)
                ratios.append(rates[engines[1]] / rates[engines[0]])
            goal = GOALS.get((kind, size), ">= 0.97")
            note = f"x without drafts, batch {size}, {options.pairs} pairs"
            figures.append(median_figure(f"{kind}_b{size}", ratios, "", note, goal))
    publish(Report("speculation", figures, {"model": model.checkpoint.name, "dtype": options.dtype}), options)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = option_parser("speculation", "Decodes with drafts and without, in pairs.")
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help=f"the folder with {TOOL_CHAT}")
    parser.add_argument("--model", default="", help="as of `headstart worker` (default: the model that is installed)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default float32)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--speculate", type=int, default=8, metavar="N", help="as of `headstart worker` (default 8)")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of a sequence (default 128)")
    parser.add_argument("--pairs", type=int, default=10, help="of each kind and batch size (default 10)")
    parser.add_argument("--blocks", type=int, default=2000, help="in the pool of each engine (default 2,000)")
    return parser.parse_args(argv)
