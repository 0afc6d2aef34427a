"""Token rules: equal to a plain, slow reference, and cheap per token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.scheduler.engine import HandEngine, generate
from worker.contracts.step import SamplerCache, SamplingRow, SequenceResult, Step
from worker.sampling import rules, sampler
from worker.wire import SamplingParams

VOCAB = 24
EOS = (2, 5)


def reference(logits: list[float], sampling_row: SamplingRow) -> list[float]:
    """Return the adjusted logits of one row, token by token."""
    p, output, row = sampling_row.params, list(sampling_row.output_ids), [np.float32(value) for value in logits]
    for token in range(VOCAB):
        if (
            sampling_row.allowed is not None
            and not int(np.asarray(sampling_row.allowed).view(np.uint32)[token // 32]) >> token % 32 & 1
        ):
            row[token] = np.float32(-math.inf)
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            row[token] = np.float32(-math.inf)
        for word in p.bad_words:
            if word and word[-1] == token and (len(word) == 1 or output[-len(word) + 1 :] == list(word[:-1])):
                row[token] = np.float32(-math.inf)
    if len(output) < p.min_tokens:
        others = [value for token, value in enumerate(row) if token not in (*EOS, *p.stop_token_ids)]
        if any(value != -math.inf for value in others):
            for token in {*EOS, *p.stop_token_ids}:
                row[token] = np.float32(-math.inf)
    counts = Counter(output)
    for token in range(VOCAB):
        if p.repetition_penalty != 1.0 and (token in counts or token in sampling_row.prompt_ids):
            penalty = np.float32(p.repetition_penalty)
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        if counts[token]:
            row[token] -= np.float32(p.frequency_penalty) * np.float32(counts[token]) + np.float32(p.presence_penalty)
    for token, bias in p.logit_bias:
        row[token] += np.float32(bias)
    return [float(value) for value in row]


tokens = st.integers(0, VOCAB - 1)
eighths = st.integers(-16, 16).map(lambda number: number / 8)  # whose sums are exact
params = st.builds(
    SamplingParams,
    max_tokens=st.just(64),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.5]),
    logit_bias=st.dictionaries(tokens, eighths, max_size=VOCAB).map(lambda biases: tuple(biases.items())),
    bad_words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), max_size=8).map(tuple),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=1, max_size=60).map(tuple),
    min_tokens=st.integers(0, 5),
    stop_token_ids=st.lists(tokens, max_size=4).map(tuple),
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_adjusted_logits_equal_the_reference(data: st.DataObject) -> None:
    """Sample two requests step by step: their cached rules and counts are never stale."""
    chosen = [data.draw(params) for _ in range(2)]
    prompts = [data.draw(st.lists(tokens, min_size=1, max_size=6)) for _ in range(2)]
    request_cache, owners = [SamplerCache(), SamplerCache()], [0, 0, 1]
    choice_cache, outputs = (
        [SamplerCache() for _ in owners],
        [data.draw(st.lists(st.integers(0, 4), max_size=80)) for _ in owners],
    )
    for step in range(3):
        allowed = data.draw(st.none() | st.integers(1, 2**VOCAB - 1))
        mask = None if allowed is None else np.array([allowed], dtype=np.int32)
        sampling_rows = [
            SamplingRow(chosen[i], 0, 9, prompts[i], outputs[c], mask, request_cache[i], choice_cache[c])
            for c, i in enumerate(owners)
        ]
        logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(step))
        got = sampler.apply_edits(logits, *sampler.edits_of(sampling_rows, EOS, VOCAB))
        expected = [
            reference(row, sampling_row) for row, sampling_row in zip(logits.tolist(), sampling_rows, strict=True)
        ]
        np.testing.assert_array_max_ulp(got.numpy(), np.array(expected, dtype=np.float32), maxulp=2)
        for output in outputs:
            output += data.draw(st.lists(st.integers(0, 4), max_size=3))


class CountedList(Sequence[int]):
    """Counts how often it is iterated."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items, self.num_reads = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self):
        self.num_reads += 1
        return iter(self.items)

    def __getitem__(self, index):
        assert isinstance(index, int)
        return self.items[index]


