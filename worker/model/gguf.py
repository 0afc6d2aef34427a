"""GGUF files: metadata as a ModelConfig, tensors by their Hugging Face names.

Files of architecture `llama` interleave the two halves of each head in the rows of q and k, as another convention of
rotary embedding needs them. The stored blocks are put back in order before anything is dequantised.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from torch import Tensor

from worker.model.base import ModelFamily, QuantisedTensor
from worker.model.config import CheckpointError, ModelConfig, RopeConfig, RopeKind, UnsupportedModel
from worker.model.huggingface import digest_files

_UNQUANTISED: Final = frozenset({"F32", "F16", "BF16", "F64"})
_ARCHITECTURES: Final = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
_INTERLEAVED: Final = frozenset({"llama"})
"""Architectures whose rows of q and k llama.cpp interleaves."""
_QUANTISATION_SUFFIX: Final = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)


class GGUFCheckpoint:
    """A `worker.model.base.Checkpoint` over one GGUF file."""

    __slots__ = ("_names", "_reader", "_tensors", "metadata", "name", "path", "revision")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = name_of_file(path)
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path} is no readable GGUF file: {error}") from error
        self.metadata = Metadata(self._reader)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if self.metadata.get("split.count", 1) != 1:
            raise UnsupportedModel(f"{path} is one part of a split GGUF: merge it with gguf-split first")
        num_layers = int(self.metadata.get(f"{self.model_type}.block_count", 0))
        architecture = _ARCHITECTURES.get(self.model_type, gguf.MODEL_ARCH.LLAMA)
        self._names = gguf.get_tensor_name_map(architecture, num_layers)
        self.revision = digest_files([path])

    @property
    def model_type(self) -> str:
        return str(self.metadata["general.architecture"])

    def config(self, family: ModelFamily) -> ModelConfig:
        return _config(self.model_type, self.metadata, family, has_lm_head="output.weight" in self._tensors)

    def has(self, name: str) -> bool:
        return self._gguf_name(name) in self._tensors

    def tensor(self, name: str) -> Tensor:
        stored = self._stored(name)
        try:
            values = gguf.dequantize(self._rows(name, stored), stored.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModel(f"{name} is stored as {stored.tensor_type.name}, which is not supported") from error
        return torch.from_numpy(np.array(values, dtype=np.float32, order="C"))

    def quantised(self, name: str) -> QuantisedTensor | None:
        stored = self._stored(name)
        if stored.tensor_type.name in _UNQUANTISED:
            return None
        columns, rows = (int(size) for size in stored.shape)
        return QuantisedTensor(stored.tensor_type.name, self._rows(name, stored), (rows, columns))

    def rope_factors(self) -> Tensor | None:
        if (stored := self._tensors.get("rope_freqs.weight")) is None:
            return None
        return torch.from_numpy(np.array(stored.data, dtype=np.float32))

    def _gguf_name(self, name: str) -> str:
        """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`"""
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        return name if found is None else str(found)

    def _stored(self, name: str) -> Any:
        if (stored := self._tensors.get(self._gguf_name(name))) is None:
            raise CheckpointError(f"{self.path} has no tensor {self._gguf_name(name)!r}")
        return stored

    def _rows(self, name: str, stored: Any) -> np.ndarray:
        """Return the stored rows in Hugging Face's order."""
        data: np.ndarray = stored.data
        if self.model_type not in _INTERLEAVED or not name.startswith("model.layers."):
            return data
        num_heads = int(self.metadata[f"{self.model_type}.attention.head_count"])
        num_kv_heads = int(self.metadata.get(f"{self.model_type}.attention.head_count_kv", num_heads))
        for projection, heads in (("q_proj", num_heads), ("k_proj", num_kv_heads)):
            if projection in name:
                # (heads, half, 2, ...) -> (heads, 2, half, ...)
                split = data.reshape(heads, data.shape[0] // heads // 2, 2, *data.shape[1:])
                return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(data.shape)
        return data


class Metadata:
    """The key-value part of a GGUF file; values are decoded when asked for."""

    __slots__ = ("_fields",)

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise CheckpointError(f"the GGUF file has no metadata field {key!r}")
        return self._fields[key].contents()

    def get(self, key: str, default: Any = None) -> Any:
        return self._fields[key].contents() if key in self._fields else default


def name_of_file(path: Path) -> str:
    """`SmolLM2-135M-Instruct.Q4_1.gguf` -> `SmolLM2-135M-Instruct`"""
    return _QUANTISATION_SUFFIX.sub("", path.stem)


def _config(architecture: str, metadata: Metadata, family: ModelFamily, *, has_lm_head: bool) -> ModelConfig:
    if metadata.get(f"{architecture}.expert_count", 0):
        raise UnsupportedModel("mixture-of-experts models in GGUF are not supported; use the model's safetensors")

    def field(key: str, default: Any = None) -> Any:
        full = f"{architecture}.{key}"
        return metadata[full] if default is None else metadata.get(full, default)

    num_heads, hidden_size = int(field("attention.head_count")), int(field("embedding_length"))
    num_layers, max_len = int(field("block_count")), int(field("context_length"))
    head_dim = int(field("attention.key_length", hidden_size // num_heads))
    if int(field("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModel(f"{architecture}.rope.dimension_count differs from the head size {head_dim}")
    window = int(field("attention.sliding_window", 0))
    return ModelConfig(
        model_type=architecture,
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=hidden_size,
        intermediate_size=int(field("feed_forward_length")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(field("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        rms_norm_eps=float(np.float32(field("attention.layer_norm_rms_epsilon"))),
        rope=_rope(architecture, metadata, max_len),
        max_model_len=max_len,
        tie_embeddings=not has_lm_head,
        qk_norm=family.qk_norm,
        sliding_windows=(window,) * num_layers if window else (),
    )


def _rope(architecture: str, metadata: Metadata, max_len: int) -> RopeConfig:
    theta = float(metadata.get(f"{architecture}.rope.freq_base", 10_000.0))
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    factor = float(metadata.get(f"{architecture}.rope.scaling.factor", 1.0))
    kinds: dict[str, RopeKind] = {"none": "default", "linear": "linear", "yarn": "yarn"}
    if kind not in kinds:
        raise UnsupportedModel(f"{architecture}.rope.scaling.type {kind!r}: only none, linear and yarn are known")
    original = int(metadata.get(f"{architecture}.rope.scaling.original_context_length", max_len))
    return RopeConfig(theta=theta, kind=kinds[kind], factor=factor, original_max_len=original)
