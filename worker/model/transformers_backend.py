"""Other causal language models of `transformers`, over the same paged cache.

A registered attention function replaces the model's own. One row has the tokens of all sequences, end to end, and
attention runs in the paged kernel. The arguments of its first calls (sizes, scale, windows) give the shape of the
cache. Features that the kernel lacks (soft caps, sinks, masks, cross attention) are refused by name.

At load, the result is compared with that of the model's own eager attention. That shows any other difference, such as a
layer that mixes neighbouring tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor, nn

from worker.attention.base import Attention, AttentionShape, ForwardBatch, Span
from worker.attention.kv_cache import KVCache
from worker.attention.torch_paged import TorchPagedAttention
from worker.files.errors import CheckpointError, UnsupportedModel, encoder_error
from worker.files.tokenizer_files import read_json
from worker.model.base import Checkpoint
from worker.model.config import LoadOptions, ModelConfig, RopeConfig

_NUM_CHECKED: Final = 64  # tokens of a checked sequence: several blocks, and soon computed
_NUM_FAR: Final = 32
"""Tokens of a checked sequence that does not begin at 0."""
_CHECK_BLOCK: Final = 8  # _NUM_CHECKED tokens take several blocks
_LENGTH: Final = re.compile("position|window|chunk|floor|length")
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest error relative to the logits: rounding stays far below, a wrong computation far above."""
_REFUSED: Final = ("softcap", "s_aux", "position_bias", "sinks", "attention_mask")
_names = count()


