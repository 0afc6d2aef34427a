"""The compiled attention in float32: right, and for each token the same whatever shares its step, and wherever."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.kernels.test_attention import batch_of
from worker.attention.base import AttentionShape, Span
from worker.attention.kv_cache import KVCache
from worker.attention.selector import select_attention
from worker.attention.tiled_paged import TiledPagedAttention
from worker.kernels.cpu import Kernels


@dataclass(frozen=True)
class Case:
    """Sequences of given lengths over scattered blocks, each with the states of all its tokens."""

    shape: AttentionShape
    block_size: int
    lengths: list[int]

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads

    def states(self, sequence: int) -> Tensor:
        """(tokens, heads + 2 * kv_heads, head_dim)"""
        size = (self.lengths[sequence], sum(self.sizes), self.shape.head_dim)
        return 1.5 * torch.randn(size, generator=torch.Generator().manual_seed(sequence))

    def run(self, kernels: Kernels, steps: list[dict[int, int]], ring: int | None = None) -> list[Tensor]:
        """Run steps of {sequence: tokens}, each over `ring` blocks if given -> (tokens, heads * head_dim) of each."""
        held = [ring or -(-length // self.block_size) for length in self.lengths]
        ids = torch.randperm(sum(held), generator=torch.Generator().manual_seed(7)).add(1).split(held)
        cache = KVCache(self.shape, sum(held) + 1, self.block_size, torch.float32, torch.device("cpu"))
        for pool in (*cache.keys, *cache.values):
            pool.fill_(1e4)  # is never seen
        attention = TiledPagedAttention(self.shape, cache, kernels)
        outputs: list[list[Tensor]] = [[] for _ in self.lengths]
        done = [0] * len(self.lengths)
        for step in steps:
            order = sorted(step, key=lambda sequence: step[sequence] > 1)
            spans, rows = [], []
            for sequence in order:
                start, stop = done[sequence], done[sequence] + step[sequence]
                table = [int(ids[sequence][i % held[sequence]]) for i in range(-(-stop // self.block_size))]
                spans.append(Span(start, stop - start, table))
                rows.append(self.states(sequence)[start:stop])
                done[sequence] = stop
            query, key, value = torch.cat(rows).split(self.sizes, dim=1)
            out = attention.attend(0, query, key, value, batch_of(spans, self.block_size, attention.plan(spans)))
            for sequence, part in zip(order, out.split([span.num_tokens for span in spans]), strict=True):
                outputs[sequence].append(part)
        return [torch.cat(parts) if parts else torch.empty(0) for parts in outputs]

    def alone(self, kernels: Kernels, sequence: int) -> Tensor:
        """One sequence in one chunk."""
        return self.run(kernels, [{sequence: self.lengths[sequence]}])[sequence]

    def reference(self, sequence: int) -> Tensor:
        query, key, value = self.states(sequence).double().transpose(0, 1).split(self.sizes)
        repeats = self.shape.num_heads // self.shape.num_kv_heads
        key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
        tokens = torch.arange(self.lengths[sequence])
        age = tokens[:, None] - tokens[None, :]
        hidden = (age < 0) | (age >= (self.shape.window(0) or math.inf))
        scores = (query @ key.transpose(1, 2) * self.shape.scale).masked_fill(hidden, -math.inf)
        return (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)


@st.composite
def cases(draw: st.DrawFn, max_length: int = 300) -> Case:
    num_kv_heads, group_size = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 4, 7)))
    head_dim = draw(st.sampled_from((16, 17, 32, 64, 80, 128)))
    window = draw(st.none() | st.sampled_from((1, 6, 127, 128, 150)))
    shape = AttentionShape(1, num_kv_heads * group_size, num_kv_heads, head_dim, head_dim**-0.5, (window,))
    return Case(
        shape, draw(st.sampled_from((1, 4, 16, 50))), draw(st.lists(st.integers(1, max_length), min_size=1, max_size=3))
    )


@st.composite
def cut(draw: st.DrawFn, lengths: list[int]) -> list[dict[int, int]]:
    """Cut sequences into steps, some of them decodes."""
    steps, left = [], dict(enumerate(lengths))
    while left:
        some = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        step = {sequence: min(left[sequence], draw(st.sampled_from((1, 1, 3, 64, 200)))) for sequence in some}
        for sequence, num_tokens in step.items():
            left[sequence] -= num_tokens
        left = {sequence: num_tokens for sequence, num_tokens in left.items() if num_tokens}
        steps.append(step)
    return steps


@given(cases(), st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_neither_chunks_nor_neighbours_change_a_bit(kernels: Kernels, case: Case, data: st.DataObject) -> None:
    """The result is right, and neither chunks nor neighbours change a bit of it."""
    got = case.run(kernels, data.draw(cut(case.lengths)))
    for sequence in range(len(case.lengths)):
        torch.testing.assert_close(got[sequence].double(), case.reference(sequence), rtol=1e-5, atol=2e-5)
        assert torch.equal(got[sequence], case.alone(kernels, sequence))


@given(cases(), st.integers(1, 5))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_neither_threads_nor_lanes_change_a_bit(all_kernels: list[Kernels], case: Case, num_threads: int) -> None:
    step, threads = dict(enumerate(case.lengths)), torch.get_num_threads()
    want = case.run(all_kernels[0], [step])
    try:
        torch.set_num_threads(num_threads)
        for kernels in all_kernels:
            for one, other in zip(case.run(kernels, [step]), want, strict=True):
                assert torch.equal(one, other)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_ring_of_blocks_holds_a_window_and_a_chunk(kernels: Kernels, block_size: int) -> None:
    case = Case(AttentionShape(1, 6, 2, 32, 0.2, (40,)), block_size, [500])
    steps = [{0: 30}] * 16 + [{0: 1}] * 20
    ring = -(-(40 + 30) // block_size)
    assert torch.equal(case.run(kernels, steps, ring)[0], case.alone(kernels, 0))


def test_far_scores_fade_without_a_trace(kernels: Kernels) -> None:
    case = Case(AttentionShape(1, 2, 1, 16, 40.0), 16, [400])
    torch.testing.assert_close(case.alone(kernels, 0).double(), case.reference(0), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_what_is_not_finite_is_never_hidden(kernels: Kernels, broken: float, place: str) -> None:
    shape = AttentionShape(1, 4, 2, 32, 0.2)
    cache = KVCache(shape, 3, 128, torch.float32, torch.device("cpu"))
    attention = TiledPagedAttention(shape, cache, kernels)
    given = {name: torch.randn(141, heads, 32) for name, heads in (("query", 4), ("key", 2), ("value", 2))}
    given[place][140 if place == "query" else 130, 1, 5] = broken
    spans = [Span(0, 141, [2, 1])]
    out = attention.attend(0, *given.values(), batch_of(spans, 128, attention.plan(spans)))
    assert not bool(out[140].isfinite().all())
    assert bool(out[:90].isfinite().all()), "other tiles of queries"


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_heads_may_lie_apart(kernels: Kernels, num_kv_heads: int) -> None:
    """As many models of transformers have them: (heads, rows, head_dim)."""
    shape = AttentionShape(1, 3 * num_kv_heads, num_kv_heads, 16, 0.2)
    cache = KVCache(shape, 4, 16, torch.float32, torch.device("cpu"))
    attention = TiledPagedAttention(shape, cache, kernels)
    spans = [Span(0, 1, [3]), Span(0, 20, [2, 1])]
    apart = [torch.randn(heads, 21, 16).transpose(0, 1) for heads in (3 * num_kv_heads, num_kv_heads, num_kv_heads)]
    outs = [
        attention.attend(0, *given, batch_of(spans, 16, attention.plan(spans)))
        for given in (apart, [one.clone(memory_format=torch.contiguous_format) for one in apart])
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize(("head_dim", "name"), [(16, "tiled"), (17, "tiled"), (15, "torch")])
def test_heads_that_do_not_fill_a_vector_go_through_torch(kernels: Kernels, head_dim: int, name: str) -> None:
    shape = AttentionShape(1, 6, 2, head_dim, 0.2)
    cache = KVCache(shape, 2, 4, torch.float32, torch.device("cpu"))
    assert select_attention(shape, cache, deterministic=False).name == name
