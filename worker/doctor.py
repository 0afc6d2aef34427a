"""`python -m worker.doctor`: checks whether a worker can run here, and prints one JSON object for each check.

It reads the head of a checkpoint but no weights, and fetches nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch

from worker.common.checks import Check, check_kv_disk, judge, judge_gpu, print_check
from worker.common.cores import busy_advice, num_cores, thread_times
from worker.common.options import num_bytes
from worker.config import KV_DISK_BYTES
from worker.files.errors import ModelError, UnsupportedModel
from worker.files.tokenizer_files import is_hub_id
from worker.kernels.cpu import NO_COMPILER, matmul_kernels_for, problem
from worker.model.base import Checkpoint
from worker.model.config import DTYPES, ModelConfig
from worker.model.dtype import CHOICES, choose_dtype
from worker.model.gguf import GGUFCheckpoint
from worker.model.load import find_checkpoint, find_family
from worker.model.quantisation import NUM_BITS, PANEL_BITS
from worker.runner.memory import block_bytes, free_memory_bytes

BLOCK_SIZE: Final = 16  # a worker's default
MIN_POOL_BLOCKS: Final = 64  # 1,024 tokens: one short chat
PROBE_S: Final = 0.5  # enough to measure what other programs take of the processors


def checks(options: argparse.Namespace) -> Iterator[Check]:
    """Yield the checks in the order in which a worker starts."""
    torch.set_num_threads(num_cores(options.num_workers))
    yield Check("torch", "ok", f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads for a worker")
    asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked if options.device == "auto" else options.device)
    except RuntimeError as error:
        yield Check("gpu", "fail", f"--device {options.device}: {str(error).partition('.')[0]}", "give cpu or cuda:N")
        return
    device_check = check_device(device)
    yield device_check
    if device.type == "cpu":
        yield check_cores()
        yield check_kernels(device)
    model_check, model = check_model(options.model)
    yield model_check
    if model is not None and device_check.status != "fail":
        yield check_memory(*model, device, options.dtype, options.num_workers)
    if options.kv_disk is not None:
        yield check_kv_disk(options.kv_disk, options.kv_disk_size, options.num_workers)


def check_device(device: torch.device) -> Check:
    """Check the device that a worker would take."""
    if device.type != "cuda":
        fix = "run `make install`: where it sees the card, it takes torch's build for CUDA"
        if Path("/dev/nvidiactl").exists():
            return Check("gpu", "warn", "a GPU is there, but this torch cannot use it", fix)
        return Check("gpu", "ok", "none: workers run on the CPU")
    num_gpus = torch.cuda.device_count()
    if (device.index or 0) >= num_gpus:
        fix = "install its driver, name another device, or take --device cpu"
        return Check("gpu", "fail", f"--device {device}: torch sees {num_gpus} GPUs", fix)
    if importlib.util.find_spec("xformers") is None:
        return Check("gpu", "fail", "xformers is not installed", "pip install 'headstart[cuda]'")
    return judge_gpu(torch.cuda.get_device_name(device), *torch.cuda.mem_get_info(device))


def check_cores() -> Check:
    """Compute for `PROBE_S`, and check that other programs took none of the processors."""
    begun, states, end_s = thread_times(), torch.ones(256, 256), time.monotonic() + PROBE_S
    while time.monotonic() < end_s:
        states @ states
    advice = busy_advice(begun)
    return judge("cores", advice or "free", (bool(advice), "warn", "end them, or give the worker fewer --threads"))


def check_kernels(device: torch.device) -> Check:
    """Check the compiled kernels, and compile them if necessary."""
    if matmul_kernels_for(torch.float32, device) is not None:
        return Check("kernels", "ok", "compiled for this processor")
    why = problem() or ""
    fix = "without AVX2 there is none; on other processors, repair the cause"
    if why.startswith(NO_COMPILER):
        fix = "install g++ (apt-get install g++); a C compiler is not enough"
    return Check("kernels", "warn", f"the model runs in torch, slower: {why}", fix)


def check_model(source: str) -> tuple[Check, tuple[Checkpoint, ModelConfig] | None]:
    """Read the checkpoint's head. A Hugging Face id is looked up in the cache only."""
    if is_hub_id(source) and not Path(source).expanduser().exists():
        from huggingface_hub import try_to_load_from_cache

        name, _, revision = source.partition("@")
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision or None), str):
            return Check("model", "ok", f"{source} is in the cache of Hugging Face"), None
        command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        return Check("model", "warn", f"{source} is not here yet", f"fetch it first: {command}"), None
    try:
        checkpoint = find_checkpoint(source)
        config = checkpoint.config(find_family(checkpoint.model_type))
    except UnsupportedModel as error:
        return Check("model", "warn", f"{source}: {error}", "a start shows whether transformers runs it"), None
    except (ModelError, OSError, ValueError) as error:
        return Check("model", "fail", f"{source or 'the default model'}: {error}", "correct --model"), None
    size = f"{config.attention.num_layers} layers, {num_parameters(config) / 1e6:,.0f} M parameters"
    found = f"{checkpoint.name} ({config.model_type}, {size}, {config.max_model_len:,} tokens of context)"
    return Check("model", "ok", found), (checkpoint, config)


