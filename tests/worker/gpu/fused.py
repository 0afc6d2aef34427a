"""Our Triton kernels against operations of torch, on a GPU or interpreted."""

from __future__ import annotations

import torch

from worker.kernels import triton_ops as gpu_kernels
from worker.model.config import RopeConfig
from worker.model.rope import rope_table, torch_rotation


def fused_differences(
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float16,
) -> dict[str, float]:
    """Compare our kernels with operations of torch over a slice of a fused product, and check the rest of it."""
    generator = torch.Generator().manual_seed(head_dim)
    num_tokens, num_rotated = 3, num_heads + num_kv_heads
    fused = torch.randn(num_tokens, (num_rotated + num_kv_heads) * head_dim, generator=generator).to(device, dtype)
    table = rope_table(RopeConfig(), head_dim, 50).to(device, dtype)
    positions = torch.tensor([7, 49, 0], device=device)
    want = torch_rotation(table, positions)(fused, num_rotated)
    got = gpu_kernels.rotate(fused, positions, table, num_rotated)
    key, value = got[:, num_heads:], fused[:, num_rotated * head_dim :].view(num_tokens, num_kv_heads, head_dim)
    slots = torch.tensor([5, 31, 0], device=device)
    pools = torch.randn(2, 2, 40, num_kv_heads, head_dim, generator=generator).to(device, dtype)
    pools[1] = pools[0]
    for pool, states in zip(pools[0], (key, value), strict=True):
        pool.index_copy_(0, slots, states)
    gpu_kernels.store(key, value, slots, pools[1, 0], pools[1, 1], got[:, :num_heads])
    shown = torch.zeros_like(pools[1])
    query, reps, broken = got[:, :num_heads].clone(), num_heads // num_kv_heads, []
    for token, (head, bad) in enumerate(((0, float("nan")), (num_heads - 1, float("inf")), (1, float("-inf")))):
        query[token, head, 3] = bad
        broken.append((int(slots[token]), head // reps, 3))
    gpu_kernels.store(key, value, slots, shown[0], shown[1], query)
    assert sorted(map(tuple, shown[0].isnan().nonzero().tolist())) == sorted(broken)
    assert bool(shown[1].isfinite().all())
    gate, up = fused.chunk(2, dim=-1) if fused.shape[1] % 2 == 0 else fused[:, 1:].chunk(2, dim=-1)
    side_by_side = torch.cat((gate, up), dim=-1)
    gated = torch.nn.functional.silu(gate.float()) * up.float()
    gate_error = (gated - gpu_kernels.gated_silu(side_by_side).float()) / gated.abs().clamp(min=1)
    return {
        f"gate of {gate.shape[1]}": float(gate_error.abs().max()),
        f"rotation of {num_rotated} heads of {head_dim}": float((want.float() - got.float()).abs().max()),
        f"store of {num_kv_heads} heads of {head_dim}": float((pools[0] - pools[1]).abs().max()),
    }