class SamplingRunner:
    """A `worker.contracts.step.Runner` with the true sampler over random logits."""

    overlaps = False

    def run(self, step: Step) -> list[SequenceResult]:
        results = []
        for sequence in step.sequences:
            logits = torch.randn(
                len(sequence.sampling_rows), 50, generator=torch.Generator().manual_seed(sequence.start)
            )
            sampled = sampler.sample(logits, sequence.sampling_rows, EOS).tokens() if sequence.sampling_rows else ()
            results.append(SequenceResult(tuple(sampled)))
        return results

    def launch(self, step: Step):
        from worker.contracts.step import Launch, StepResult

        result = StepResult(self.run(step))
        return Launch(lambda: result)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": tuple(range(50))},
        {"logit_bias": tuple((token, 0.5) for token in range(50))},
        {"bad_words": tuple((token, token + 1) for token in range(49))},
        {"stop_token_ids": tuple(range(40, 50)), "min_tokens": 20},
    ],
)
def test_lists_are_read_once_a_request(fields: dict[str, Any]) -> None:
    """Neither choices, nor steps, nor preemptions read them again."""
    engine = HandEngine(num_blocks=40, runner=SamplingRunner(), max_num_seqs=8)
    (name, items), *_ = fields.items()
    counted = CountedList(items)
    wire = generate([1, 2, 3], 20, 8, **{**fields, name: counted})
    engine.submit(wire)
    num_read = counted.num_reads
    engine.finish()
    assert engine.num_preempted > 0
    assert counted.num_reads - num_read <= 2  # bad_words once more, for words of one token


@pytest.mark.parametrize("max_drafts", [0, 4])
def test_an_output_is_counted_once(monkeypatch: pytest.MonkeyPatch, max_drafts: int) -> None:
    counted = Counter()
    count = rules.OutputTokens._count
    monkeypatch.setattr(
        rules.OutputTokens, "_count", lambda self, *args: (counted.update([id(self)]), count(self, *args))[1]
    )
    engine = HandEngine(num_blocks=400, runner=SamplingRunner(), max_num_seqs=8, max_drafts=max_drafts)
    engine.submit(generate([1, 2, 3], 100, 4, repetition_penalty=1.2, allowed_token_ids=(3, 4)))
    engine.finish()
    assert (engine.num_drafted > 0) == (max_drafts > 0)
    assert len(counted) == 4
    assert all(90 <= num_counted <= 99 for num_counted in counted.values())  # the last draft may end the output


def test_penalties_of_a_long_output_equal_those_of_its_parts() -> None:
    output = [int(token) for token in np.random.default_rng(1).integers(0, 60, 500)]
    params = SamplingParams(max_tokens=999, frequency_penalty=1.0, repetition_penalty=1.5)
    rule = rules.TokenRules(params, (1, 2, 99), EOS, 50)
    expected = {token: float(count) for token, count in Counter(output).items() if token < 50}

    def row(stop: int, draft: Sequence[int], cache: SamplerCache) -> SamplingRow:
        return SamplingRow(params, 0, 9, (), output[:stop], choice_cache=cache, draft_ids=draft)

    parts, whole, begun = SamplerCache(), SamplerCache(), SamplerCache()
    for stop in range(0, 501, 7):
        rule.edits(row(stop, (), parts))
    for stop, draft, cache in ((490, output[490:], begun), (500, (), parts), (500, (), whole)):
        for _ in range(2):  # a draft leaves nothing behind
            edits = rule.edits(row(stop, draft, cache))
            assert edits is not None
            assert dict(zip(*edits.lowered, strict=True)) == expected
            assert sorted([*edits.in_prompt[0], *edits.only_in_output[0]]) == sorted({1, 2, *expected})


def test_rules_made_before_the_step_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that were made before the step are used."""
    ids = tuple(range(0, 50, 3)) * 5000
    params = SamplingParams(max_tokens=4, temperature=0.0, allowed_token_ids=ids, bad_words=((3,),))
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))

    def tokens(cache: SamplerCache) -> list[int]:
        rows = [SamplingRow(params, seed, 3, (1, 2, 3), (), request_cache=cache) for seed in range(8)]
        return [token.token_id for token in sampler.sample(logits, rows, EOS).tokens()]

    prepared = SamplerCache(rules.TokenRules(params, (1, 2, 3), EOS, 50))
    want = tokens(SamplerCache())
    monkeypatch.setattr(rules, "_biases", None)
    assert tokens(prepared) == want
    assert set(want) <= set(ids) - {3}
