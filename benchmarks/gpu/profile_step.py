"""One decode and one prefill step under torch's profiler: a table of kernels and a Chrome trace of each.

python -m benchmarks.gpu.profile_step --shape llama-8b --device cuda --out DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.dev import engine
from benchmarks.dev.device_rates import synchronise
from benchmarks.dev.random_model import SHAPES, random_model
from cache.types import BlockId
from worker.contracts.step import SamplingRow, SequenceStep, Step
from worker.model.config import LoadOptions
from worker.runner.model_runner import ModelRunner
from worker.wire import SamplingParams

BLOCK_SIZE = 16
ROWS = 40
"""The lines of the table that is printed and kept."""


def steps(num_tokens: int) -> dict[str, Step]:
    """Return a prefill of `num_tokens`, and the decode of one sequence after it."""
    table = [BlockId(1 + index) for index in range(-(-num_tokens // BLOCK_SIZE))]
    slots = [BLOCK_SIZE + index for index in range(num_tokens)]
    row = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0, num_tokens, [1] * num_tokens, [])
    return {
        "prefill": Step([SequenceStep([1] * num_tokens, 0, table, slots, (row,))]),
        "decode": Step([SequenceStep([1], num_tokens - 1, table, slots[-1:], (row,))]),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.profile_step", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    model = random_model(options.shape, LoadOptions(dtype=options.dtype, device=options.device))
    num_tokens = engine.PREFILL_TOKENS
    num_blocks = 2 + num_tokens // BLOCK_SIZE
    runner = ModelRunner(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, eos_token_ids=(), max_num_seqs=1)
    is_cuda = model.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    order = "self_cuda_time_total" if is_cuda else "self_cpu_time_total"
    for name, step in steps(num_tokens).items():
        for _ in range(2):
            runner.run(step)
        synchronise(model.device)
        with profile(activities=activities) as profiler:
            runner.run(step)
            synchronise(model.device)
        table = profiler.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=70)
        (options.out / f"profile-{name}.txt").write_text(table)
        profiler.export_chrome_trace(str(options.out / f"profile-{name}.json.gz"))
        print(f"{name} of {options.shape}, {num_tokens:,} tokens\n{table}", flush=True)
    if torch.cuda.is_available():
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    print(f"profile-decode and profile-prefill: a table (.txt) and a trace (.json.gz) each, in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
