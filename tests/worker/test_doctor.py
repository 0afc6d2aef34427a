"""The worker's part of `headstart doctor`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from worker import doctor
from worker.attention.base import ForwardBatch
from worker.attention.torch_paged import TorchPagedAttention

CPU = torch.device("cpu")


class Wrong(TorchPagedAttention):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        return super().attend(layer, query, key.roll(1, 0), value, batch)


def test_a_kernel_is_held_to_plain_torch() -> None:
    assert doctor.largest_error(TorchPagedAttention, CPU, torch.bfloat16) < doctor.TOLERANCE
    assert doctor.largest_error(Wrong, CPU, torch.float32) > doctor.TOLERANCE


def test_the_default_model_is_sized_and_its_memory_counted_for_every_worker() -> None:
    finding, config = doctor.model("")
    assert (finding.status, config is not None) == ("ok", True)
    assert config is not None
    assert doctor.num_parameters(config) == pytest.approx(134_515_008, rel=0.01)
    assert doctor.memory(config, CPU, None, 1_000_000).status == "fail"
    assert doctor.memory(config, CPU, "bfloat16", 1).status in ("ok", "warn")


@pytest.mark.parametrize(
    ("source", "status", "mend"),
    [("nowhere.gguf", "fail", "--model"), ("nobody/has-this-model", "warn", "hf download nobody/has-this-model")],
)
def test_a_model_that_is_not_here(source: str, status: str, mend: str) -> None:
    finding, config = doctor.model(source)
    assert (finding.status, mend in finding.mend, config) == (status, True, None)


def test_a_gpu_that_is_not_there() -> None:
    if not torch.cuda.is_available():
        assert doctor.gpu(torch.device("cuda")).status == "fail"
    assert doctor.gpu(CPU).found
