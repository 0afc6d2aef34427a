"""The path of a GPU's worker on a CPU: Triton's interpreter runs the kernels, and a recording runs again.

    TRITON_INTERPRET=1 python -m benchmarks.gpu.interpreter MODULE [ARGUMENTS]

runs `MODULE.main(ARGUMENTS)` so, with short prompts. Flash attention, which is no Triton kernel, is torch's here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from worker.contracts.step import Launch

T = TypeVar("T")
CONTEXTS: Final = (48, 160)
"""Decodes are padded to these: an interpreted program takes milliseconds."""
ROWS: Final = (1, 2, 4, 8)
SHORT: Final = {
    **{"BATCH_SIZES": (1, 2), "PROMPT_TOKENS": 8, "CONTEXT_TOKENS": 96, "PREFILL_TOKENS": 32},
    "STEPS_IN_A_ROW": 2,
}
"""The sizes of `benchmarks.dev.engine`. The context is above the 80 tokens that attention gathers here."""


def is_on() -> bool:
    """Return whether this process was started to interpret kernels: Triton decides when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class _LateStream:
    """A stream that does its work when it is collected, as late as a GPU may."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enqueue(self, work: Callable[[], T]) -> Launch[T]:
        return Launch(work, lambda: False)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    seqused: None,
    max_queries: int,
    max_keys: int,
    dropout: float,
    scale: float,
    causal: bool,
    **options: object,
) -> tuple[Tensor, None, None]:
    """Stand in for flash attention: (tokens, heads, head_dim) of sequences end to end, causal from the bottom right."""
    assert causal
    assert (query_starts.dtype, key_starts.dtype) == (torch.int32, torch.int32)
    assert (options["window_left"], options["window_right"], options["block_tables"]) == (-1, -1, None)
    outs = []
    queries, keys = query_starts.tolist(), key_starts.tolist()
    assert (queries[-1], keys[-1]) == (len(query), len(key))
    for row in range(len(queries) - 1):
        own, seen = slice(*queries[row : row + 2]), slice(*keys[row : row + 2])
        num_queries, num_keys = own.stop - own.start, seen.stop - seen.start
        assert num_queries <= max_queries
        assert num_keys <= max_keys
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        states = [part.float().transpose(0, 1).unsqueeze(0) for part in (query[own], key[seen], value[seen])]
        out = functional.scaled_dot_product_attention(
            states[0], states[1], states[2], attn_mask=mask, scale=scale, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1).to(query.dtype))
    return torch.cat(outs), None, None


def _widened(value: Any) -> Any:
    """Return a handle of bfloat16, which the interpreter holds as uint16 and would multiply so, as float32."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if not isinstance(value, TensorHandle) or value.dtype.scalar != tl.bfloat16:
        return value
    return TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def install_attention() -> None:
    """Let xformers' operators run on tensors of the CPU, for all of this process."""
    from triton.runtime import interpreter
    from xformers.ops.fmha import flash

    theirs = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, *factors: Any) -> Any:
        return theirs(self, *(_widened(factor) for factor in factors))

    interpreter.InterpreterBuilder.create_dot = create_dot
    cuda: Any = torch.cuda
    cuda.device = lambda device: contextlib.nullcontext()  # the kernel enters one
    cuda.get_device_capability = lambda *device: (9, 0)
    flash.FwOp.OPERATOR = flash_forward


def install() -> None:
    """Give models on the CPU what they have on a GPU, for all of this process: kernels, recordings, launches ahead."""
    assert is_on(), "start this process with TRITON_INTERPRET=1"
    install_attention()
    from benchmarks.dev import device_rates
    from worker.attention import kv_cache, selector, xformers_paged
    from worker.attention.torch_paged import TorchPagedAttention
    from worker.kernels import cpu, triton_ops
    from worker.model import llama
    from worker.runner import graphs, model_runner

    paged: Any = xformers_paged
    paged.CONTEXTS, paged.DECODE_ROWS, paged.MAX_GATHERED, paged._MAX_SPLITS = CONTEXTS, ROWS, 80, 2

    def select_attention(shape: Any, cache: Any, *, deterministic: bool) -> Any:
        if paged.unsupported(shape, cache.dtype, cache.block_size):
            return TorchPagedAttention(shape, cache)
        return paged.XformersPagedAttention(shape, cache)

    def make_rope(table: Tensor, *, deterministic: bool) -> Any:
        return lambda positions: lambda states, num_heads: triton_ops.rotate(states, positions, table, num_heads)

    def write(self: Any, layer: int, slots: Tensor, key: Tensor, value: Tensor, query: Tensor | None = None) -> None:
        keys, values = (pool[layer].flatten(0, 1) for pool in (self.keys, self.values))
        triton_ops.store(key, value, slots, keys, values, query)

    def record(self: Any, model: Any, max_rows: int, max_model_len: int) -> Any:
        if not isinstance(self._attention, graphs.RecordableAttention):
            return None
        sizes: dict[str, Any] = {"block_size": self.cache.block_size, "max_rows": max_rows}
        sizes |= {"max_model_len": max_model_len, "record": lambda run: run}
        return graphs.StepGraphs(model.decoder, self._attention, self._device, **sizes)

    patches: list[tuple[Any, str, Any]] = [
        (cpu, "_load", lambda: None),
        (selector, "select_attention", select_attention),
        (model_runner, "select_attention", select_attention),
        (model_runner, "DeviceStream", _LateStream),
        (model_runner.ModelRunner, "_record", record),
        (kv_cache.KVCache, "write", write),
        (llama, "make_rope", make_rope),
        (llama, "gated_silu", lambda device, *, deterministic: triton_ops.gated_silu),
        (graphs, "CONTEXTS", CONTEXTS),
        (graphs, "DECODE_ROWS", ROWS),
        (device_rates, "_ROUNDS", 1),
    ]
    for owner, name, value in patches:
        setattr(owner, name, value)


def main(argv: list[str]) -> int:
    install()
    module = importlib.import_module(argv[0])
    engine = importlib.import_module("benchmarks.dev.engine")
    for name, value in SHORT.items():
        setattr(engine, name, value)
    with torch.inference_mode():
        status: int = module.main(argv[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
