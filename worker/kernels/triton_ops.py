"""Triton kernels between the products of a layer on a GPU: the rotation, the write to the KV pool, the gate of the MLP.

torch needs three kernels for the rotation and two for each other, in every layer. A small step waits for its kernels;
a large one for the memory that the gate's two kernels read and write.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS: Final = 8
"""Heads of one token that a program works on."""
_COLUMNS: Final = 1024
"""Outputs of one token that a program of the gate computes: 8 for each of its 128 threads."""


def rotate(states: Tensor, positions: Tensor, table: Tensor, num_heads: int) -> Tensor:
    """Rotate the first `num_heads` heads of states (num_tokens, width) by `worker.model.rope.rope_table`.

    positions (num_tokens,) int64; table (max_len, 2, head_dim), contiguous -> (num_tokens, num_heads, head_dim)
    """
    num_tokens, head_dim = len(states), table.shape[-1]
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=states.dtype, device=states.device)
    _rotate[_grid(num_tokens, num_heads)](
        states, states.stride(0), positions, table, out, num_heads, head_dim, triton.next_power_of_2(head_dim), _HEADS
    )
    return out


def store(key: Tensor, value: Tensor, slots: Tensor, keys: Tensor, values: Tensor, query: Tensor | None = None) -> None:
    """Write (num_tokens, kv_heads, head_dim) to `slots` (num_tokens,) int64 of two contiguous pools, each (num_slots,
    kv_heads, head_dim). Elements of a head must be adjacent.

    A key becomes NaN if a `query` (num_tokens, heads, head_dim) that shares it is not finite.
    """
    num_tokens, num_heads, head_dim = key.shape
    queries = key if query is None else query
    _store[_grid(num_tokens, num_heads)](
        key,
        *key.stride()[:2],
        value,
        *value.stride()[:2],
        queries,
        *queries.stride()[:2],
        slots,
        keys,
        values,
        num_heads,
        head_dim,
        triton.next_power_of_2(head_dim),
        _HEADS,
        queries.shape[1] // num_heads,
    )


def gated_silu(fused: Tensor) -> Tensor:
    """Return silu(gate) * up, rounded once: gate and up side by side (num_tokens, 2 * size) -> (num_tokens, size)."""
    num_tokens, width = fused.shape
    out = torch.empty((num_tokens, width // 2), dtype=fused.dtype, device=fused.device)
    _gated_silu[num_tokens, triton.cdiv(width // 2, _COLUMNS)](fused, fused.stride(0), out, width // 2, _COLUMNS)
    return out


def _grid(num_tokens: int, num_heads: int) -> tuple[int, int]:
    return num_tokens, triton.cdiv(num_heads, _HEADS)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(
    states: tl.tensor,
    row_stride: tl.tensor,
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
    element = tl.arange(0, WIDTH)[None, :]
    inside = element < HEAD_DIM
    mask = (heads < num_heads) & inside
    row = table + tl.load(positions + token) * (2 * HEAD_DIM)
    cos = tl.load(row + element, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(row + HEAD_DIM + element, mask=inside, other=0.0).to(tl.float32)
    head = states + token * row_stride + heads * HEAD_DIM
    own = tl.load(head + element, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(head + (element + HEAD_DIM // 2) % HEAD_DIM, mask=mask, other=0.0).to(tl.float32)
    rotated = (own * cos + other * sin).to(out.dtype.element_ty)
    tl.store(out + (token * num_heads + heads) * HEAD_DIM + element, rotated, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    key: tl.tensor,
    key_row_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value: tl.tensor,
    value_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    queries: tl.tensor,
    queries_row_stride: tl.tensor,
    queries_head_stride: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    num_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    element = tl.arange(0, WIDTH)[None, :]
    mask = (heads < num_heads) & (element < HEAD_DIM)
    target = (tl.load(slots + token) * num_heads + heads) * HEAD_DIM + element
    own = tl.load(key + token * key_row_stride + heads * key_head_stride + element, mask=mask, other=0.0).to(tl.float32)
    for member in range(GROUP_SIZE):  # adds 0 or NaN
        sharing = queries + token * queries_row_stride + (heads * GROUP_SIZE + member) * queries_head_stride + element
        own += tl.load(sharing, mask=mask, other=0.0).to(tl.float32) * 0.0
    tl.store(keys + target, own.to(keys.dtype.element_ty), mask=mask)
    tl.store(
        values + target,
        tl.load(value + token * value_row_stride + heads * value_head_stride + element, mask=mask),
        mask=mask,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _gated_silu(
    fused: tl.tensor, row_stride: tl.tensor, out: tl.tensor, size: tl.tensor, COLUMNS: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < size
    gate = tl.load(fused + token * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(fused + token * row_stride + size + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * size + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)
