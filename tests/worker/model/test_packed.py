"""Weights kept in 4 and 8 bits: exactly those of the file, and the dense form for large batches."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from tests.worker.families import write_family
from tests.worker.gguf_files import write_gguf
from tests.worker.paged import PagedModel
from tests.worker.quantised import quantised
from worker.files.errors import UnsupportedModel
from worker.model import llama
from worker.model.linear import DenseLinear, PackedLinear, is_packable
from worker.model.load import LoadOptions, load_model


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("shape", [(64, 64), (16, 32), (80, 128), (192, 576)], ids=str)
def test_products_are_those_of_the_dequantised_weight(kind: str, shape: tuple[int, int]) -> None:
    part, weight = quantised(kind, shape[0], shape[1] // 32)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(2)).bfloat16()
    linear = PackedLinear([part], DenseLinear(torch.full(shape, float("nan")).bfloat16()), bias)
    for rows in (1, 3, 4):
        states = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).bfloat16()
        want = states.float() @ weight.T + bias.float()
        error = (linear(states).float() - want).norm() / want.norm()
        assert float(error) < 0.01


def test_many_rows_take_the_dense_twin() -> None:
    part, _ = quantised("Q4_1", 32, 1)
    linear = PackedLinear([part], DenseLinear(torch.zeros(32, 32).bfloat16()), None)
    assert linear(torch.ones(1, 32).bfloat16()).any()
    assert not linear(torch.ones(9, 32).bfloat16()).any()


def test_parts_are_stacked() -> None:
    (one, first), (two, second) = quantised("Q4_1", 32, 2, 1), quantised("Q4_1", 16, 2, 2)
    linear = PackedLinear([one, two], DenseLinear(torch.zeros(48, 64).bfloat16()), None)
    states = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = states.float() @ torch.cat((first, second)).T
    assert float((linear(states).float() - want).norm() / want.norm()) < 0.01


def test_what_cannot_be_packed() -> None:
    four, eight, five = (quantised(kind, 32, 1)[0] for kind in ("Q4_1", "Q8_0", "Q5_1"))
    assert is_packable([four, four])
    assert not is_packable([four, eight])
    assert not is_packable([five])
    assert not is_packable([None])
    assert not is_packable([quantised("Q4_1", 40, 1)[0]])


def test_a_model_runs_packed(tmp_path: Path) -> None:
    reference = write_family("smollm2", tmp_path / "hf", hidden_size=96, intermediate_size=64, initializer_range=0.1)
    write_gguf(tmp_path / "m.gguf", reference, "llama", kind=gguf.GGMLQuantizationType.Q4_1)
    ids = [5, 17, 3, 98, 41, 41, 7, 60, 2, 2]
    packed, dense = (
        PagedModel(load_model(str(tmp_path / "m.gguf"), options)).chunked(ids, [1]).log_softmax(-1)
        for options in (LoadOptions(dtype="bfloat16", weights="packed"), LoadOptions())
    )
    assert not torch.equal(packed, dense)
    assert float((dense.exp() * (dense - packed)).sum(-1).mean()) < 0.01


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_in_float32_a_packed_model_gives_the_bits_of_a_dense_one(kind: str, tmp_path: Path) -> None:
    reference = write_family("smollm2", tmp_path / "hf", hidden_size=96, intermediate_size=64, initializer_range=0.1)
    write_gguf(tmp_path / "m.gguf", reference, "llama", kind=gguf.GGMLQuantizationType[kind])
    packed, unasked, dense = (
        load_model(str(tmp_path / "m.gguf"), LoadOptions(weights=form)) for form in ("packed", "auto", "dense")
    )
    assert packed.numerics == unasked.numerics == dense.numerics, "a stream may go on from one to the other"
    bits = [model.decoder._layers[0].mlp.down._fields.num_bits for model in (packed, unasked, dense)]
    assert bits == ([8, 8, 32] if kind == "Q8_0" else [4, 4, 32])
    ids = [5, 17, 3, 98, 41, 41, 7, 60, 2, 2, 9, 30]
    for chunks in ([12], [1], [9, 3]):
        want = PagedModel(dense).chunked(ids, chunks)
        for model in (packed, unasked):
            assert torch.equal(PagedModel(model).chunked(ids, chunks), want)


def test_float32_without_the_kernels_cannot_be_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "matmul_kernels_for", lambda dtype, device: None)
    reference = write_family("smollm2", tmp_path / "hf", hidden_size=96, intermediate_size=64)
    write_gguf(tmp_path / "m.gguf", reference, "llama", kind=gguf.GGMLQuantizationType.Q4_1)
    with pytest.raises(UnsupportedModel, match=r"install g\+\+"):
        load_model(str(tmp_path / "m.gguf"), LoadOptions(weights="packed"))
    load_model(str(tmp_path / "m.gguf"), LoadOptions())


def test_nothing_to_pack_is_an_error(tmp_path: Path) -> None:
    write_family("smollm2", tmp_path)
    with pytest.raises(UnsupportedModel, match="Q4_1"):
        load_model(str(tmp_path), LoadOptions(dtype="bfloat16", weights="packed"))


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "packed", "dtype": "float16"},
        {"weights": "packed", "device": "cuda"},
        {"weights": "packed", "dtype": "bfloat16", "deterministic": True},
    ],
    ids=str,
)
def test_combinations_that_do_not_exist(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="needs"):
        LoadOptions(**options)  # type: ignore[arg-type]
