"""The feed-forward part of a layer, in the forms that the engine runs: one class a form, chosen at load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.bits import MAX_ROWS, bits
from worker.model.linear import Linear, OneDnnLinear

Gated = Callable[[Tensor], Tensor]
"""[gate up] (num_tokens, 2 * intermediate_size) -> silu(gate) * up, (num_tokens, intermediate_size)."""


class Mlp(Protocol):
    """residual + down(silu(gate(x)) * up(x)); x and residual (num_tokens, hidden_size).

    The result may be `residual` itself, written in place, or a new tensor.
    """

    def __call__(self, states: Tensor, residual: Tensor) -> Tensor: ...

    @property
    def weight_bytes(self) -> int:
        """What one call reads."""


def plain_gated(gate_up: Tensor) -> Tensor:
    """In operations of torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def compiled_gated(gate_up: Tensor) -> Tensor:
    """One loop for a few rows in bfloat16, rounded once; more go through torch's threads."""
    from worker.kernels.bfloat16 import gated

    if len(gate_up) > MAX_ROWS:
        return plain_gated(gate_up)
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    gated(bits(gate_up), bits(out))
    return out


class PlainMlp:
    """Gate and up out of one product of any form, what is between the products on its own."""

    __slots__ = ("_down", "_gate_up", "_gated", "weight_bytes")

    def __init__(self, gate_up: Linear, down: Linear, gated: Gated) -> None:
        self._gate_up = gate_up
        self._down = down
        self._gated = gated
        self.weight_bytes = gate_up.weight_bytes + down.weight_bytes

    def __call__(self, states: Tensor, residual: Tensor) -> Tensor:
        return self._down.add_to(residual, self._gated(self._gate_up(states)))


class OneDnnMlp:
    """What is between the products done by the products, on their results while these are in registers.

    Measured on SmolLM2's shapes in bfloat16, two threads: within 3 % of the plain form for 1 and 8 rows, 0.9 times
    its time for 32 and 0.7 times for 512. Results are rounded once where the plain form rounds twice.
    """

    __slots__ = ("_down", "_gate", "_up", "weight_bytes")

    def __init__(self, gate: OneDnnLinear, up: OneDnnLinear, down: OneDnnLinear) -> None:
        self._gate = gate
        self._up = up
        self._down = down
        self.weight_bytes = gate.weight_bytes + up.weight_bytes + down.weight_bytes

    def __call__(self, states: Tensor, residual: Tensor) -> Tensor:
        product, gate, up = torch.ops.mkldnn._linear_pointwise, self._gate, self._up
        gated = product(states, gate.packed, gate.bias, "swish", [], "")
        return self._down.add_to(residual, product.binary(states, gated, up.packed, up.bias, "mul"))
