"""The choice of the attention backend for a model and its device."""

from __future__ import annotations

import logging

import torch

from worker.attention.base import Attention, AttentionShape
from worker.attention.kv_cache import KVCache
from worker.attention.tiled_paged import TiledPagedAttention
from worker.attention.torch_paged import TorchPagedAttention
from worker.kernels.cpu import MIN_HEAD_DIM, attention_for, has_amx, problem

logger = logging.getLogger(__name__)


def select_attention(shape: AttentionShape, cache: KVCache, *, deterministic: bool) -> Attention:
    """Select xformers on CUDA, on a CPU the compiled kernels of bfloat16 and float32, and torch elsewhere.

    Raises RuntimeError on CUDA without xformers: a GPU must not run slow code unnoticed. Raises ValueError for
    `deterministic` where no kernel serves the model: no other attention gives a token the same bits in any batch.
    """
    if (kernels := attention_for(cache.dtype, cache.device, shape.head_dim)) is not None:
        in_torch = cache.dtype == torch.bfloat16 and has_amx() and not deterministic
        return TiledPagedAttention(shape, cache, kernels, is_deterministic=deterministic, chunks_in_torch=in_torch)
    if deterministic:
        why = problem() or f"they serve float32 and bfloat16, with an even head size from {MIN_HEAD_DIM} on"
        raise ValueError(f"--deterministic needs the compiled kernels: {why}")
    if cache.device.type != "cuda":
        return TorchPagedAttention(shape, cache)
    try:
        from worker.attention.xformers_paged import XformersPagedAttention, unsupported
    except ImportError as error:
        raise RuntimeError(f"device=cuda needs xformers: pip install 'headstart[cuda]' ({error})") from error
    if reason := unsupported(shape, cache.dtype, cache.block_size):
        logger.warning("attention runs in plain torch, which is slow on a GPU: %s", reason)
        return TorchPagedAttention(shape, cache)
    return XformersPagedAttention(shape, cache)
