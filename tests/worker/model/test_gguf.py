from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.worker.families import write_family
from tests.worker.gguf_files import write_gguf
from tests.worker.paged import PagedModel
from worker.files.errors import CheckpointError, UnsupportedModel
from worker.model.gguf import GGUFCheckpoint
from worker.model.load import FAMILIES, LoadOptions, load_model
from worker.model.rope import rope_table

IDS = [5, 17, 3, 98, 41, 41, 7, 60, 2, 2, 33, 12]


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("smollm2", "llama"), ("mistral", "llama"), ("llama_biased", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_logits_match_the_model_that_was_written(family: str, architecture: str, tmp_path: Path) -> None:
    reference = write_family(family, tmp_path / "hf")
    reference.config.rope_parameters = {"rope_theta": 10_000.0, "rope_type": "default"}
    reference.model.rotary_emb = type(reference.model.rotary_emb)(reference.config)
    write_gguf(tmp_path / "model.gguf", reference, architecture)
    model = load_model(str(tmp_path / "model.gguf"), LoadOptions())
    with torch.inference_mode():
        want = reference(torch.tensor([IDS])).logits[0]
    assert float((PagedModel(model).chunked(IDS, [len(IDS)]) - want).abs().max()) < 1e-3


def test_factors_of_yarn_are_refused_by_name(tmp_path: Path) -> None:
    reference = write_family("qwen2", tmp_path / "hf")
    write_gguf(tmp_path / "model.gguf", reference, "qwen2", rope_fields={"scaling.yarn_attn_factor": 0.5})
    with pytest.raises(UnsupportedModel, match=r"rope\.scaling\.yarn_attn_factor is 0\.5"):
        load_model(str(tmp_path / "model.gguf"), LoadOptions())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_stored_types_are_dequantised(kind: str, tmp_path: Path) -> None:
    """Loaded values are exactly those of the file, with q and k put back in order."""
    reference = write_family("smollm2", tmp_path / "hf", hidden_size=96, intermediate_size=64)
    quantisation = gguf.GGMLQuantizationType[kind]
    write_gguf(tmp_path / "model.gguf", reference, "llama", kind=quantisation)
    checkpoint = GGUFCheckpoint(tmp_path / "model.gguf")
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight"):
        values = reference.state_dict()[name].numpy()
        want = gguf.dequantize(gguf.quantize(values, quantisation), quantisation)
        np.testing.assert_array_equal(checkpoint.tensor(name).numpy(), want)
        quantised = checkpoint.quantised(name)
        if kind in ("F16", "BF16"):
            assert quantised is None
        else:
            assert quantised is not None
            np.testing.assert_array_equal(gguf.dequantize(quantised.data, quantisation), want)


def test_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    """Llama 3's scaling comes as a tensor in GGUF: it must give the table that the config gives."""
    reference = write_family("llama3", tmp_path / "hf")
    hf = load_model(str(tmp_path / "hf"), LoadOptions())
    plain = 1.0 / 10_000.0 ** (np.arange(0, 16, 2) / 16)
    factors = plain / reference.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 1.5
    write_gguf(tmp_path / "model.gguf", reference, "llama", rope_factors=factors)
    checkpoint = GGUFCheckpoint(tmp_path / "model.gguf")
    config = checkpoint.config(FAMILIES[checkpoint.model_type])
    table = rope_table(config.rope, config.attention.head_dim, 256, checkpoint.rope_factors())
    want = rope_table(hf.config.rope, hf.config.attention.head_dim, 256)
    torch.testing.assert_close(table, want, rtol=0, atol=1e-4)


def test_equal_files_have_equal_revisions(tmp_path: Path) -> None:
    reference = write_family("smollm2", tmp_path / "hf")
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        if folder == "c":
            reference.model.layers[1].mlp.down_proj.weight.data.mul_(1.01)
        write_gguf(tmp_path / folder / "m.Q8_0.gguf", reference, "llama")
    a, b, c = (GGUFCheckpoint(tmp_path / folder / "m.Q8_0.gguf") for folder in "abc")
    assert a.revision == b.revision != c.revision
    assert a.name == "m"


def test_a_missing_tensor_has_its_name_in_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", write_family("qwen3", tmp_path / "hf"), "qwen3")
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.has("model.layers.1.self_attn.q_norm.weight")
    assert not checkpoint.has("model.layers.1.nonesuch.weight")
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_q\.bias"):
        checkpoint.tensor("model.layers.1.self_attn.q_proj.bias")


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="gemma2"):
        load_model(str(tmp_path / "m.gguf"), LoadOptions())


@pytest.mark.parametrize("kind", [None, "", 5, [1, 2], "x" * 100_000])
def test_a_broken_architecture_gets_a_sentence(kind: object, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    field = writer.kv_data[0].pop("general.architecture")
    if kind is not None:
        type_ = gguf.GGUFValueType.get_type(kind)
        writer.kv_data[0]["general.architecture"] = dataclasses.replace(field, value=kind, type=type_)
    writer.add_name("m")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises((CheckpointError, UnsupportedModel)) as error:
        load_model(str(tmp_path / "m.gguf"), LoadOptions())
    assert len(str(error.value)) < 600, "a sentence, not the value"


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but long enough to be one" * 10])
def test_a_broken_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        load_model(str(tmp_path / "m.gguf"), LoadOptions())
