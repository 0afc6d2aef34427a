"""With `--deterministic` no bit of a row depends on the other rows, whatever the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.worker.families import write_family
from tests.worker.paged import PagedModel
from worker.attention.selector import select_attention
from worker.model.config import RopeConfig
from worker.model.layers import invariant_silu, rms_norm
from worker.model.linear import TiledLinear, dense_linear
from worker.model.load import LoadOptions, load_model
from worker.model.rope import rope_table, torch_rotation

THREADS = range(1, 9)
NUM_ROWS = (1, 2, 3, 7, 22, 43, 97)
WIDTHS = {"smollm2": (576, 1536), "tinyllama": (2048, 5632), "wider than a part": (64, 40_001)}
DTYPES = (torch.float32, torch.bfloat16)
Operation = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check(operation: Operation, states: Tensor) -> None:
    """Compare each row of a batch with the row by itself, at every number of threads."""
    torch.set_num_threads(1)
    alone = torch.cat([operation(states[row : row + 1]) for row in range(len(states))])
    for num_threads, num_rows in product(THREADS, NUM_ROWS):
        torch.set_num_threads(num_threads)
        for first in (0, len(states) - num_rows):
            got = operation(states[first : first + num_rows])
            assert torch.equal(got, alone[first : first + num_rows]), f"{num_threads} threads, {num_rows} rows"


def random(num_columns: int, dtype: torch.dtype, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(max(NUM_ROWS), num_columns, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "inner"), WIDTHS.values(), ids=WIDTHS)
def test_operations_of_a_layer(hidden: int, inner: int, dtype: torch.dtype) -> None:
    check(lambda states: invariant_silu(states.chunk(2, dim=-1)[0]), random(2 * inner, dtype))
    weight = random(hidden, dtype)[0]
    check(rms_norm(weight, 1e-5, deterministic=True), random(hidden, dtype))
    table = rope_table(RopeConfig(), 64, 256).to(dtype)

    def rotated(states: Tensor) -> Tensor:
        positions = torch.tensor([37 * int(row.sum().abs() * 100) % 256 for row in states])
        return torch_rotation(table, positions)(states, hidden // 64).flatten(1)

    check(rotated, random(hidden, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_outputs", [99, 256])
def test_narrow_products(num_outputs: int, dtype: torch.dtype) -> None:
    """oneDNN with AMX splits sums of these among 3, 6 and 7 threads."""
    weight = torch.cat([random(2048, dtype), random(2048, dtype).flip(0), random(2048, dtype)])[:num_outputs]
    check(TiledLinear(dense_linear(weight)), random(2048, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("hidden", "inner", "heads", "kv_heads", "threads"),
    [
        pytest.param(576, 1536, 9, 3, THREADS, id="smollm2"),
        pytest.param(2048, 5632, 32, 4, (3,), id="tinyllama", marks=pytest.mark.e2e),
        pytest.param(2048, 5632, 32, 4, THREADS, id="tinyllama at every number", marks=pytest.mark.deep),
    ],
)
def test_a_layer_of_real_width(
    dtype: str, hidden: int, inner: int, heads: int, kv_heads: int, threads: Sequence[int], tmp_path: Path
) -> None:
    write_family(
        "llama2",
        tmp_path,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=1,
        initializer_range=0.1,
    )
    model = load_model(str(tmp_path), LoadOptions(dtype=dtype, deterministic=True))
    ids = [7 * i % 99 for i in range(97)]

    def logits(sizes: list[int]) -> Tensor:
        paged = PagedModel(model, attention=lambda shape, cache: select_attention(shape, cache, deterministic=True))
        return paged.chunked(ids, sizes)

    torch.set_num_threads(1)
    want = logits([97])
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        for sizes in ([97], [22, 43, 9]):
            assert torch.equal(logits(sizes), want), f"{num_threads} threads, chunks of {sizes}"
