"""Checkpoints as --model names them, and the errors of those that cannot be loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.worker.families import write_family
from worker.files import model_files
from worker.files.errors import CheckpointError, ModelError, UnsupportedModel
from worker.files.model_files import MIN_KEPT_BYTES, digest_files
from worker.model.gguf import name_of_file
from worker.model.huggingface import config_from_hf
from worker.model.load import FAMILIES, LoadOptions, default_model_path, find_checkpoint, load_model


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-llama"
    write_family("llama2", folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "tiny-llama"))


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_folder(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    model = load_model(str(folder), LoadOptions(), lambda done, total: calls.append((done, total)))
    assert model.checkpoint.name == "tiny-llama"
    assert model.numerics == "cpu/float32/panels"
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert model.checkpoint.revision == load_model(str(folder), LoadOptions()).checkpoint.revision


def test_a_hub_snapshot_keeps_its_name_and_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in allow_patterns)
        return str(folder.rename(folder.parent / "0123abcd"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    checkpoint = find_checkpoint("some-org/tiny@main")
    assert asked == [("some-org/tiny", "main")]
    assert (checkpoint.name, checkpoint.revision) == ("some-org/tiny", "0123abcd")


def test_the_default_is_installed() -> None:
    assert default_model_path().suffix == ".gguf"


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/at/all", "no such model", "a/b/c"])
def test_a_source_that_is_nothing(source: str) -> None:
    with pytest.raises(CheckpointError, match="no file, no folder"):
        find_checkpoint(source)


def test_pickled_weights_are_never_loaded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="never loaded"):
        find_checkpoint(str(folder))
    with pytest.raises(CheckpointError, match=r"neither a \.gguf"):
        find_checkpoint(str(folder / "pytorch_model.bin"))


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="lacks model-00002"):
        find_checkpoint(str(folder))


def test_an_index_cannot_point_outside(folder: Path) -> None:
    index = {"weight_map": {"a": "../../etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside"):
        find_checkpoint(str(folder))


def test_weights_that_cannot_be_opened_have_a_reason(folder: Path) -> None:
    """The library's error has no number."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: \w+ \w+") as caught:
        load_model(str(folder), LoadOptions(dtype="float32"))
    assert "None" not in str(caught.value)


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_model(str(folder), LoadOptions())


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModel, "quantization_config"),
        ({"num_key_value_heads": 3}, CheckpointError, "num_kv_heads"),
        ({"hidden_size": None}, CheckpointError, r"config\.json"),
        ({"vocab_size": 0}, CheckpointError, "vocab_size"),
        ({"vocab_size": "many"}, CheckpointError, r"config\.json"),
        ({"num_attention_heads": 0, "head_dim": None}, CheckpointError, r"config\.json"),
        ({"intermediate_size": float("inf")}, CheckpointError, r"config\.json"),
        ({"vocab_size": 77}, CheckpointError, "embed_tokens"),
        ({"intermediate_size": 40}, CheckpointError, "gate_proj"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, UnsupportedModel, "dynamic"),
        ({"rope_parameters": {"rope_type": "linear"}}, CheckpointError, "factor"),
        ({"model_type": "nonesuch"}, UnsupportedModel, "nonesuch"),
        *(({"model_type": kind}, CheckpointError, "model_type is .*: give a name") for kind in (None, "", 5, [1], {})),
        ({"is_causal": False}, UnsupportedModel, "is_causal"),
        ({"use_bidirectional_attention": True}, UnsupportedModel, "attend to later"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, UnsupportedModel, "keep one"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, UnsupportedModel, "full_attention"),
        ({"sliding_window": 9, "layer_types": ["full_attention", "chunked", "odd"]}, UnsupportedModel, "chunked"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_that_cannot_be_run(folder: Path, fields: dict[str, Any], error: type[ModelError], text: str) -> None:
    change_config(folder, **fields)
    with pytest.raises(error, match=text):
        load_model(str(folder), LoadOptions())


def test_the_old_spelling_of_rope(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    new = {**raw, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}}
    del raw["rope_parameters"]
    old = {**raw, "rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    family = FAMILIES["llama"]
    assert config_from_hf(new, family).rope == config_from_hf(old, family).rope
    assert config_from_hf(old, family).rope.parameters["original_max_position_embeddings"] == 256
    outside = {**old, "original_max_position_embeddings": 64}  # transformers takes this one
    assert config_from_hf(outside, family).rope.parameters["original_max_position_embeddings"] == 64


def test_layer_types_win_over_max_window_layers(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    qwen = {**raw, "model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}
    family = FAMILIES["qwen2"]
    assert config_from_hf(qwen, family).attention.windows == (None, 7, 7)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert config_from_hf({**qwen, "layer_types": kinds}, family).attention.windows == (7, None, 7)
    assert config_from_hf({**qwen, "use_sliding_window": False}, family).attention.windows == ()


def test_windows_where_the_file_has_half_of_them(folder: Path) -> None:
    """transformers gives a Llama no window, and a Mistral one of 4,096 unless its file has another."""
    raw = json.loads((folder / "config.json").read_text())
    assert config_from_hf({**raw, "sliding_window": 9}, FAMILIES["llama"]).attention.windows == ()
    assert config_from_hf(raw, FAMILIES["mistral"]).attention.windows == (4096,) * 3
    assert config_from_hf({**raw, "sliding_window": None}, FAMILIES["mistral"]).attention.windows == ()
    assert config_from_hf({**raw, "use_sliding_window": True}, FAMILIES["qwen2"]).attention.windows == (None,) * 3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_quantised_weights_without_a_word_in_config(folder: Path, dtype: torch.dtype) -> None:
    """As NVIDIA's files with a hf_quant_config.json: nothing would read the scales."""
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name].to(dtype)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"down_proj\.weight is stored as torch"):
        load_model(str(folder), LoadOptions())


def test_only_a_model_with_a_head_has_logits(folder: Path) -> None:
    assert load_model(str(folder), LoadOptions()).has_head
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert not load_model(str(folder), LoadOptions()).has_head


def test_other_weights_in_the_folder_are_not_read(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "zz.safetensors")
    norm = find_checkpoint(str(folder)).tensor("model.norm.weight")
    assert torch.equal(norm, tensors["model.norm.weight"])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, (32 << 20) + 4096), st.data())
