"""The decoder of Llama-like families (Llama, SmolLM2, Mistral, Qwen2, Qwen3) with fused projections, and its loader.

    norm -> [q k v] -> (q norm, k norm) -> rope -> attention -> o -> + -> norm -> mlp -> +

One product gives queries, keys and values, with the heads of q and k side by side. So one rotation serves both, and
in Qwen3 one norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.attention.base import Attention, ForwardBatch
from worker.files.errors import CheckpointError, UnsupportedModel
from worker.kernels.cpu import matmul_kernels_for
from worker.kernels.products import to_panels, to_quantised_panels
from worker.model.base import Checkpoint, Progress, QuantisedTensor
from worker.model.config import LoadOptions, ModelConfig
from worker.model.layers import Mlp, OneDnnMlp, PlainMlp, RmsNorm, gated_silu, rms_norm
from worker.model.linear import (
    PACKABLE_IN_BFLOAT16,
    Linear,
    OneDnnLinear,
    PackedLinear,
    PanelLinear,
    TiledLinear,
    dense_linear,
    is_packable,
)
from worker.model.quantisation import NUM_BITS, decode, kind_of
from worker.model.rope import Rotation, make_rope, rope_table
from worker.model.weight_file import Weights


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The norms and products of one layer."""

    input_norm: RmsNorm
    qkv: Linear
    qk_norm: Tensor | None
    """(heads + kv_heads, head_dim)"""
    output: Linear
    post_norm: RmsNorm
    mlp: Mlp


