"""`python -m worker.doctor`: can a worker run here? One JSON object a line: name, status (ok, warn, fail), found, mend.

Reads a checkpoint's head, never its weights, and fetches nothing. On a GPU it runs the attention kernel once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from worker.attention.base import Attention, AttentionShape, ForwardBatch, Span
from worker.attention.kv_cache import KVCache
from worker.attention.torch_paged import TorchPagedAttention
from worker.config import num_ranks_on
from worker.device import current_device
from worker.model.config import DTYPES, ModelConfig, ModelError, UnsupportedModel
from worker.model.load import find_checkpoint, is_hub_id
from worker.model.registry import read_config
from worker.runner.memory import block_bytes, free_memory_bytes

NEWEST_TORCH: Final = (2, 15)
"""Needs a Triton that xformers 0.0.35 does not run on."""
MIN_POOL_BLOCKS: Final = 64
BLOCK_SIZE: Final = 16
TOLERANCE: Final = 0.02
"""Of attention over values of size 1, in bfloat16."""


class Finding(NamedTuple):
    name: str
    status: str
    found: str
    mend: str = ""


def findings(options: argparse.Namespace) -> Iterator[Finding]:
    yield library()
    device = torch.device(_device(options.device))
    yield gpu(device)
    if device.type == "cuda" and torch.cuda.is_available():
        yield kernel(device)
    told, config = model(options.model)
    yield told
    if config is not None:
        yield memory(config, device, options.dtype, options.num_workers)


def _device(asked: str) -> str:
    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def library() -> Finding:
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    found = f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads"
    if numbers >= NEWEST_TORCH:
        return Finding("torch", "warn", found, "install torch 2.13.0: xformers 0.0.35 does not run beside newer ones")
    return Finding("torch", "ok", found)


def gpu(device: torch.device) -> Finding:
    """The device that a worker would take."""
    if device.type != "cuda":
        if Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists():
            mend = "install a torch built for CUDA: requirements/cuda.txt (this one sees no GPU)"
            return Finding("gpu", "warn", "a GPU is there, but this torch cannot use it", mend)
        return Finding("gpu", "ok", "none: workers run on the CPU")
    if not torch.cuda.is_available():
        return Finding("gpu", "fail", f"--device {device}: torch sees no GPU", "install its driver, or --device cpu")
    if (device.index or 0) >= torch.cuda.device_count():
        mend = f"name one from cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        return Finding("gpu", "fail", f"--device {device}: there are {torch.cuda.device_count()} GPUs", mend)
    free, total = torch.cuda.mem_get_info(device)
    found = f"{torch.cuda.get_device_name(device)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if free < total / 2:
        return Finding("gpu", "warn", found, "another process holds most of it: `nvidia-smi` names it")
    return Finding("gpu", "ok", found)


def kernel(device: torch.device) -> Finding:
    """xformers' paged kernel, once, beside plain torch."""
    try:
        from worker.attention.xformers_paged import XformersPagedAttention
    except ImportError as error:
        mend = "install requirements/cuda.txt, or pip install 'headstart[cuda]'"
        return Finding("kernel", "fail", f"no xformers: {error}", mend)
    found = f"xformers {version('xformers')}"
    try:
        error_size = largest_error(XformersPagedAttention, device, torch.bfloat16)
    except Exception as error:  # a kernel that does not build or launch raises anything
        mend = "install the pinned torch, triton and xformers together: requirements/cuda.txt"
        return Finding("kernel", "fail", f"{found} does not run: {type(error).__name__}: {_line(error)}", mend)
    found = f"{found}, off by at most {error_size:.4f} from torch"
    if not error_size <= TOLERANCE:
        return Finding("kernel", "fail", found, "its answers are wrong here: install the pinned versions, or report it")
    return Finding("kernel", "ok", found)


