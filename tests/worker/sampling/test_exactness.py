"""A choice gets the same tokens however its steps are cut; kept tokens and shares are those of float64."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pytest
import torch

from tests.worker.sampling.cases import exactly_kept, random_logits, random_params
from tests.worker.scheduler.engine import HandEngine, generate
from worker.contracts.step import Launch, SequenceResult, Step, StepResult
from worker.kernels.cpu import sampling_kernels_for
from worker.sampling import reference
from worker.sampling.rules import TokenRules
from worker.sampling.sampler import sample, uniform
from worker.wire import GenerateRequest, SamplingParams

EOS = (2,)
VOCAB: Final = 60
NUM_ROWS: Final = 13
MAX_TOKENS: Final = 8


class TableRunner:
    """A `worker.contracts.step.Runner` whose logits depend on the last token. The sampler is real."""

    overlaps = False

    def __init__(self) -> None:
        self._table = torch.from_numpy(random_logits(VOCAB, NUM_ROWS, seed=3))

    def launch(self, step: Step) -> Launch[StepResult]:
        rows = [row for sequence in step.sequences for row in sequence.sampling_rows]
        tokens = iter(())
        if rows:
            last_ids = [(*row.prompt_ids, *row.output_ids, *row.draft_ids)[-1] for row in rows]
            logits = self._table[[token_id % NUM_ROWS for token_id in last_ids]]
            tokens = iter(sample(logits, rows, EOS).tokens())
        results = [SequenceResult(tuple(next(tokens) for _ in each.sampling_rows)) for each in step.sequences]
        return Launch(lambda: StepResult(results))


class Case:
    """A request of two choices with random settings."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.prompt_ids = [source.randrange(VOCAB) for _ in range(source.randrange(2, 14))]
        params = random_params(source)
        fields = {name: getattr(params, name) for name in params.__struct_fields__ if name != "max_tokens"}
        self.fields: Mapping[str, Any] = {**fields, "ignore_eos": True, "logprobs": None, "min_tokens": seed % 3 * 5}
        self.fields |= {} if source.random() < 0.5 else {"temperature": 0.0}  # drafts are right more often

    def request(self, resumed: dict[int, list[int]] | None = None, max_tokens: int = MAX_TOKENS) -> GenerateRequest:
        return generate(self.prompt_ids, max_tokens, 2, resumed=resumed, **self.fields)


def answers(wires: list[GenerateRequest], engine: HandEngine) -> list[dict[int, list[int]]]:
    requests = [engine.submit(wire) for wire in wires]
    engine.finish()
    return [engine.answer(request).tokens for request in requests]


def count_differing(seeds: range) -> Counter[str]:
    """Count the choices that differ from those of a request by itself, and what the crowded engine did."""
    cases = [Case(seed) for seed in seeds]
    alone = [answers([case.request()], HandEngine(64, runner=TableRunner()))[0] for case in cases]
    crowded = HandEngine(20, runner=TableRunner(), max_num_seqs=8, max_num_batched_tokens=9)
    together = answers([case.request() for case in cases], crowded)
    drafting = HandEngine(64, runner=TableRunner(), max_drafts=3)
    drafted = [answers([case.request()], drafting)[0] for case in cases]
    counts = Counter(preempted=crowded.num_preempted, drafted=drafting.num_drafted, accepted=drafting.num_accepted)
    for case, want, *got in zip(cases, alone, together, drafted, strict=True):
        wires = [case.request({i: want[i][:num] for i in want}, num + 1) for num in range(1, MAX_TOKENS)]
        nexts = answers(wires, HandEngine(160, runner=TableRunner()))
        for i, tokens in want.items():
            resumed = [tokens[0], *(each[i][0] for each in nexts)]
            counts.update(choices=1, differing=any(each != tokens for each in (got[0][i], got[1][i], resumed)))
    return counts


def test_a_choice_is_the_same_however_its_steps_are_cut() -> None:
    """A request by itself, in batches, in chunks, preempted, with drafts, and resumed at each token."""
    counts = count_differing(range(40))
    assert (counts["choices"], counts["differing"]) == (80, 0)
    assert min(counts["preempted"], counts["drafted"], counts["accepted"]) > 0


