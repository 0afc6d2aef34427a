"""The feed-forward part of a layer, in the forms that the engine runs: one class a form, chosen at load."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from worker.model.linear import Linear, OneDnnLinear


class Mlp(Protocol):
    """residual + down(silu(gate(x)) * up(x)); x and residual (num_tokens, hidden_size).

    The result may be `residual` itself, written in place, or a new tensor.
    """

    def __call__(self, states: Tensor, residual: Tensor) -> Tensor: ...

    @property
    def weight_bytes(self) -> int:
        """What one call reads."""


class PlainMlp:
    """Gate and up out of one product of any form, what is between the products in operations of its own."""

    __slots__ = ("_down", "_gate_up", "weight_bytes")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down
        self.weight_bytes = gate_up.weight_bytes + down.weight_bytes

    def __call__(self, states: Tensor, residual: Tensor) -> Tensor:
        gate, up = self._gate_up(states).chunk(2, dim=-1)
        return self._down.add_to(residual, functional.silu(gate).mul_(up))


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