def largest_error(
    kernel: Callable[[AttentionShape, KVCache], Attention], device: torch.device, dtype: torch.dtype
) -> float:
    """Of one decode and one chunk behind a prefix, against plain torch in float32 on the CPU."""
    shape = AttentionShape(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
    spans = [Span(40, 1, [1, 2, 3]), Span(16, 20, [4, 5, 6])]
    draw = torch.Generator().manual_seed(0)
    slots = [span.block_table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for span in spans for i in _places(span)]
    held = [torch.randn(7, BLOCK_SIZE, 2, 64, generator=draw) for _ in range(2)]
    query, key, value = (torch.randn(len(slots), heads, 64, generator=draw) for heads in (4, 2, 2))

    def run(make: Callable[[AttentionShape, KVCache], Attention], device: torch.device, dtype: torch.dtype) -> Tensor:
        cache = KVCache(shape, 7, BLOCK_SIZE, dtype, device)
        cache.keys[0].copy_(held[0])
        cache.values[0].copy_(held[1])
        attention = make(shape, cache)
        positions = torch.tensor([i for span in spans for i in _places(span)], device=device)
        batch = ForwardBatch(positions, positions, torch.tensor(slots, device=device), attention.plan(spans))
        q, k, v = (each.to(device, dtype) for each in (query, key, value))
        with current_device(device):
            return attention.attend(0, q, k, v, batch).float().cpu()

    exact = run(TorchPagedAttention, torch.device("cpu"), torch.float32)
    return float((run(kernel, device, dtype) - exact).abs().max())


def _places(span: Span) -> range:
    return range(span.start, span.stop)


def model(source: str) -> tuple[Finding, ModelConfig | None]:
    """The checkpoint's head. A Hugging Face id is looked up in the cache of what was fetched, not fetched."""
    if is_hub_id(source) and not Path(source).expanduser().exists():
        return _hub(source), None
    try:
        checkpoint = find_checkpoint(source)
        config = read_config(checkpoint)
    except UnsupportedModel as error:
        found = f"{source}: {_line(error)}"
        return Finding("model", "warn", found, "it will run through transformers, and is checked at load"), None
    except (ModelError, OSError, ValueError) as error:
        return Finding("model", "fail", f"{source or 'the default model'}: {_line(error)}", "correct --model"), None
    size = f"{config.num_layers} layers, {num_parameters(config) / 1e6:,.0f} M parameters"
    found = f"{checkpoint.name} ({config.model_type}, {size}, {config.max_model_len:,} tokens of context)"
    return Finding("model", "ok", found), config


def _hub(source: str) -> Finding:
    from huggingface_hub import try_to_load_from_cache

    name, _, revision = source.partition("@")
    if isinstance(try_to_load_from_cache(name, "config.json", revision=revision or None), str):
        return Finding("model", "ok", f"{source} was fetched before")
    return Finding("model", "warn", f"{source} is not here yet", f"fetch it first: hf download {name}")


def num_parameters(config: ModelConfig) -> int:
    """Without norms and biases, which hardly count."""
    hidden = config.hidden_size
    layer = hidden * (2 * config.query_size + 2 * config.kv_size + 3 * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * hidden * (1 if config.tie_embeddings else 2)


def memory(config: ModelConfig, device: torch.device, dtype: str | None, num_workers: int) -> Finding:
    """Weights, and a pool for one request of the whole context."""
    asked = DTYPES[dtype or ("float32" if device.type == "cpu" else "bfloat16")]
    weights = num_parameters(config) * asked.itemsize
    per_block = block_bytes(config.attention, BLOCK_SIZE, asked)
    context = -(-config.max_model_len // BLOCK_SIZE) * per_block
    share = num_workers
    if device == torch.device("cuda"):  # they are dealt out
        share = num_ranks_on(0, max(1, torch.cuda.device_count()), num_workers)
    free = free_memory_bytes(device)
    where = f"{'on the GPU ' if device.type == 'cuda' else ''}for {share} worker{'s' if share > 1 else ''}"
    gib = f"{free / 2**30:.1f} GiB free {where}; each needs {weights / 2**30:.1f} for weights"
    if share * (weights + MIN_POOL_BLOCKS * per_block) > free:
        return Finding("memory", "fail", gib, "take fewer --num-workers, --dtype bfloat16, or a smaller model")
    found = f"{gib} and {context / 2**30:.1f} for one request of the whole context"
    if share * (weights + context) > free:
        return Finding("memory", "warn", found, "the context will be cut to the pool: fewer workers, or bfloat16")
    return Finding("memory", "ok", found)


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m worker.doctor", description="Can a worker run here?")
    p.add_argument("--model", default="")
    p.add_argument("--device", default="auto")
    p.add_argument("--dtype", choices=sorted(DTYPES))
    p.add_argument("--num-workers", type=int, default=1)
    return p


def main(argv: Sequence[str]) -> int:
    for finding in findings(parser().parse_args(argv)):
        print(json.dumps(finding._asdict()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
