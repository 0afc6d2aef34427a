"""Memory: how many blocks of KV fit on a device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

from worker.attention.base import AttentionShape
from worker.model.config import ModelConfig

_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED: Final = Path("/sys/fs/cgroup/memory.current")
_MEMINFO: Final = Path("/proc/meminfo")
_FIXED_BYTES: Final = 512 << 20
"""Workspaces of libraries, compiled kernels, recorded graphs."""
_BYTES_PER_LOGIT: Final = 64
"""Logits in two dtypes, adjusted, scaled, sorted with their indices, cumulated in float64."""
_BYTES_PER_QUERY: Final = 64 * 4
"""A decode's attention is computed in up to 64 parts of its context, in float32."""


def block_bytes(shape: AttentionShape, block_size: int, dtype: torch.dtype) -> int:
    """Return the size of one block over all layers, keys and values."""
    return 2 * shape.num_layers * block_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def num_blocks_that_fit(num_bytes: int, shape: AttentionShape, block_size: int, dtype: torch.dtype) -> int:
    """Return the blocks in `num_bytes`. Raises ValueError if that is less than the null block and one more."""
    num_blocks = num_bytes // block_bytes(shape, block_size, dtype)
    if num_blocks < 2:
        raise ValueError(
            f"the KV pool needs at least {2 * block_bytes(shape, block_size, dtype)} bytes and has {num_bytes}: raise "
            "--kv-cache-memory, or free memory"
        )
    return num_blocks


def working_bytes(config: ModelConfig, max_step_tokens: int, max_num_seqs: int, dtype: torch.dtype) -> int:
    """Return an upper bound of the memory that a step needs, besides weights and pool."""
    hidden, inner = config.hidden_size, config.intermediate_size or 4 * config.hidden_size
    shape = config.attention
    projections = shape.query_size + 2 * shape.kv_size
    states = max_step_tokens * (4 * hidden + 2 * projections + 3 * inner)
    gathered = max(config.max_model_len, max_step_tokens) * 2 * shape.kv_size  # of one layer, for a resumed prefill
    sampling = max_num_seqs * config.vocab_size * _BYTES_PER_LOGIT
    partial = max_num_seqs * shape.query_size * _BYTES_PER_QUERY
    return (states + gathered) * dtype.itemsize + sampling + partial + _FIXED_BYTES


def free_memory_bytes(device: torch.device, num_sharing: int = 1) -> int:
    """Return the memory that a pool can take: of the GPU, or of this machine within its cgroup's limit.

    Workers that share a GPU get equal parts of it: free memory depends on what the others have allocated.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free if num_sharing == 1 else min(free, total // num_sharing - torch.cuda.memory_reserved(device))
    free = _available_bytes()
    try:
        limit, used = _CGROUP_LIMIT.read_text().strip(), _CGROUP_USED.read_text().strip()
        return free if limit == "max" else min(free, max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # no cgroup v2 here
        return free


def _available_bytes() -> int:
    try:
        lines = _MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):  # no Linux: free pages, without the page cache
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
