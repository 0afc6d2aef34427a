"""The first steps of a model, which trigger late allocations and measure its rate."""

from __future__ import annotations

import os
import time

from cache.types import BlockId
from worker.contracts.rates import PrefillRate
from worker.contracts.step import Runner, SamplingRow, SequenceStep, Step
from worker.wire import SamplingParams


def limit_onednn_cache() -> None:
    """Let oneDNN and ideep keep 128 compiled products each, unless the user has set a number.

    They keep one for every number of rows and weight shape, hundreds of KB each, and 1,024 by default. Decodes need a
    few per batch size; the lengths of prefills rarely return. Call this before the first product: then they read it.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's, and ideep's
        os.environ.setdefault(name, "128")


def warm_up(runner: Runner, num_tokens: int, block_size: int) -> PrefillRate:
    """Run steps in the unused pool, to trigger late allocations and to measure the prefill rate.

    A step takes `(step_tokens + tokens) / rate`. One of `num_tokens` and one of about none give both unknowns.
    """
    block_table = [BlockId(1 + i) for i in range(-(-num_tokens // block_size))]
    slots = [block_size + i for i in range(num_tokens)]
    row = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0, num_tokens, [0] * num_tokens, [])
    step = Step([SequenceStep([0] * num_tokens, 0, block_table, slots, (row,))])
    runner.run(step)
    decode = Step([SequenceStep([0], num_tokens - 1, block_table, slots[-1:], (row,))])
    runner.run(decode)
    prefill_s, decode_s = _duration_s(runner, step), _duration_s(runner, decode)
    step_tokens = num_tokens * decode_s / max(prefill_s - decode_s, decode_s)
    return PrefillRate(num_tokens, prefill_s, step_tokens)


def _duration_s(runner: Runner, step: Step) -> float:
    begun_s = time.monotonic()
    runner.run(step)
    return time.monotonic() - begun_s
