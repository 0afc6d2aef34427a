"""What lies between the products of a layer on a GPU, in one Triton kernel each: a small step waits for its kernels.

In operations of torch the rotation is three kernels and a write to the pool two; both are in every layer.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS: Final = 8
"""Of one token, that a program works on."""


def rotate(states: Tensor, positions: Tensor, table: Tensor, num_heads: int) -> Tensor:
    """The first `num_heads` heads of states (num_tokens, ...) turned as `worker.model.rope.rope_table` says.

    positions (num_tokens,) int64; table (max_len, 2, head_dim), contiguous -> (num_tokens, num_heads, head_dim)
    """
    num_tokens, head_dim = len(states), table.shape[-1]
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=states.dtype, device=states.device)
    _rotate[_grid(num_tokens, num_heads)](
        states, states.stride(0), positions, table, out, num_heads, head_dim, triton.next_power_of_2(head_dim), _HEADS
    )
    return out


def store(key: Tensor, value: Tensor, slots: Tensor, keys: Tensor, values: Tensor, query: Tensor | None = None) -> None:
    """Write (num_tokens, kv_heads, head_dim) to `slots` (num_tokens,) int64 of two pools, each (slots, kv_heads,
    head_dim) and contiguous. Entries of a head must lie side by side.

    Where a `query` (num_tokens, heads, head_dim) that shares a key is not finite, NaN is stored of that key."""
    num_tokens, num_heads, head_dim = key.shape
    queries = key if query is None else query
    _store[_grid(num_tokens, num_heads)](
        key,
        key.stride(0),
        key.stride(1),
        value,
        value.stride(0),
        value.stride(1),
        queries,
        queries.stride(0),
        queries.stride(1),
        slots,
        keys,
        values,
        num_heads,
        head_dim,
        triton.next_power_of_2(head_dim),
        _HEADS,
        queries.shape[1] // num_heads,
    )


def _grid(num_tokens: int, num_heads: int) -> tuple[int, int]:
    return num_tokens, triton.cdiv(num_heads, _HEADS)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(
    states: tl.tensor,
    stride: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    num_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    place = tl.arange(0, WIDTH)[None, :]
    inside = place < HEAD_DIM
    mask = (heads < num_heads) & inside
    row = table + tl.load(positions + token) * (2 * HEAD_DIM)
    cos = tl.load(row + place, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(row + HEAD_DIM + place, mask=inside, other=0.0).to(tl.float32)
    head = states + token * stride + heads * HEAD_DIM
    own = tl.load(head + place, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(head + (place + HEAD_DIM // 2) % HEAD_DIM, mask=mask, other=0.0).to(tl.float32)
    turned = (own * cos + other * sin).to(out.dtype.element_ty)
    tl.store(out + (token * num_heads + heads) * HEAD_DIM + place, turned, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    key: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    value: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    queries: tl.tensor,
    queries_token: tl.tensor,
    queries_head: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    num_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    REPS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    place = tl.arange(0, WIDTH)[None, :]
    mask = (heads < num_heads) & (place < HEAD_DIM)
    target = (tl.load(slots + token) * num_heads + heads) * HEAD_DIM + place
    own = tl.load(key + token * key_token + heads * key_head + place, mask=mask, other=0.0).to(tl.float32)
    for rep in range(REPS):  # adds 0, or NaN
        sharing = queries + token * queries_token + (heads * REPS + rep) * queries_head + place
        own += tl.load(sharing, mask=mask, other=0.0).to(tl.float32) * 0.0
    tl.store(keys + target, own.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + target, tl.load(value + token * value_token + heads * value_head + place, mask=mask), mask=mask)