def test_a_digest_sees_every_byte(tmp_path_factory: pytest.TempPathFactory, size: int, data: st.DataObject) -> None:
    file = tmp_path_factory.mktemp("digest") / "weights"
    file.write_bytes(bytes(size))
    before = digest_files([file]).digest
    with file.open("r+b") as weights:
        weights.seek(data.draw(st.integers(0, size - 1)))
        weights.write(b"\1")
    assert digest_files([file]).digest != before
    file.write_bytes(bytes(size + 1))
    assert digest_files([file]).digest != before


def test_a_kept_digest_is_that_of_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken while size, times and inode are the same, and made again from a damaged record."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "weights"
    file.write_bytes(bytes(MIN_KEPT_BYTES))
    monkeypatch.setattr(model_files, "SETTLED_S", -1.0)
    before = digest_files([file])
    (first,) = (tmp_path / "cache").rglob("digest-*")
    assert digest_files([file]) == before
    with file.open("r+b") as weights:
        weights.write(b"\1")
    os.utime(file, ns=(before.statuses[0][1].mtime_ns, before.statuses[0][1].mtime_ns))
    after = digest_files([file])
    assert after.digest != before.digest
    (kept,) = set((tmp_path / "cache").rglob("digest-*")) - {first}
    text = kept.read_text()
    for damaged in (first.read_text(), "", "{}", text[:-9], f"{text[:63]}{'01'[text[63] == '0']}{text[64:]}"):
        kept.write_text(damaged)
        assert digest_files([file]).digest == after.digest
    with pytest.raises(CheckpointError, match="changed while it was loaded"):
        before.check_unchanged()


@pytest.mark.parametrize(
    ("file", "name"),
    [("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"), ("x-f16.gguf", "x"), ("y.IQ4_XS.gguf", "y")],
)
def test_names_lose_their_quantisation(file: str, name: str) -> None:
    assert name_of_file(Path(file)) == name
