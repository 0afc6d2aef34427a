"""`headstart bench sampling`: what a token costs when it is sampled as clients ask, over greedy in the same run.

First only `sample`, on rows of likely tokens above noise and on flat rows, one thread. Then decode steps of a model,
in alternation with greedy ones. Times are of the processor, medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.dev.engine import JSON, MIXED, Engine, grammars_of, settings_as_sent
from benchmarks.report import Figure, Report, option_parser, publish
from worker.contracts.step import SamplerCache, SamplingRow
from worker.engine.grammar import GrammarCompiler
from worker.model.config import LoadOptions
from worker.model.load import LoadedModel, load_model
from worker.sampling.sampler import sample
from worker.wire import SamplingParams

EOS: Final = (2,)
NUM_LIKELY: Final = 50
OUTPUT_TOKENS: Final = 200
PROMPT_TOKENS: Final = 32
BATCH_SIZES: Final = (1, 8, 32)
GREEDY: Final[Mapping[str, Any]] = {"temperature": 0.0}
MASK: Final = "mask"
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 0.7, "top_p": 0.95},
    "top_k": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "qwen": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "min_p": {"temperature": 0.7, "min_p": 0.05},
    "typical": {"temperature": 0.7, "typical_p": 0.9},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.1},
    "min_tokens": {"temperature": 0.0, "min_tokens": 10_000},
    "bias": {"temperature": 0.0, "logit_bias": ((7, 5.0),)},
    "bad_words": {"temperature": 0.0, "bad_words": ((7,), (8, 9))},
    MASK: {"temperature": 0.0},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}


def main(argv: list[str]) -> int:
    options = _parse(argv)
    torch.set_num_threads(1)
    figures = []
    for vocab_size in options.vocab_size:
        for num_rows in options.rows:
            figures += _alone(vocab_size, num_rows, options)
    torch.set_num_threads(options.threads)
    if options.model != "none":
        figures += _steps(load_model(options.model, LoadOptions(dtype="float32")), options)
    publish(Report("sampling", figures, {"torch": torch.__version__, "threads": options.threads}), options)
    return 0


def _alone(vocab_size: int, num_rows: int, options: argparse.Namespace) -> list[Figure]:
    """Compare `sample` with its greedy time, and that with one pass of a maximum."""
    usual = vocab_size == 128_256 and num_rows == 8
    suffix = "" if usual else f"_{vocab_size}x{num_rows}"
    likely = _logits(vocab_size, num_rows, spread=1.0)
    greedy_rows = _rows(GREEDY, likely)
    greedy_s = _processor_s(lambda: sample(likely, greedy_rows, EOS), options.rounds)
    maximum_s = _processor_s(lambda: likely.numpy().max(axis=1), options.rounds)
    row_us = 1e6 / num_rows
    figures = [Figure(f"greedy_over_max{suffix}", greedy_s / maximum_s, "", f"{greedy_s * row_us:.0f} us a row")]
    for kind, logits in (("", likely), ("flat_", _logits(vocab_size, num_rows, spread=0.0))):
        for name, params in SETTINGS.items():
            if kind and params["temperature"] == 0.0:
                continue
            rows = _rows(params, logits, masked=name == MASK)
            seconds = _processor_s(lambda rows=rows, logits=logits: sample(logits, rows, EOS), options.rounds)  # type: ignore[misc]
            note = f"{num_rows} rows of {vocab_size:,}: {seconds * row_us:.0f} us a row"
            figures.append(Figure(f"{kind}{name}_ratio{suffix}", seconds / greedy_s, "", note))
    return figures


def _logits(vocab_size: int, num_rows: int, spread: float) -> Tensor:
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((num_rows, vocab_size)).astype(np.float32)
    for row in logits:
        row[generator.choice(vocab_size, NUM_LIKELY)] += spread * generator.uniform(6, 14, NUM_LIKELY)
    return torch.from_numpy(logits)


def _rows(params: Mapping[str, Any], logits: Tensor, *, masked: bool = False) -> list[SamplingRow]:
    """Return rows of choices that have an output, with caches as they are kept between steps."""
    num_rows, vocab_size = logits.shape
    generator = np.random.default_rng(1)
    mask = generator.integers(-(2**31), 2**31, -(-vocab_size // 32)).astype(np.int32) if masked else None
    found = SamplingParams(max_tokens=1, **params)
    outputs = generator.integers(0, vocab_size, (num_rows, OUTPUT_TOKENS)).tolist()
    return [
        SamplingRow(found, row, OUTPUT_TOKENS, (1, 2, 3), output, mask, SamplerCache(), SamplerCache())
        for row, output in enumerate(outputs)
    ]


def _steps(model: LoadedModel, options: argparse.Namespace) -> list[Figure]:
    figures, grammars = [], grammars_of(model)
    for size in BATCH_SIZES:
        for name in [name for name in SETTINGS if name != MASK] + [JSON, MIXED]:
            each = settings_as_sent(name, size) if name in (JSON, MIXED) else [SETTINGS[name]] * size
            greedy, other = (_decoding(model, rows, grammars, options) for rows in ([GREEDY] * size, each))
            times: dict[str, list[float]] = {"greedy": [], name: []}
            for _ in range(options.steps):
                for kind, engine in (("greedy", greedy), (name, other)):
                    begin_s = time.process_time()
                    engine.step()
                    times[kind].append(time.process_time() - begin_s)
            greedy_s, other_s = median(times["greedy"]), median(times[name])
            note = f"{other_s * 1000:.2f} ms for {greedy_s * 1000:.2f} ms"
            figures.append(Figure(f"step_{name}_ratio_b{size}", other_s / greedy_s, "", note, "<= 1.06"))
    return figures


def _decoding(
    model: LoadedModel, settings: Sequence[Mapping[str, Any]], grammars: GrammarCompiler, options: argparse.Namespace
) -> Engine:
    """Return an engine whose sequences, one for each of the settings, all decode."""
    num_tokens = 2 * options.steps + 20
    num_blocks = 1 + len(settings) * -(-(PROMPT_TOKENS + num_tokens) // 16)
    engine = Engine(model, num_blocks, 16, grammars=grammars)
    for at, params in enumerate(settings):
        prompt = np.random.default_rng(at).integers(3, model.config.vocab_size, PROMPT_TOKENS).tolist()
        engine.submit(prompt, num_tokens, **params)
    for _ in range(5):
        engine.step()
    return engine


def _processor_s(run: Callable[[], object], rounds: int) -> float:
    run()
    times = []
    for _ in range(rounds):
        begin_s = time.process_time()
        run()
        times.append(time.process_time() - begin_s)
    return median(times)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = option_parser("sampling", "What sampling costs, over greedy.")
    parser.add_argument("--vocab-size", type=int, nargs="+", default=[128_256], metavar="N", help="sizes of a row")
    parser.add_argument("--rows", type=int, nargs="+", default=[8], metavar="N", help="rows of a batch")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="calls of a setting")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="steps of each of a pair")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="of the model")
    parser.add_argument("--model", default="", help="as of `headstart worker`; none: no steps")
    return parser.parse_args(argv)