@pytest.mark.deep
def test_ten_thousand_choices_are_the_same() -> None:
    counts = sum((count_differing(range(first, first + 50)) for first in range(0, 5_000, 50)), Counter[str]())
    print(counts)
    assert (counts["choices"], counts["differing"]) == (10_000, 0)


SLACKS: Final = ((0.0, 0.0), (-1e-6, 0.0), (1e-6, 0.0), (0.0, -1e-6), (0.0, 1e-6))


def off_mass(seed: int) -> float:
    """Return the share of the tokens that are kept against float64, or not kept.

    A limit that falls on a share, or between two keys, within 1e-6 may go either way.
    """
    source = random.Random(seed)
    vocab_size = source.choice([4, 12, 50, 130])
    logits = random_logits(vocab_size, 1, seed)[0]
    params = SamplingParams(
        max_tokens=1,
        temperature=source.choice([0.3, 0.7, 1.0, 2.0, 5.0]),
        top_k=source.choice([0, 0, 1, 3, 20]),
        top_p=source.choice([1.0, 0.95, 0.5, 0.999, 0.0]),
        min_p=source.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        typical_p=source.choice([1.0, 1.0, 1.0, 0.9, 0.4]),
    )
    limits = TokenRules(params, (), EOS, vocab_size).limits
    kept = reference.Draw(logits, limits).kept.reshape(-1)[:vocab_size]
    masses = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    masses /= masses.sum()
    found = (float(masses[kept ^ exactly_kept(logits, params, *each)].sum()) for each in SLACKS)
    return next((mass for mass in found if mass <= 1e-6), 1.0)


def test_kept_tokens_are_those_of_float64() -> None:
    assert [seed for seed in range(400) if off_mass(seed) > 1e-6] == []


@pytest.mark.deep
def test_many_kept_sets_are_those_of_float64() -> None:
    found = [off_mass(seed) for seed in range(200_000)]
    print(f"200,000 rows: {sum(mass > 1e-6 for mass in found)} differ by more than 1e-6 of the mass")
    assert max(found) <= 1e-6


SETTINGS: Final[tuple[Mapping[str, Any], ...]] = (
    *({"temperature": value} for value in (0.3, 0.7, 1.0, 1.5, 5.0)),
    *({"temperature": 1.0, "top_p": value} for value in (0.5, 0.9, 0.95, 0.999)),
    *({"temperature": 1.0, "top_k": value} for value in (2, 5, 20)),
    *({"temperature": 1.0, "min_p": value} for value in (0.02, 0.2)),
    *({"temperature": 1.0, "typical_p": value} for value in (0.5, 0.9)),
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.9},
)


def chi_square(fields: Mapping[str, Any], seed: int, num_draws: int) -> float:
    """Return the p value of draws against the shares in float64."""
    kernels = sampling_kernels_for(torch.device("cpu"))
    if kernels is None:
        pytest.skip("needs g++")
    logits = np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)
    params = SamplingParams(max_tokens=1, **fields)
    limits, no_edits = TokenRules(params, (), EOS, VOCAB).limits, (0,) * 18
    table = [(logits.ctypes.data, uniform(seed, position), *no_edits, *limits) for position in range(num_draws)]
    seen = np.bincount(kernels.sample(table, [None] * num_draws, VOCAB)[0].numpy(), minlength=VOCAB)
    x = logits.astype(np.float64) / params.temperature
    masses = np.where(exactly_kept(logits, params), np.exp(x - x.max()), 0.0)
    expected = masses / masses.sum() * num_draws
    is_rare = expected < 5  # counted together
    observed = np.append(seen[~is_rare], seen[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    assert observed[expected == 0].sum() == 0
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), torch.tensor(statistic / 2)))


def test_draws_have_the_shares_of_float64() -> None:
    assert min(chi_square(fields, seed, 5_000) for seed, fields in enumerate(SETTINGS)) > 1e-4


@pytest.mark.deep
def test_a_million_draws_have_the_shares_of_float64() -> None:
    found = [chi_square(fields, seed, 1_000_000) for seed, fields in enumerate(SETTINGS)]
    print("p values:", *(f"{value:.3f}" for value in found))
    assert min(found) > 1e-4
