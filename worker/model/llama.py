"""The decoder of the Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3) with fused projections.

    x -> norm -> [q k v] -> (q norm, k norm) -> rope -> attention -> o -> + -> norm -> [gate up] -> silu * -> down -> +

Queries, keys and values come out of one product, gate and up out of another. Heads of q and k lie side by side there,
so one rotation (and for Qwen3 one norm, with the weights of q and k laid side by side too) serves both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.attention.base import Attention, ForwardBatch
from worker.model.config import ModelConfig
from worker.model.linear import Linear
from worker.model.rope import apply_rope


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    """(heads + kv_heads, head_dim)"""
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.output, self.gate_up, self.down)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    embedding: Tensor
    """(vocab_size, hidden_size)"""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Linear
    rope: Tensor
    """(max_model_len, 2, head_dim) in the model's dtype: see `worker.model.rope`"""


class LlamaDecoder:
    """A `worker.model.decoder.Decoder`."""

    __slots__ = ("config", "weights")

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights

    def forward(self, batch: ForwardBatch, attention: Attention) -> Tensor:
        config, weights = self.config, self.weights
        hidden = functional.embedding(batch.token_ids, weights.embedding)
        cos, sin = weights.rope[batch.positions].unsqueeze(2).unbind(1)  # (num_tokens, 1, head_dim) each
        for index, layer in enumerate(weights.layers):
            normed = _rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
            query, key, value = self._qkv(layer, normed, cos, sin)
            attended = attention.attend(index, query, key, value, batch)
            hidden.add_(layer.output(attended))
            normed = _rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden.add_(layer.down(functional.silu(gate).mul_(up)))
        return _rms_norm(hidden, weights.norm, config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.weights.lm_head(hidden).float()

    @property
    def weight_bytes(self) -> int:
        linears = [linear for layer in self.weights.layers for linear in layer.linears]
        return sum(linear.weight_bytes for linear in [*linears, self.weights.lm_head])

    def _qkv(self, layer: LayerWeights, states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        fused = layer.qkv(states)
        rotated_size = config.query_size + config.kv_size
        # (num_tokens, heads + kv_heads, head_dim)
        heads = fused[:, :rotated_size].view(len(fused), -1, config.head_dim)
        if layer.qk_norm is not None:
            heads = functional.rms_norm(heads, (config.head_dim,), None, config.rms_norm_eps) * layer.qk_norm
        heads = apply_rope(heads, cos, sin)
        value = fused[:, rotated_size:].view(len(fused), -1, config.head_dim)
        return heads[:, : config.num_heads], heads[:, config.num_heads :], value


def _rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight` is float32 on CPU: mixed products there would copy it to float32 in every call."""
    if states.is_cuda:  # one fused kernel there; on CPU it is ten small operations
        return functional.rms_norm(states, weight.shape, weight, eps)
    wide = states.float()
    scale = torch.linalg.vecdot(wide, wide).div_(states.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
    normed: Tensor = (wide * scale).mul_(weight).to(states.dtype)
    return normed