class TransformersForCausalLM:
    """A `worker.model.base.Decoder` around a model of `transformers`."""

    __slots__ = ("_batch", "_head", "_kernel", "_layers", "_max_model_len", "_model", "config")

    is_recordable = False

    def __init__(self, checkpoint: Checkpoint, options: LoadOptions) -> None:
        """Load, probe and check the model. Raise ModelError."""
        self._kernel: Attention | None = None
        self._batch: ForwardBatch | None = None
        self._layers: dict[int, AttentionShape] = {}
        self._max_model_len = _max_model_len(checkpoint, options)
        name = f"headstart-{next(_names)}"
        _register(name, self._attend)
        self._model = _load(checkpoint, options, name)
        self._head: nn.Module | None = self._model.get_output_embeddings()
        if self._head is None:
            raise UnsupportedModel(f"{checkpoint.path}: the model has no output embeddings")
        num_checked = min(_NUM_CHECKED, self._max_model_len or _NUM_CHECKED)
        ids = [(7 + 13 * i) % min(1000, self._model.config.get_text_config().vocab_size) for i in range(num_checked)]
        try:
            self._hidden(torch.tensor(ids), torch.arange(len(ids)))
            self.config = self._config(checkpoint)
            self._check(ids, name, options)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
            raise UnsupportedModel(
                f"model type {checkpoint.model_type!r:.80} does not run on the paged cache: its code of transformers "
                f"raises {type(error).__name__}: {error}"
            ) from error

    def forward(self, batch: ForwardBatch, attention: Attention) -> Tensor:
        self._kernel, self._batch = attention, batch
        try:
            return self._hidden(batch.token_ids, batch.positions)
        finally:
            self._kernel = self._batch = None

    def logits(self, hidden: Tensor) -> Tensor:
        assert self._head is not None
        logits: Tensor = self._head(hidden)
        return logits

    def _hidden(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        device = self._model.device
        base = self._model.base_model
        hidden: Tensor = (self._model.model if base is self._model else base)(
            input_ids=token_ids[None].to(device), position_ids=positions[None].to(device), use_cache=False
        ).last_hidden_state
        return hidden[0]

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """(1, heads, num_tokens, head_dim) -> (1, num_tokens, heads, head_dim), as `transformers` expects."""
        if self._kernel is None or self._batch is None:
            kwargs["attention_mask"] = attention_mask
            self._layers[module.layer_idx] = _shape_of_layer(module, query, key, value, kwargs)
            out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2), None
        queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))  # (num_tokens, heads, ..)
        attended = self._kernel.attend(module.layer_idx, queries, keys, values, self._batch)
        return attended.view(1, query.shape[2], query.shape[1], -1), None

    def _config(self, checkpoint: Checkpoint) -> ModelConfig:
        text = self._model.config.get_text_config()
        layers = [self._layers[index] for index in sorted(self._layers)]
        if sorted(self._layers) != list(range(text.num_hidden_layers)):
            raise UnsupportedModel(f"{checkpoint.path}: not every layer is attention through transformers' interface")
        if len({replace(layer, windows=()) for layer in layers}) != 1:
            raise UnsupportedModel(f"{checkpoint.path}: its layers' attention differs in size or scale")
        windows = tuple(layer.window(0) for layer in layers)
        if not self._max_model_len:
            raise UnsupportedModel(f"{checkpoint.path}: config.json has no max_position_embeddings")
        return ModelConfig(
            model_type=str(text.model_type),
            vocab_size=int(text.vocab_size),
            hidden_size=int(text.hidden_size),
            intermediate_size=0,
            attention=replace(layers[0], num_layers=len(layers), windows=windows if any(windows) else ()),
            rms_norm_eps=0.0,
            rope=RopeConfig(),
            max_model_len=self._max_model_len,
            tie_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        )

    def _check(self, ids: Sequence[int], name: str, options: LoadOptions) -> None:
        """Compare sequences that share steps, in chunks, with separate runs in the model's own eager attention.

        They are at position 0, at the end of the context, and across each length that config.json names. That detects
        results that depend on the highest position of a step, on a token's row, or on a window.
        """
        sequences = [(0, list(ids)), (0, list(reversed(ids)))]
        starts = {length - _NUM_FAR // 2 for length in _lengths(self._model.config.get_text_config().to_dict())}
        last = self._max_model_len - _NUM_FAR
        starts.add(last)
        sequences += [(start, list(ids[:_NUM_FAR])) for start in sorted(starts) if 0 < start <= last]
        self._model.set_attn_implementation("eager")
        wants = [self._own_logits(start, token_ids) for start, token_ids in sequences]
        self._model.set_attn_implementation(name)
        for module in self._model.modules():
            if getattr(module, "attn_temperature_tuning", False):
                module.attn_temperature_tuning = False  # its factor is 1 within `_limits`, but counts rows of the step
        for (start, token_ids), got, want in zip(sequences, self._paged_logits(sequences, options), wants, strict=True):
            error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))
            if not error < _TOLERANCE[options.torch_dtype]:
                raise UnsupportedModel(
                    f"model type {self.config.model_type!r} does not run exactly on the paged cache: its logits differ "
                    f"from its own attention's by {error:.1%} of their size at tokens {start} to "
                    f"{start + len(token_ids) - 1}, with others to token {self._max_model_len - 1} in the step; "
                    f"a shorter --max-model-len may run"
                )

    def _own_logits(self, start: int, token_ids: Sequence[int]) -> Tensor:
        """Run tokens that begin at position `start` and see only each other."""
        device = self._model.device
        positions = torch.arange(start, start + len(token_ids), device=device)
        logits: Tensor = self._model(
            torch.tensor([list(token_ids)], device=device),
            position_ids=positions[None],
            past_key_values=_skipped(start) if start else None,
            use_cache=False,
        ).logits[0]
        return logits.float()

    def _paged_logits(self, sequences: Sequence[tuple[int, Sequence[int]]], options: LoadOptions) -> list[Tensor]:
        shape, device = self.config.attention, self._model.device
        num_blocks, stride = _NUM_CHECKED // _CHECK_BLOCK, len(sequences)
        cache = KVCache(shape, stride * num_blocks + 1, _CHECK_BLOCK, options.torch_dtype, device)
        kernel = TorchPagedAttention(shape, cache)
        tables = [[1 + row + stride * block for block in range(num_blocks)] for row in range(stride)]
        logits: list[list[Tensor]] = [[] for _ in sequences]
        for parts in _chunks([len(token_ids) for _, token_ids in sequences]):
            rows = [(row, i) for row, first, stop in parts for i in range(first, stop)]
            columns = (
                [sequences[row][1][i] for row, i in rows],
                [sequences[row][0] + i for row, i in rows],
                [tables[row][i // _CHECK_BLOCK] * _CHECK_BLOCK + i % _CHECK_BLOCK for row, i in rows],
            )
            token_ids, positions, slots = torch.tensor(columns, device=device)
            spans = [Span(first, stop - first, tables[row]) for row, first, stop in parts]
            hidden = self.forward(ForwardBatch(token_ids, positions, slots, kernel.plan(spans)), kernel)
            by_part = torch.split(self.logits(hidden).float(), [stop - first for _, first, stop in parts])
            for (row, _, _), part in zip(parts, by_part, strict=True):
                logits[row].append(part)
        return [torch.cat(parts) for parts in logits]


def _chunks(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield three steps: row, first token and end of each part. Single tokens come first, as the kernel requires."""
    cuts = [length // 2 - row % (length // 4) for row, length in enumerate(lengths)]
    yield [(row, 0, cut) for row, cut in enumerate(cuts)]
    singles = sorted(((row, cut, cut + 1) for row, cut in enumerate(cuts) if row), key=lambda part: part[1])
    yield [*singles, (0, cuts[0], lengths[0] - 1)]
    rest = [(row, cut + 1, lengths[row]) for row, cut in enumerate(cuts) if row]
    yield [(0, lengths[0] - 1, lengths[0]), *rest]


def _lengths(fields: Mapping[str, Any]) -> Iterator[int]:
    """Yield the lengths in a configuration, at which the model may compute differently."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _lengths(value)
        elif isinstance(value, int | float) and _LENGTH.search(str(name)) and value == int(value):
            yield int(value)


def _skipped(num_tokens: int) -> Any:
    """Return an empty cache that reports `num_tokens`, so that the next tokens begin at that position."""
    from transformers import DynamicCache

    class Skipped(DynamicCache):
        def get_seq_length(self, layer_idx: int = 0) -> int:
            return num_tokens

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return num_tokens

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            return query_length, num_tokens

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return key_states, value_states

    return Skipped()


def _max_model_len(checkpoint: Checkpoint, options: LoadOptions) -> int:
    """Return the context length, or 0. Raise UnsupportedModel if the model changes its arithmetic within it."""
    from transformers import AutoConfig

    try:
        text: Any = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False).get_text_config()
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise _unloadable(checkpoint, error) from error
    own = int(getattr(text, "max_position_embeddings", None) or 0)
    length = min(own, options.max_model_len or own)
    for field, limit, why in _limits(text):
        if length > limit:
            raise UnsupportedModel(
                f"model type {checkpoint.model_type!r} {why} beyond {limit} tokens ({field} in its config.json), so "
                f"one step cannot hold both: pass --max-model-len {limit}"
            )
    return length


def _limits(text: Any) -> Iterator[tuple[str, int, str]]:
    """Yield each field that bounds an arithmetic, the last length within it, and what changes beyond."""
    rope = getattr(text, "rope_parameters", None) or {}
    for fields in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if fields.get("rope_type") == "longrope":
            field = "original_max_position_embeddings"
            if original := fields.get(field) or getattr(text, field, None):
                yield field, int(original), "takes other rotary factors"
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        yield "attention_chunk_size", int(text.attention_chunk_size), "attends in chunks"
    if getattr(text, "attn_temperature_tuning", False) and not all(getattr(text, "no_rope_layers", None) or ()):
        yield "floor_scale", int(text.floor_scale) - 1, "scales queries"


def _shape_of_layer(module: Any, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> AttentionShape:
    """Read the shape of a layer from the arguments of its attention. Raise UnsupportedModel."""
    for field in _REFUSED:
        if kwargs.get(field) is not None:
            raise UnsupportedModel(f"{type(module).__name__} needs {field}, which the paged attention does not have")
    if not getattr(module, "is_causal", True) or key.shape != value.shape or key.shape[2] != query.shape[2]:
        raise UnsupportedModel(f"{type(module).__name__} is no plain causal self-attention")
    scale = kwargs.get("scaling")
    return AttentionShape(
        num_layers=1,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        scale=query.shape[3] ** -0.5 if scale is None else float(scale),
        windows=(kwargs.get("sliding_window"),),
    )


def _register(name: str, attend: Any) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)


def _unloadable(checkpoint: Checkpoint, error: Exception) -> UnsupportedModel:
    config = checkpoint.path / "config.json"
    why = f"it has no {error} of {config}" if isinstance(error, KeyError) else str(error)
    return UnsupportedModel(f"model type {checkpoint.model_type!r:.80}: transformers cannot load it: {why}")


def _load(checkpoint: Checkpoint, options: LoadOptions, attention: str) -> Any:
    """Load the model without running code of the checkpoint and without unpickling."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    is_masked = checkpoint.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if is_masked and not read_json(checkpoint.path / "config.json").get("is_decoder"):
        raise encoder_error(checkpoint.model_type)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            dtype=options.torch_dtype,
            attn_implementation=attention,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise _unloadable(checkpoint, error) from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):  # transformers invents them
        raise CheckpointError(f"{checkpoint.path} has no tensor {missing[0]!r} ({len(missing)} are missing)")
    if scales := sorted(name for name in info["unexpected_keys"] if "_scale" in name.rpartition(".")[2]):
        raise UnsupportedModel(f"transformers does not apply {scales[0]!r}: these quantised weights are not supported")
    return model.to(options.device).eval()
