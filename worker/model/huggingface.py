"""Hugging Face checkpoints: a folder with config.json and safetensors files, which are memory-mapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, get_args

from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.attention.base import AttentionShape
from worker.common.command_line import reason
from worker.files.errors import CheckpointError, ModelError, UnsupportedModel
from worker.files.model_files import folder_files
from worker.files.tokenizer_files import read_json
from worker.model.base import Checkpoint, ModelFamily
from worker.model.config import ModelConfig, RopeConfig, RopeKind

_BASE: Final = "model."
_INDEX: Final = "model.safetensors.index.json"
_ADAPTER: Final = "adapter_config.json"
_NOT_QUANTISED: Final = "quantised safetensors are not supported; use GGUF instead"
_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
_ROPE_NUMBERS: Final = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
_ORIGINAL: Final = "original_max_position_embeddings"
_NEEDED_BY_ROPE: Final = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


class SafetensorsCheckpoint(Checkpoint):
    """A folder with config.json and safetensors files."""

    _prefix = ""
    """The prefix of names that the files omit, as in models saved without their head."""

    def __init__(self, path: Path, name: str | None = None, revision: str | None = None) -> None:
        self.path = path
        self.name = name or path.resolve().name
        self._raw = read_json(path / "config.json")
        kind = self._raw.get("model_type")
        if "auto_map" in self._raw and not kind:
            raise UnsupportedModel(f"{path} needs code of its own (auto_map); remote code is never run")
        if not isinstance(kind, str) or not kind:
            given = "missing" if kind is None else f"{kind!r:.80}"
            raise CheckpointError(f"{path / 'config.json'}: model_type is {given}: give a name such as 'llama'")
        self.model_type = kind
        if (path / _ADAPTER).is_file():
            raise UnsupportedModel(f"{path} has {_ADAPTER}: LoRA is not applied; merge it into the weights first")
        files = _files_by_tensor(path)
        if f"{_BASE}embed_tokens.weight" not in files and "embed_tokens.weight" in files:
            files = {_BASE + name: file for name, file in files.items()}
            self._prefix = _BASE
        self._files = files
        self._open: Callable[[Path], Any] = cache(partial(safe_open, framework="pt"))
        self.files = folder_files(path)
        self.revision = revision or self.files.digest

    def config(self, family: ModelFamily) -> ModelConfig:
        return config_from_hf(self._raw, family)

    def has(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> Tensor:
        if (file := self._files.get(name)) is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        try:
            tensor: Tensor = self._open(file).get_tensor(name.removeprefix(self._prefix))
        except SafetensorError as error:
            raise CheckpointError(f"{file}: {error}") from error
        if tensor.itemsize < 2 or not tensor.is_floating_point():  # its scales are tensors that nothing reads
            raise UnsupportedModel(f"{name} is stored as {tensor.dtype}: {_NOT_QUANTISED}")
        return tensor


def _files_by_tensor(path: Path) -> dict[str, Path]:
    if (index := path / _INDEX).is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index} has no weight_map")
        files = {path / str(file) for file in weight_map.values()}
        if any(file.parent != path for file in files):
            raise CheckpointError(f"{index} names a file outside of its folder")
        if missing := sorted(file.name for file in files if not file.is_file()):
            raise CheckpointError(f"{path} lacks {missing[0]} ({len(missing)} of {len(files)} files are missing)")
        return {str(name): path / str(file) for name, file in weight_map.items()}
    whole = path / "model.safetensors"  # the others may be of another form, or of another step of a training
    files = {whole} if whole.is_file() else set(path.glob("*.safetensors"))
    if not files:
        hint = " (there are pickled weights, which are never loaded)" if list(path.glob("*.bin")) else ""
        raise CheckpointError(f"{path} has no *.safetensors files{hint}")
    return {name: file for file in sorted(files) for name in _tensor_names(file)}


def _tensor_names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {reason(error)}") from error


def config_from_hf(raw: Mapping[str, Any], family: ModelFamily) -> ModelConfig:
    """Read a parsed config.json. Raise ModelError."""
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {activation!r} of a {raw['model_type']} model; only silu is known")
    if raw.get("is_causal") is False or raw.get("use_bidirectional_attention"):
        raise UnsupportedModel("config.json has tokens attend to later ones (is_causal): only causal models run")
    if "quantization_config" in raw:
        raise UnsupportedModel(f"quantization_config: {_NOT_QUANTISED}")
    try:
        num_heads = int(raw["num_attention_heads"])
        max_len = int(raw["max_position_embeddings"])
        num_layers = int(raw["num_hidden_layers"])
        head_dim = int(raw.get("head_dim") or int(raw["hidden_size"]) // num_heads)
        return ModelConfig(
            model_type=str(raw["model_type"]),
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            attention=AttentionShape(
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
                head_dim=head_dim,
                scale=max(1, head_dim) ** -0.5,
                windows=_sliding_windows(raw, num_layers, family),
            ),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_rope(raw, max_len),
            max_model_len=max_len,
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=family.qk_norm,
        )
    except KeyError as error:
        raise CheckpointError(f"config.json has no field {error.args[0]!r}") from error
    except ModelError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"config.json has a field of the wrong type or size: {error}") from error


def _rope(raw: Mapping[str, Any], max_len: int) -> RopeConfig:
    """Read both spellings: `rope_parameters` of transformers 5, and `rope_theta` with `rope_scaling`."""
    old, new = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    if new and any(new.get(name) != value for name, value in old.items()):
        raise UnsupportedModel("config.json has a rope_scaling and other rope_parameters: keep one of them")
    fields = {**old, **new}
    if nested := [name for name, value in fields.items() if isinstance(value, dict)]:
        raise UnsupportedModel(f"rope_parameters has {nested[0]!r}: one rotation for all layers is known")
    theta = float(fields.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind: Any = fields.get("rope_type") or fields.get("type") or "default"
    if fields.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1.0):
        raise UnsupportedModel("partial_rotary_factor other than 1 is not known for this family")
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        raise UnsupportedModel("rope_parameters.mscale is not known for this family")
    if kind not in get_args(RopeKind):
        raise UnsupportedModel(f"rope type {kind!r}: only {', '.join(get_args(RopeKind))} are known")
    given = {name: float(fields[name]) for name in _ROPE_NUMBERS if fields.get(name) is not None}
    if missing := [name for name in _NEEDED_BY_ROPE.get(kind, ()) if name not in given]:
        raise CheckpointError(f"config.json has no rope parameter {missing[0]!r}, which {kind} needs")
    original = int(raw.get(_ORIGINAL) or fields.get(_ORIGINAL) or max_len)
    if kind == "yarn":
        given = {"factor": max_len / original, "truncate": bool(fields.get("truncate", True)), **given}
    return RopeConfig(theta, kind, {} if kind == "default" else {_ORIGINAL: original, **given})


def _sliding_windows(raw: Mapping[str, Any], num_layers: int, family: ModelFamily) -> tuple[int | None, ...]:
    window, layer_types = raw.get("sliding_window", family.window), raw.get("layer_types")
    is_off = family.optional_window and not raw.get("use_sliding_window", False)
    if not window or is_off or (layer_types is None and family.window is None):
        return ()
    window = int(window)
    if layer_types is not None:
        if strange := sorted(set(layer_types) - _LAYER_TYPES):
            raise UnsupportedModel(f"layer_types has {strange[0]!r}: only {', '.join(sorted(_LAYER_TYPES))} are known")
        if len(layer_types) != num_layers:
            raise CheckpointError(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    first = int(raw.get("max_window_layers", 28)) if family.optional_window else 0
    return tuple(window if layer >= first else None for layer in range(num_layers))
