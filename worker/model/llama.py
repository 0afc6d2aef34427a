"""The decoder of the Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3) with fused projections.

    x -> norm -> [q k v] -> (q norm, k norm) -> rope -> attention -> o -> + -> norm -> mlp -> +

Queries, keys and values come out of one product. Heads of q and k lie side by side there,
so one rotation (and for Qwen3 one norm, with the weights of q and k laid side by side too) serves both.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from worker.attention.base import Attention, ForwardBatch
from worker.model.config import ModelConfig
from worker.model.linear import Linear
from worker.model.mlp import Mlp
from worker.model.norm import RmsNorm
from worker.model.rope import Rope, Rotation


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    input_norm: RmsNorm
    qkv: Linear
    qk_norm: Tensor | None
    """(heads + kv_heads, head_dim)"""
    output: Linear
    post_norm: RmsNorm
    mlp: Mlp

    @property
    def weight_bytes(self) -> int:
        return self.qkv.weight_bytes + self.output.weight_bytes + self.mlp.weight_bytes


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    embedding: Tensor
    """(vocab_size, hidden_size)"""
    layers: tuple[LayerWeights, ...]
    norm: RmsNorm
    lm_head: Linear
    rope: Rope


class LlamaDecoder:
    """A `worker.model.decoder.Decoder`."""

    __slots__ = ("config", "weights")

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights

    def forward(self, batch: ForwardBatch, attention: Attention) -> Tensor:
        weights = self.weights
        hidden = functional.embedding(batch.token_ids, weights.embedding)
        rotation = weights.rope.at(batch.positions)
        for index, layer in enumerate(weights.layers):
            query, key, value = self._qkv(layer, layer.input_norm(hidden), rotation)
            attended = attention.attend(index, query, key, value, batch)
            hidden = layer.output.add_to(hidden, attended)
            hidden = layer.mlp(layer.post_norm(hidden), hidden)
        return weights.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.weights.lm_head(hidden)

    @property
    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes for layer in self.weights.layers) + self.weights.lm_head.weight_bytes

    def _qkv(self, layer: LayerWeights, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        fused = layer.qkv(states)
        num_rotated = config.num_heads + config.num_kv_heads
        split = num_rotated * config.head_dim
        value = fused[:, split:].view(len(fused), -1, config.head_dim)
        if layer.qk_norm is not None:
            heads = fused[:, :split].view(len(fused), num_rotated, config.head_dim)
            normed = functional.rms_norm(heads, (config.head_dim,), None, config.rms_norm_eps) * layer.qk_norm
            fused = normed.flatten(1)
        heads = rotation(fused, num_rotated)
        return heads[:, : config.num_heads], heads[:, config.num_heads :], value
