"""The device of a worker, the blocks of its KV pool, and the context that fits into them."""

from __future__ import annotations

import logging
from typing import Final

import torch

from worker.config import WorkerConfig, default_step_tokens
from worker.model.load import LoadedModel
from worker.runner.memory import block_bytes, free_memory_bytes, num_blocks_that_fit, working_bytes

logger = logging.getLogger(__name__)

_MAX_DEFAULT_POOL_BYTES: Final = {"cpu": 2 << 30}
_POOL_SHARE: Final = {"cpu": 0.25, "cuda": 0.9}
"""Part of the free memory that the pool takes without an option."""


def device_of(config: WorkerConfig) -> str:
    """Return the device. The workers of a machine take its GPUs in turn, unless the option names one."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and (num_gpus := torch.cuda.device_count()):
        return f"cuda:{config.local_rank % num_gpus}"
    return device


def num_sharing(config: WorkerConfig) -> int:
    """Count the workers of this machine on the same GPU, this one included."""
    if config.device not in ("auto", "cuda"):
        return config.local_world_size
    num_gpus = max(1, torch.cuda.device_count())
    return len(range(config.local_rank % num_gpus, config.local_world_size, num_gpus))


def num_pool_blocks(config: WorkerConfig, model: LoadedModel) -> int:
    """Return the options' number of blocks, or one by free memory. On a GPU, leave room for the largest step."""
    if config.num_blocks is not None:
        return max(2, config.num_blocks)  # the null block, and one to use
    shape, device = model.config.attention, model.device
    num_bytes = config.kv_cache_memory
    if num_bytes is None:
        free = free_memory_bytes(device, num_sharing(config))
        num_bytes = int(_POOL_SHARE.get(device.type, 0.5) * free)
        num_bytes = min(num_bytes, _MAX_DEFAULT_POOL_BYTES.get(device.type, num_bytes))
        if device.type == "cuda":
            limits = config.limits(default_step_tokens(device.type, model.options.dtype))
            needed = working_bytes(model.config, limits.max_step_tokens, limits.max_num_seqs, model.dtype)
            num_bytes = max(0, min(num_bytes, free - needed))
    num_blocks = num_blocks_that_fit(num_bytes, shape, config.block_size, model.dtype)
    logger.info("KV pool: %d blocks of %d bytes", num_blocks, block_bytes(shape, config.block_size, model.dtype))
    return num_blocks


def max_model_len_of(config: WorkerConfig, model: LoadedModel, pool_tokens: int) -> int:
    """Return the context length, cut to the pool: a longer request could never run."""
    own = model.config.max_model_len
    wanted = config.max_model_len or own
    if wanted > own:
        raise ValueError(f"--max-model-len {wanted} exceeds the model's {own}")
    if wanted > pool_tokens:
        logger.warning("the context is cut from %d to %d tokens, the size of the KV pool", wanted, pool_tokens)
    return min(wanted, pool_tokens)
