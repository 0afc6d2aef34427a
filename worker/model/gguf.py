"""GGUF files: metadata as a ModelConfig, tensors by their Hugging Face names.

Files of architecture `llama` interleave the two halves of each head in the rows of q and k. The stored blocks are put
back in order before anything is dequantised.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from torch import Tensor

from worker.files.errors import CheckpointError, UnsupportedModel
from worker.files.model_files import digest_files
from worker.model.base import Checkpoint, ModelFamily, QuantisedTensor
from worker.model.config import ModelConfig
from worker.model.huggingface import config_from_hf

_UNQUANTISED: Final = frozenset({"F32", "F16", "BF16", "F64"})
_ARCHITECTURES: Final = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
_INTERLEAVED: Final = frozenset({"llama"})
"""Architectures whose rows of q and k llama.cpp interleaves."""
_REQUIRED_FIELDS: Final = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""By the field of config.json: the key of the metadata, after the architecture."""
_OPTIONAL_FIELDS: Final = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
}
_ROPE_FIELDS: Final = {
    "rope_theta": "freq_base",
    "rope_type": "scaling.type",
    "factor": "scaling.factor",
    "original_max_position_embeddings": "scaling.original_context_length",
    "beta_fast": "scaling.yarn_beta_fast",
    "beta_slow": "scaling.yarn_beta_slow",
}
_ROPE_FACTORS: Final = ("scaling.attn_factor", "scaling.yarn_attn_factor", "scaling.yarn_ext_factor", "scale_linear")
_QUANTISATION_SUFFIX: Final = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)


class GGUFCheckpoint(Checkpoint):
    """One GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = name_of_file(path)
        try:
            self._reader = _Reader(path)
        except (OSError, ValueError, IndexError, KeyError, struct.error) as error:
            raise CheckpointError(f"{path} is no readable GGUF file: {error}") from error
        self.metadata = Metadata(self._reader)
        kind = self.metadata["general.architecture"]
        if not isinstance(kind, str) or not kind:
            raise CheckpointError(f"{path}: general.architecture is {kind!r:.80}: it must be a name such as 'llama'")
        self.model_type = kind
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if self.metadata.get("split.count", 1) != 1:
            raise UnsupportedModel(f"{path} is one part of a split GGUF: merge it with gguf-split first")
        num_layers = int(self.metadata.get(f"{self.model_type}.block_count", 0))
        architecture = _ARCHITECTURES.get(self.model_type, gguf.MODEL_ARCH.LLAMA)
        self._names = gguf.get_tensor_name_map(architecture, num_layers)
        self.files = digest_files([path])
        self.revision = self.files.digest

    def config(self, family: ModelFamily) -> ModelConfig:
        """Translate the metadata to the fields of config.json, and read these."""
        if self._field("expert_count"):
            raise UnsupportedModel("mixture-of-experts models in GGUF are not supported; use the model's safetensors")
        raw = {name: self.metadata[f"{self.model_type}.{key}"] for name, key in _REQUIRED_FIELDS.items()}
        raw |= {name: self._field(key) for name, key in _OPTIONAL_FIELDS.items()}
        raw["model_type"] = self.model_type
        raw["vocab_size"] = len(self.metadata["tokenizer.ggml.tokens"])
        raw["tie_word_embeddings"] = "output.weight" not in self._tensors
        raw["rope_parameters"] = {name: self._field(f"rope.{key}") for name, key in _ROPE_FIELDS.items()}
        if factors := [key for key in _ROPE_FACTORS if self._field(f"rope.{key}") not in (None, 1.0)]:
            raise UnsupportedModel(f"rope.{factors[0]} is {self._field(f'rope.{factors[0]}')}: only 1 is known")
        if raw["rope_parameters"]["rope_type"] == "none":
            raw["rope_parameters"]["rope_type"] = "default"
        if raw["sliding_window"]:
            raw |= {"use_sliding_window": True, "layer_types": ["sliding_attention"] * int(raw["num_hidden_layers"])}
        config = config_from_hf(raw, family)
        if (num_rotated := self._field("rope.dimension_count")) not in (None, config.attention.head_dim):
            raise UnsupportedModel(f"rope.dimension_count is {num_rotated}, the head size {config.attention.head_dim}")
        return config

    def _field(self, key: str) -> Any:
        return self.metadata.get(f"{self.model_type}.{key}")

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

    def matrix_sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the kind and the number of elements of each matrix."""
        for stored in self._tensors.values():
            if len(stored.shape) == 2:
                yield stored.tensor_type.name, int(stored.n_elements)

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


class _Reader(gguf.GGUFReader):
    """Reads a vocabulary in a tenth of the time: without slicing a memmap, and arrays without a call for each item."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        order = self.byte_order if override_order is None else override_order
        return np.frombuffer(self.data.data, np.dtype(dtype).newbyteorder(order), int(count), int(offset))

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        parts: list[Any] = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        kind, count, offset = gguf.GGUFValueType(parts[0][0]), int(parts[1][0]), orig_offs + 12
        types = [gguf.GGUFValueType.ARRAY, *([kind] if count else [])]
        if (dtype := self.gguf_scalar_to_np.get(kind)) is not None:
            items = self._get(offset, dtype, count)
            return offset - orig_offs + items.nbytes, [*parts, *items.reshape(-1, 1)], list(range(2, 2 + count)), types
        if kind != gguf.GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        length = struct.Struct("<Q" if self.endianess == gguf.GGUFEndian.LITTLE else ">Q")
        data = self.data.data
        for _ in range(count):
            (size,) = length.unpack_from(data, offset)
            begin, offset = offset, offset + 8 + size
            parts += (data[begin : begin + 8], data[begin + 8 : offset])
        return offset - orig_offs, parts, list(range(3, len(parts), 2)), types


class Metadata:
    """The key-value part of a GGUF file. A value is decoded at each access."""

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