def num_parameters(config: ModelConfig) -> int:
    """Count parameters, without norms and biases."""
    hidden, shape = config.hidden_size, config.attention
    layer = hidden * (2 * shape.query_size + 2 * shape.kv_size + 3 * config.intermediate_size)
    return shape.num_layers * layer + config.vocab_size * hidden * (1 if config.tie_embeddings else 2)


def weight_bytes(checkpoint: Checkpoint, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> int:
    """Estimate the size of the weights in the default form of a worker."""
    if not isinstance(checkpoint, GGUFCheckpoint) or matmul_kernels_for(dtype, device) is None:
        return num_parameters(config) * dtype.itemsize
    bits = {kind: PANEL_BITS[num_bits] for kind, num_bits in NUM_BITS.items()}
    matrices = sum(size * bits.get(kind, 32) for kind, size in checkpoint.matrix_sizes()) // 8
    return matrices + config.vocab_size * config.hidden_size * dtype.itemsize  # embeddings are dense


def check_memory(
    checkpoint: Checkpoint, config: ModelConfig, device: torch.device, dtype: str | None, num_workers: int
) -> Check:
    """Check that the weights fit, with a pool for one request of the whole context."""
    asked = DTYPES[choose_dtype(dtype, device.type)]
    weights = weight_bytes(checkpoint, config, device, asked)
    per_block = block_bytes(config.attention, BLOCK_SIZE, asked)
    context = -(-config.max_model_len // BLOCK_SIZE) * per_block
    num_sharing = num_workers
    if device == torch.device("cuda"):  # serve spreads the workers over all GPUs
        num_sharing = -(-num_workers // max(1, torch.cuda.device_count()))
    free = free_memory_bytes(device)
    found = (
        f"{free / 2**30:.1f} GiB free on {device} for {num_sharing} worker(s); each needs {weights / 2**30:.1f} for "
        f"weights and {context / 2**30:.1f} for one request of the whole context"
    )
    smallest, wanted = (num_sharing * (weights + pool) for pool in (MIN_POOL_BLOCKS * per_block, context))
    return judge(
        "memory",
        found,
        (smallest > free, "fail", "take fewer --num-workers, --dtype bfloat16, or a smaller model"),
        (wanted > free, "warn", "the context is cut to the pool: fewer workers, or bfloat16"),
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m worker.doctor", description="Can a worker run here?")
    parser.add_argument("--model", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=CHOICES)
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--kv-disk", type=Path)
    parser.add_argument("--kv-disk-size", type=num_bytes, default=KV_DISK_BYTES)
    for check in checks(parser.parse_args(argv)):
        print_check(check)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
