"""A block that leaves the pool and comes back is the same block, bit for bit, in every dtype."""

from __future__ import annotations

import pytest
import torch

from cache.types import BlockId
from worker.attention.base import AttentionShape
from worker.attention.block_copier import make_copier
from worker.attention.kv_cache import KVCache

SHAPE = AttentionShape(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    source, target = (KVCache(SHAPE, 5, 4, dtype, torch.device("cpu")) for _ in range(2))
    bits = torch.randint(0, 256, source.rows.view(torch.uint8).shape, dtype=torch.uint8)  # NaNs too: bytes are bytes
    source.rows.view(torch.uint8).copy_(bits)
    payload = make_copier(source).new_payload()
    make_copier(source).read(BlockId(2), payload)
    make_copier(target).write(BlockId(4), payload)
    assert len(payload) == source.block_bytes
    came = target.rows.view(torch.uint8)
    assert torch.equal(came[:, 16:20], bits[:, 8:12])
    assert not came[:, :16].any()  # nothing else was written


@pytest.mark.parametrize("count", [1, 3])
def test_payloads_lie_one_behind_the_other(count: int) -> None:
    cache = KVCache(SHAPE, 5, 4, torch.float32, torch.device("cpu"))
    payloads = make_copier(cache).new_payload(count)
    assert payloads.nbytes == count * cache.block_bytes
    assert not payloads.readonly
