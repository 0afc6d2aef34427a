"""Models that only `transformers` has, over the paged cache, and models that must be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.paged import PagedModel
from worker.contracts.step import SamplingRow, SequenceStep, Step
from worker.files.errors import CheckpointError, ModelError, UnsupportedModel
from worker.model import transformers_backend
from worker.model.load import LoadOptions, load_model
from worker.runner.model_runner import ModelRunner
from worker.wire import SamplingParams

_SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
_GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {**_GPT2, "bos_token_id": 0, "eos_token_id": 0}),
    "phi3": ("Phi3", {**_SIZES, "sliding_window": 11}),
    "gemma": ("Gemma", {**_SIZES, "head_dim": 8}),
    "granite": ("Granite", {**_SIZES, "attention_multiplier": 0.2, "logits_scaling": 1.0}),
    "qwen3_moe": ("Qwen3Moe", {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "olmo2": ("Olmo2", _SIZES),
    "afmoe": ("Afmoe", {**_SIZES, "head_dim": 8, "num_dense_layers": 2, "sliding_window": 11}),
}


def write(name: str, fields: dict[str, Any], folder: Path) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_the_model_alone(name: str, tmp_path: Path) -> None:
    reference = write(*MODELS[name], tmp_path)
    model = load_model(str(tmp_path), LoadOptions())
    ids = torch.randint(0, 99, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        want = reference(torch.tensor([ids])).logits[0]
    assert float(want.std()) > 0.05
    for sizes in ([50], [1], [20, 7]):
        assert float((PagedModel(model).chunked(ids, sizes) - want).abs().max()) < 1e-3


def test_it_runs_behind_the_runner(tmp_path: Path) -> None:
    reference = write(*MODELS["gpt2"], tmp_path)
    runner = ModelRunner(load_model(str(tmp_path), LoadOptions()), num_blocks=8, block_size=16, eos_token_ids=())
    prompt = [5, 6, 7, 8]
    draw = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0, 4, prompt, ())
    (result,) = runner.run(Step([SequenceStep(prompt, 0, [3], [48, 49, 50, 51], (draw,))]))  # type: ignore[list-item]
    with torch.inference_mode():
        assert result.sampled[0].token_id == int(reference(torch.tensor([prompt])).logits[0, -1].argmax())


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("Gemma2", {**_SIZES, "head_dim": 8}, "softcap"),
        ("Granite", {**_SIZES, "logits_scaling": 8.0}, "differ"),
        ("Bloom", {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "not every layer"),
        ("Mamba", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "not every layer"),
        ("Doge", _SIZES, "attention_mask"),
        ("Mpt", {"vocab_size": 99, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}, "AttributeError"),
    ],
    ids=["softcap", "scaled_logits", "alibi", "no_attention", "own_mask", "own_error"],
)
def test_what_cannot_be_exact_is_refused(name: str, fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    write(name, fields, tmp_path)
    with pytest.raises(UnsupportedModel, match=text):
        load_model(str(tmp_path), LoadOptions())


@pytest.mark.parametrize(("lost", "error"), [(True, CheckpointError), (False, UnsupportedModel)])
def test_weights_that_transformers_would_invent(lost: bool, error: type[ModelError], tmp_path: Path) -> None:
    """It fills what is missing with random numbers, and ignores the scales of an unknown quantisation."""
    write(*MODELS["olmo2"], tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    scale = {f"{name}_scale": torch.ones(1)}
    save_file({key: tensor for key, tensor in tensors.items() if key != name} if lost else tensors | scale, file)
    with pytest.raises(error, match=r"up_proj\.weight"):
        load_model(str(tmp_path), LoadOptions())


@pytest.mark.parametrize("option", [{"deterministic": True}, {"weights": "packed", "dtype": "bfloat16"}], ids=str)
def test_options_of_the_lean_decoder_alone(option: dict[str, Any], tmp_path: Path) -> None:
    write(*MODELS["gpt2"], tmp_path)
    with pytest.raises(UnsupportedModel, match="gpt2"):
        load_model(str(tmp_path), LoadOptions(**option))


@pytest.mark.parametrize("name", ["Bert", "DistilBert", "ModernBert", "XLMRoberta"])
def test_encoders_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    import transformers

    sizes = {key: _SIZES[key] for key in ("vocab_size", "pad_token_id")}
    names = ("dim", "hidden_dim", "n_layers", "n_heads") if name == "DistilBert" else tuple(_SIZES)[1:5]
    config = getattr(transformers, f"{name}Config")(**sizes, **dict(zip(names, (32, 48, 2, 4), strict=True)))
    getattr(transformers, f"{name}Model")(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        load_model(str(tmp_path), LoadOptions())
    assert str(caught.value).startswith(f"model type {config.model_type!r} is an encoder")
    assert "\n" not in str(caught.value)


_LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 4.0, 9.0, 16.0],
        "original_max_position_embeddings": 64,
    },
    "original_max_position_embeddings": 64,
}
_LLAMA4 = {
    **_SIZES,
    "head_dim": 8,
    "intermediate_size_mlp": 48,
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 64,
    "moe_layers": [],
}
SWITCHING: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "longrope": ("Phi3", {**_SIZES, **_LONGROPE}, 64, "original_max_position_embeddings"),
    "chunked": ("Llama4Text", {**_LLAMA4, "attn_temperature_tuning": False}, 64, "attention_chunk_size"),
    "temperature": ("Llama4Text", {**_LLAMA4, "attention_chunk_size": 128, "floor_scale": 65}, 64, "floor_scale"),
}


@pytest.mark.parametrize("name", SWITCHING)
def test_changing_arithmetic_runs_where_one_form_holds(name: str, tmp_path: Path) -> None:
    """A model that changes its arithmetic at a length runs within the range of one form."""
    kind, fields, length, field = SWITCHING[name]
    reference = write(kind, fields, tmp_path)
    for too_long in (None, 128, length + 1):
        with pytest.raises(UnsupportedModel, match=rf"{field}.*--max-model-len {length}$"):
            load_model(str(tmp_path), LoadOptions(max_model_len=too_long))
    model = load_model(str(tmp_path), LoadOptions(max_model_len=length))
    assert model.config.max_model_len == length
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 99, (size,), generator=generator).tolist() for size in (9, length)]
    with torch.inference_mode():
        wants = [reference(torch.tensor([ids])).logits[0] for ids in prompts]
    for sizes in ([length], [1], [20, 7]):
        for ids, want in zip(prompts, wants, strict=True):
            assert float((PagedModel(model).chunked(ids, sizes) - want).abs().max()) < 1e-3
    together = PagedModel(model)
    short, long = (together.sequence(ids) for ids in prompts)
    got = [together.logits([long.step(length - 1)])[0]]
    last, first = together.logits([long.step(1), short.step(9)])
    assert float((torch.cat([*got, last]) - wants[1]).abs().max()) < 1e-3
    assert float((first - wants[0]).abs().max()) < 1e-3


def test_dynamic_ntk_is_one_form_up_to_its_length(tmp_path: Path) -> None:
    rope = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}}
    reference = write("Olmo2", {**_SIZES, **rope}, tmp_path)
    model = load_model(str(tmp_path), LoadOptions())
    ids = torch.randint(0, 99, (128,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        want = reference(torch.tensor([ids])).logits[0]
    for sizes in ([128], [100, 7]):
        assert float((PagedModel(model).chunked(ids, sizes) - want).abs().max()) < 1e-3


@pytest.mark.parametrize("depends_on", ["the highest position", "the row"])
def test_an_unknown_model_that_depends_on_the_step_is_refused(
    depends_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From position 100 on, its arithmetic changes with the rest of the step."""
    from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2RotaryEmbedding

    rotary, attention = Olmo2RotaryEmbedding.forward, Olmo2Attention.forward

    def switching(self: Any, x: Any, position_ids: Any, **kwargs: Any) -> Any:
        return rotary(self, x, position_ids / 4 if int(position_ids.max()) >= 100 else position_ids, **kwargs)

    def by_row(self: Any, hidden_states: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        num_seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        rows = torch.arange(hidden_states.shape[1])[:, None] + num_seen
        states = torch.where(rows >= 100, hidden_states.roll(1, -1), hidden_states)
        return attention(self, states, *args, past_key_values=past_key_values, **kwargs)

    write("Olmo2", {**_SIZES, "max_position_embeddings": 4096}, tmp_path)
    load_model(str(tmp_path), LoadOptions())
    if depends_on == "the row":
        monkeypatch.setattr(Olmo2Attention, "forward", by_row)
    else:
        monkeypatch.setattr(Olmo2RotaryEmbedding, "forward", switching)
    with pytest.raises(UnsupportedModel, match="a shorter --max-model-len may run"):
        load_model(str(tmp_path), LoadOptions())


@pytest.mark.parametrize("name", SWITCHING)
def test_the_check_alone_finds_what_the_fields_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, fields, _, _ = SWITCHING[name]
    write(kind, fields, tmp_path)
    monkeypatch.setattr(transformers_backend, "_limits", lambda text: iter(()))
    with pytest.raises(UnsupportedModel, match="does not run exactly"):
        load_model(str(tmp_path), LoadOptions())