class LlamaDecoder:
    """A `worker.model.base.Decoder`."""

    __slots__ = ("_layers", "_lm_head", "_norm", "_rope", "config", "embedding")

    is_recordable = True

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions, weights: Weights, progress: Progress
    ) -> None:
        """Load the weights. Raise ModelError."""
        self.config = config
        loader = _WeightLoader(checkpoint, config, options, weights)
        self.embedding = loader.tensor("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._layers: list[LayerWeights] = []
        for index in range(config.attention.num_layers):
            progress(index, config.attention.num_layers)
            self._layers.append(loader.layer(f"model.layers.{index}"))
        self._norm = loader.norm("model.norm.weight")
        self._lm_head = loader.lm_head(self.embedding)
        loader.check_packed()
        table = rope_table(config.rope, config.attention.head_dim, config.max_model_len, checkpoint.rope_factors())
        self._rope = make_rope(table.to(self.embedding), deterministic=options.deterministic)
        progress(config.attention.num_layers, config.attention.num_layers)

    def forward(self, batch: ForwardBatch, attention: Attention) -> Tensor:
        hidden = functional.embedding(batch.token_ids, self.embedding)
        rotation = self._rope(batch.positions)
        for index, layer in enumerate(self._layers):
            query, key, value = self._qkv(layer, layer.input_norm(hidden), rotation)
            attended = attention.attend(index, query, key, value, batch)
            hidden = layer.output.add_to(hidden, attended)
            hidden = layer.mlp(layer.post_norm(hidden), hidden)
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._lm_head(hidden)

    def _qkv(self, layer: LayerWeights, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.config.attention
        fused = layer.qkv(states)  # (num_tokens, (heads + 2 kv_heads) * head_dim)
        num_rotated = shape.num_heads + shape.num_kv_heads
        split = num_rotated * shape.head_dim
        value = fused[:, split:].view(len(fused), -1, shape.head_dim)
        if layer.qk_norm is not None:
            heads = fused[:, :split].view(len(fused), num_rotated, shape.head_dim)  # of q, then of k
            normed = functional.rms_norm(heads, (shape.head_dim,), None, self.config.rms_norm_eps) * layer.qk_norm
            fused = normed.flatten(1)
        heads = rotation(fused, num_rotated)
        return heads[:, : shape.num_heads], heads[:, shape.num_heads :], value


class _WeightLoader:
    """Loads weights in the form and dtype, and to the device, of the options. No tensor is in memory twice."""

    __slots__ = ("_checkpoint", "_config", "_device", "_dtype", "_num_packed", "_options", "_products", "_weights")

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions, weights: Weights) -> None:
        self._weights = weights
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = options.torch_dtype
        self._device = torch.device(options.device)
        self._options = options
        self._num_packed = 0
        self._products = matmul_kernels_for(self._dtype, self._device)

    def check_packed(self) -> None:
        """Raise UnsupportedModel when packed weights are asked for and no matrix is packed."""
        if self._options.weights != "packed" or self._num_packed > 0:
            return
        if self._dtype == torch.float32 and self._products is None:
            raise UnsupportedModel("weights=packed in float32 needs the compiled kernels: install g++")
        kinds = ", ".join(NUM_BITS if self._products else PACKABLE_IN_BFLOAT16)
        raise UnsupportedModel(f"weights=packed: no matrix of {self._checkpoint.path} is {kinds}")

    def layer(self, prefix: str) -> LayerWeights:
        shape, hidden = self._config.attention, self._config.hidden_size
        attention = f"{prefix}.self_attn"
        sizes = (shape.query_size, shape.kv_size, shape.kv_size)
        return LayerWeights(
            input_norm=self.norm(f"{prefix}.input_layernorm.weight"),
            qkv=self._linear([f"{attention}.{name}_proj" for name in "qkv"], sizes, hidden),
            qk_norm=self._qk_norm(attention),
            output=self._linear([f"{attention}.o_proj"], (hidden,), shape.query_size),
            post_norm=self.norm(f"{prefix}.post_attention_layernorm.weight"),
            mlp=self._mlp(f"{prefix}.mlp"),
        )

    def _mlp(self, prefix: str) -> Mlp:
        hidden, inner = self._config.hidden_size, self._config.intermediate_size
        names = [f"{prefix}.{name}_proj" for name in ("gate", "up")]
        options = self._options
        # Fused products round once, not after each part. In float32 the plain form rounds as the reference does.
        is_plain = options.weights != "packed" and not options.deterministic
        if self._dtype == torch.bfloat16 and self._device.type == "cpu" and is_plain:
            gate, up = (self._linear([name], (inner,), hidden) for name in names)
            down = self._linear([f"{prefix}.down_proj"], (hidden,), inner)
            if isinstance(gate, OneDnnLinear) and isinstance(up, OneDnnLinear) and isinstance(down, OneDnnLinear):
                return OneDnnMlp(gate, up, down)
        gate_up = self._linear(names, (inner, inner), hidden)
        down = self._linear([f"{prefix}.down_proj"], (hidden,), inner)
        return PlainMlp(gate_up, down, gated_silu(self._device, deterministic=options.deterministic))

    def norm(self, name: str) -> RmsNorm:
        weight = self.tensor(name, (self._config.hidden_size,))
        return rms_norm(weight, self._config.rms_norm_eps, deterministic=self._options.deterministic)

    def _qk_norm(self, attention: str) -> Tensor | None:
        if not self._config.qk_norm:
            return None
        shape = self._config.attention
        query, key = (self.tensor(f"{attention}.{name}_norm.weight", (shape.head_dim,)) for name in "qk")
        return torch.cat((query.expand(shape.num_heads, -1), key.expand(shape.num_kv_heads, -1)))

    def lm_head(self, embedding: Tensor) -> Linear:
        if not self._checkpoint.has("lm_head.weight"):
            return self._in_form(["model.embed_tokens"], len(embedding), lambda: embedding, None)
        return self._linear(["lm_head"], (self._config.vocab_size,), self._config.hidden_size)

    def _linear(self, names: Sequence[str], rows: Sequence[int], columns: int) -> Linear:
        """Load one product for several matrices over the same input, stacked."""

        def stacked() -> Tensor:
            weight = torch.empty(sum(rows), columns, dtype=self._dtype, device=self._device)
            for name, part in zip(names, torch.split(weight, list(rows)), strict=True):
                part.copy_(self._stored(f"{name}.weight", part.shape))
            return weight

        return self._in_form(names, sum(rows), stacked, self._bias(names, rows))

    def _in_form(
        self, names: Sequence[str], num_outputs: int, weight: Callable[[], Tensor], bias: Tensor | None
    ) -> Linear:
        """Return the product in the form that the options ask for."""
        if self._products is not None:
            return PanelLinear(
                self._products, *self._panels(self._products.panel_width, names, num_outputs, weight), bias
            )
        dense = dense_linear(weight(), bias)
        if self._options.deterministic:
            return TiledLinear(dense)
        if self._options.weights != "packed" or self._dtype != torch.bfloat16:
            return dense
        stored = self._quantised(names)
        if not is_packable(stored):
            return dense
        self._num_packed += 1
        return PackedLinear([part for part in stored if part is not None], dense, bias)

    def _panels(
        self, width: int, names: Sequence[str], num_outputs: int, weight: Callable[[], Tensor]
    ) -> tuple[Tensor, tuple[int, int], int]:
        """Return a weight in panels, its shape, and the bits of an element."""
        name = " ".join(names)
        parts = [] if self._options.weights == "dense" else self._quantised(names)
        if (num_bits := NUM_BITS.get(kind_of(parts))) is None:
            data = self._weights(f"panels of {name}", lambda: to_panels(weight(), width))
            return data, (num_outputs, data.shape[1]), 32
        self._num_packed += 1
        stored = [part for part in parts if part is not None]
        data = self._weights(f"packed panels of {name}", lambda: to_quantised_panels(decode(stored), width))
        return data, (num_outputs, stored[0].shape[1]), num_bits

    def _quantised(self, names: Sequence[str]) -> list[QuantisedTensor | None]:
        return [self._checkpoint.quantised(f"{name}.weight") for name in names]

    def _bias(self, names: Sequence[str], rows: Sequence[int]) -> Tensor | None:
        if not any(self._checkpoint.has(f"{name}.bias") for name in names):
            return None
        return torch.cat([self.tensor(f"{name}.bias", (size,)) for name, size in zip(names, rows, strict=True)])

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._weights(name, lambda: self._stored(name, shape).to(self._device, self._dtype, copy=True))

    def _stored(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = self._checkpoint.tensor(name)
        if tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}, the config has {tuple(shape)}")
        return tensor
