"""The shape of a decoder of the Llama family, independent of the file format it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from worker.attention.base import AttentionShape
from worker.model.errors import CheckpointError, UnsupportedModel

LEAN_MODEL_TYPES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""`model_type`s whose decoder is `worker.model.llama`; all others go through transformers."""

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields after `kind` count for the kinds that their comments name."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn
    original_max_len: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: derived from factor
    truncate: bool = True  # yarn

    def __post_init__(self) -> None:
        if self.kind in ("llama3", "yarn") and self.original_max_len < 1:
            raise CheckpointError(f"rope_parameters.original_max_position_embeddings is missing, {self.kind} needs it")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything about a decoder but its weights."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_model_len: int
    tie_embeddings: bool
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer: how many tokens a query sees, itself included, or None for all. Empty: all, everywhere."""
    attention_scale: float | None = None
    """Factor on query-key products; None: head_dim ** -0.5."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"num_heads ({self.num_heads}) is no multiple of num_kv_heads ({self.num_kv_heads})")

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
            windows=self.sliding_windows,
        )


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """A ModelConfig from the parsed config.json of a lean model type. Raises ModelError."""
    model_type = raw.get("model_type")
    if model_type not in LEAN_MODEL_TYPES:
        raise UnsupportedModel(f"model_type {model_type!r} is none of {sorted(LEAN_MODEL_TYPES)}")
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {activation!r} of a {model_type} model; only silu is known")
    if "quantization_config" in raw:
        raise UnsupportedModel("quantization_config: quantised safetensors are not supported; use GGUF instead")
    try:
        num_heads = int(raw["num_attention_heads"])
        max_len = int(raw["max_position_embeddings"])
        num_layers = int(raw["num_hidden_layers"])
        return ModelConfig(
            model_type=model_type,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // num_heads),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_rope(raw, max_len),
            max_model_len=max_len,
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=model_type == "qwen3",
            sliding_windows=_sliding_windows(raw, num_layers),
        )
    except KeyError as error:
        raise CheckpointError(f"config.json has no field {error.args[0]!r}") from error
    except TypeError as error:
        raise CheckpointError(f"config.json: {error}") from error


def _rope(raw: Mapping[str, Any], max_len: int) -> RopeConfig:
    """Both spellings: `rope_parameters` of transformers 5, `rope_theta` with `rope_scaling` of before."""
    fields = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(fields.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("rope_parameters.partial_rotary_factor other than 1 is not known for this family")
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        raise UnsupportedModel("rope_parameters.mscale is not known for this family")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=float(fields["factor"]))
    original = int(fields.get("original_max_position_embeddings") or max_len)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=float(fields["factor"]),
            original_max_len=original,
            low_freq_factor=float(fields["low_freq_factor"]),
            high_freq_factor=float(fields["high_freq_factor"]),
        )
    if kind == "yarn":
        attention_factor = fields.get("attention_factor")
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=float(fields.get("factor") or max_len / original),
            original_max_len=original,
            beta_fast=float(fields.get("beta_fast") or 32),
            beta_slow=float(fields.get("beta_slow") or 1),
            attention_factor=None if attention_factor is None else float(attention_factor),
            truncate=bool(fields.get("truncate", True)),
        )
    raise UnsupportedModel(f"rope type {kind!r}: only default, linear, llama3 and yarn are known")


def _sliding_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    is_qwen = raw["model_type"] in ("qwen2", "qwen3")
    if window is None or (is_qwen and not raw.get("use_sliding_window", False)):
        return ()
    window = int(window)
    if (layer_types := raw.get("layer_types")) is not None:
        if len(layer_types) != num_layers:
            raise CheckpointError(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    first = int(raw.get("max_window_layers", 28)) if is_qwen else 0
    return tuple(window if layer >= first else None for layer in range(num_layers))
