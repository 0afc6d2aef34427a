from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from worker.contracts.step import NonFinite, NoTokenLeft, SampledToken, SamplingRow
from worker.sampling import reference, sampler
from worker.sampling.rules import TokenRules
from worker.sampling.sampler import sample, token_logprobs, uniform
from worker.wire import SamplingParams

EOS = (2,)
GOLDEN = (0.9380944058769953, 0.414763255709233)
VOCAB = 50


def sampling_row(seed: int = 0, position: int = 0, *, allowed: object = None, **params: Any) -> SamplingRow:
    prompt, output = params.pop("prompt", ()), params.pop("output", ())
    return SamplingRow(SamplingParams(max_tokens=16, **params), seed, position, prompt, output, allowed)


def sample_tokens(
    logits: Tensor, sampling_rows: list[SamplingRow], eos_token_ids: tuple[int, ...]
) -> list[SampledToken]:
    sampled = sample(logits, sampling_rows, eos_token_ids)
    sampled.check(range(len(sampling_rows)))
    return sampled.tokens()


def token(logits: Tensor, one: SamplingRow) -> int:
    return sample_tokens(logits[None], [one], EOS)[0].token_id


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def kept(logits: Tensor, **params: Any) -> set[int]:
    """Return the token ids that the limits keep."""
    rules = TokenRules(SamplingParams(max_tokens=1, **params), (), EOS, len(logits))
    return set(reference.Draw(logits.numpy(), rules.limits).kept.reshape(-1).nonzero()[0].tolist())


def logits_of(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities).log()


class TestRandomness:
    def test_is_a_function_of_seed_and_position(self) -> None:
        assert uniform(1, 2) == uniform(1, 2)
        assert len({uniform(seed, position) for seed in range(20) for position in range(20)}) == 400

    def test_golden(self) -> None:
        """A resumed stream may run on a worker of another version: the numbers must never change."""
        assert uniform(0, 0) == GOLDEN[0] * 2**53
        assert uniform(2**64 - 1, 1_000_000) == GOLDEN[1] * 2**53
        assert uniform(-1, 1_000_000) == GOLDEN[1] * 2**53

    def test_is_uniform(self) -> None:
        values = np.array([uniform(7, position) for position in range(20_000)]) / 2**53
        assert values.min() >= 0
        assert values.max() < 1
        deviation = np.abs(np.sort(values) - (np.arange(20_000) + 0.5) / 20_000).max()
        assert deviation < 1.95 / math.sqrt(20_000)  # Kolmogorov-Smirnov, one in a thousand


def test_greedy_takes_the_best() -> None:
    logits = random_logits(8)
    sampled = sample_tokens(logits, [sampling_row(temperature=0.0)] * 8, EOS)
    assert [one.token_id for one in sampled] == logits.argmax(-1).tolist()
    assert all(one.logprobs is None for one in sampled)


def test_samples_follow_the_distribution() -> None:
    """Pearson's chi-squared over 20,000 samples at temperature 0.7."""
    logits, count = random_logits(1, seed=3, vocab=12)[0], 20_000
    expected = (logits / 0.7).softmax(-1) * count
    rows = logits.expand(count, -1)
    sampled = sample_tokens(rows, [sampling_row(5, position, temperature=0.7) for position in range(count)], EOS)
    seen = torch.bincount(torch.tensor([one.token_id for one in sampled]), minlength=12)
    likely = expected > 5
    statistic = ((seen - expected) ** 2 / expected)[likely].sum()
    assert float(statistic) < 31.3  # 11 degrees of freedom, one in a thousand


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_token_of_probability_zero_is_never_sampled(monkeypatch: pytest.MonkeyPatch, is_compiled: bool) -> None:
    if not is_compiled:
        monkeypatch.setattr(sampler, "sampling_kernels_for", lambda device: None)
    logits = torch.full((VOCAB,), float("-inf"))
    logits[[7, 31]] = 0.0
    for number, expected in ((0, 7), (1 << 52, 31), ((1 << 53) - 1, 31)):
        with monkeypatch.context() as patched:
            patched.setattr(sampler, "uniform", lambda seed, position, number=number: number)
            assert token(logits, sampling_row()) == expected
    sampled = sample_tokens(logits.expand(500, -1), [sampling_row(1, position) for position in range(500)], EOS)
    assert set(Counter(one.token_id for one in sampled)) == {7, 31}


def test_sampling_never_reads_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without data cannot be read; on a device, reading would wait for it."""
    monkeypatch.setattr(sampler, "to_host", lambda tensor: tensor)
    monkeypatch.setattr(sampler, "_draw", lambda logits, rules, draws: logits.argmax(dim=-1))  # a Triton kernel there
    sampling_rows = [
        sampling_row(temperature=0.0, logprobs=3),
        sampling_row(temperature=0.7, top_k=3, logprobs=0),
        sampling_row(top_p=0.9, min_p=0.1, typical_p=0.5, bad_words=((5,), (1, 6)), output=(1,)),
        sampling_row(
            repetition_penalty=1.3, frequency_penalty=0.5, logit_bias=((3, 5.0),), prompt=(1, 2), output=(3, 3)
        ),
        sampling_row(min_tokens=4, allowed_token_ids=(1, 2, 3), allowed=np.full(2, -1, dtype=np.int32)),
    ]
    sampled = sample(random_logits(len(sampling_rows)).to("meta"), sampling_rows, EOS)
    assert sampled.token_ids.device.type == "meta"
    assert sampled.token_ids.shape == (len(sampling_rows),)
    with pytest.raises((RuntimeError, NotImplementedError)):
        sampled.tokens()


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(1)[0]
    assert token(logits, sampling_row(temperature=temperature)) == int(logits.argmax())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_does_not_depend_on_the_others(data: st.DataObject) -> None:
    params = st.builds(
        SamplingParams,
        max_tokens=st.just(8),
        temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 3, 100]),
        top_p=st.sampled_from([1.0, 0.9, 0.3]),
        min_p=st.sampled_from([0.0, 0.1]),
        typical_p=st.sampled_from([1.0, 0.6]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        presence_penalty=st.sampled_from([0.0, -0.5]),
        logit_bias=st.sampled_from([(), ((3, 5.0), (4, -100.0))]),
        bad_words=st.sampled_from([(), ((5,), (1, 6))]),
        min_tokens=st.sampled_from([0, 4]),
        logprobs=st.sampled_from([None, 0, 3]),
    )
    rows = data.draw(st.lists(st.tuples(params, st.integers(0, 2**63)), min_size=1, max_size=5))
    logits = random_logits(len(rows), seed=data.draw(st.integers(0, 1000)))
    sampling_rows = [SamplingRow(one, seed, 9, (1, 2, 3), (4, 4, 1)) for one, seed in rows]
    together = sample_tokens(logits, sampling_rows, EOS)
    alone = [sample_tokens(logits[row : row + 1], [one], EOS)[0] for row, one in enumerate(sampling_rows)]
    assert [one.token_id for one in together] == [one.token_id for one in alone]
    for one, other in zip(together, alone, strict=True):
        if one.logprobs is not None:
            assert other.logprobs is not None
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob)


def test_the_logits_are_not_changed() -> None:
    logits = random_logits(2)
    before = logits.clone()
    options = {"top_k": 3, "repetition_penalty": 2.0, "bad_words": ((5,),), "prompt": (1, 2), "min_tokens": 3}
    sample_tokens(logits, [sampling_row(**options), sampling_row(temperature=0.0, **options)], EOS)
    assert torch.equal(logits, before)


class TestTruncation:
    probabilities = logits_of(0.05, 0.4, 0.1, 0.25, 0.2)

    def test_top_k(self) -> None:
        assert kept(self.probabilities, top_k=2) == {1, 3}
        assert kept(self.probabilities, top_k=99) == {0, 1, 2, 3, 4}

    def test_a_nucleus_of_no_share_is_the_best_token(self) -> None:
        assert kept(self.probabilities, top_p=0.0) == {1}

    def test_min_p(self) -> None:
        assert kept(self.probabilities, min_p=0.49) == {1, 3, 4}

    def test_typical_drops_the_likeliest_token(self) -> None:
        """Entropy 1.16: 0.25 (surprise 1.39) is nearest to it, and 0.6 (0.51) farther than 0.1 (2.3) is not."""
        logits = logits_of(0.6, 0.25, 0.1, 0.05)
        surprise = -logits
        entropy = float((logits.exp() * surprise).sum())
        order = (surprise - entropy).abs().argsort().tolist()
        assert kept(logits, typical_p=0.2) == {order[0]}
        assert kept(logits, typical_p=0.26) == set(order[:2])

    def test_each_truncation_works_on_the_result_of_the_last(self) -> None:
        """Each truncation works on the tokens that the one before it kept."""
        # 0.4 and 0.25 are renormalised to 0.62 and 0.38: the first has 60 % by itself.
        assert kept(self.probabilities, top_k=2, top_p=0.6) == {1}
        # 0.4 and 0.25 have 60 % together. Of 0.62 and 0.38, the first would have it by itself.
        assert kept(self.probabilities, top_p=0.6, min_p=0.6) == {1, 3}
        # The rest next to 0.6 is too little; nearest to the entropy of all it would be 0.25.
        assert kept(logits_of(0.6, 0.25, 0.1, 0.05), min_p=0.5, typical_p=0.2) == {0}

    @settings(max_examples=50, deadline=None)
    @given(seed=st.integers(0, 10_000), top_p=st.floats(0.01, 0.99))
    def test_top_p_keeps_the_fewest_tokens(self, seed: int, top_p: float) -> None:
        logits = random_logits(1, seed)[0]
        probabilities = logits.softmax(-1).double()
        chosen = kept(logits, top_p=top_p)
        share = float(probabilities[list(chosen)].sum())
        smallest = float(probabilities[list(chosen)].min())
        assert share >= top_p - 1e-6
        assert share - smallest < top_p + 1e-6
        assert all(float(probabilities[i]) <= smallest for i in set(range(VOCAB)) - chosen)


class TestConstraints:
    def test_a_bias_beyond_the_vocabulary_is_ignored(self) -> None:
        logits = torch.tensor([2.0, 1.0, 0.0])
        assert token(logits, sampling_row(temperature=0.0, logit_bias=((0, -100.0), (9999, 100.0)))) == 1

    def test_grammar_masks_reach_every_bit(self) -> None:
        for allowed in (0, 31, 32, 49):
            mask = np.zeros(2, dtype=np.uint32)
            mask[allowed // 32] = 1 << allowed % 32
            assert token(random_logits(1)[0], sampling_row(allowed=mask.view(np.int32))) == allowed

    def test_tokens_beyond_the_mask_are_forbidden(self) -> None:
        logits = random_logits(1)[0]
        logits[40] = 100.0
        mask = np.array([-1], dtype=np.int32)
        assert token(logits, sampling_row(temperature=0.0, allowed=mask)) < 32

    def test_stops_stay_where_no_other_token_is_left(self) -> None:
        row = sampling_row(temperature=0.0, min_tokens=4, allowed_token_ids=(2,))
        assert token(random_logits(1)[0], row) == EOS[0]

    def test_no_token_left_is_of_its_row(self) -> None:
        impossible = sampling_row(allowed_token_ids=(3,), bad_words=((3,),))
        sampled = sample(random_logits(3), [sampling_row(), impossible, sampling_row()], EOS)
        sampled.check([0, 2])
        with pytest.raises(NoTokenLeft):
            sampled.check([1])


class TestLogprobs:
    def test_logprobs_are_of_the_raw_distribution(self) -> None:
        logits = random_logits(1)[0]
        want = logits.log_softmax(-1)
        one = sampling_row(temperature=0.0, logprobs=3, logit_bias=((7, 100.0),))
        (sampled,) = sample_tokens(logits[None], [one], EOS)
        assert sampled.token_id == 7
        assert sampled.logprobs is not None
        assert sampled.logprobs.logprob == pytest.approx(float(want[7]))
        assert [token_id for token_id, _ in sampled.logprobs.top] == want.topk(3).indices.tolist()
        assert [value for _, value in sampled.logprobs.top] == pytest.approx(want.topk(3).values.tolist(), abs=1e-6)

    def test_rows_ask_for_different_numbers(self) -> None:
        sampled = sample_tokens(
            random_logits(3), [sampling_row(logprobs=0), sampling_row(), sampling_row(logprobs=2)], EOS
        )
        assert [None if one.logprobs is None else len(one.logprobs.top) for one in sampled] == [0, None, 2]

    def test_given_tokens(self) -> None:
        logits = random_logits(2)
        found = token_logprobs(logits, torch.tensor([4, 5]), [0, 1]).rows()
        want = logits.log_softmax(-1)
        assert [one.logprob for one in found] == pytest.approx([float(want[0, 4]), float(want[1, 5])])


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_model_is_noticed(broken: float) -> None:
    logits = random_logits(2)
    logits[1, 3] = broken
    for temperature in (0.0, 1.0):
        sampled = sample(logits, [sampling_row(temperature=temperature)] * 2, EOS)
        sampled.check([0])
        with pytest.raises(NonFinite):
            sampled.check([1])


def test_every_sampling_param_has_an_owner() -> None:
    """Every field of SamplingParams is either the sampler's, tested here or in `test_rules.py`, or the scheduler's."""
    schedulers = {"max_tokens", "ignore_eos", "stop_token_ids", "prompt_logprobs", "grammar"}
    samplers = set(sampling_row(stop_token_ids=()).params.__struct_fields__) - schedulers
    assert samplers == {
        *("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "frequency_penalty"),
        *("presence_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "logprobs"),
    }


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    top_k=st.integers(1025, 2999),
    top_p=st.floats(0.5, 0.999999),
    typical_p=st.floats(0.1, 0.999),
    flatness=st.sampled_from([0.01, 1.0]),
)
def test_truncations_that_keep_nearly_all_equal_a_full_sort(
    seed: int, top_k: int, top_p: float, typical_p: float, flatness: float
) -> None:
    """The kept tokens are more than the candidates of the partial sort."""
    logits = random_logits(3, seed, vocab=3000) * flatness
    for one in logits:
        assert len(kept(one, top_k=top_k)) >= top_k
        descending = one.sort(descending=True).values
        assert kept(one, top_k=top_k) == set((one >= descending[top_k - 1]).nonzero().flatten().tolist())
        shares, order = one.softmax(-1).sort(descending=True)
        num_needed = int((shares.cumsum(0) - shares < torch.tensor(top_p)).sum())
        differ = list(kept(one, top_p=top_p) ^ set(order[:num_needed].tolist()))
        assert len(differ) <= 2 or one.softmax(-1)[differ].sum() < 2e-6  # ties, and where sums are rounded
        surprise = -one.log_softmax(-1)
        near = (surprise - (surprise.exp().reciprocal() * surprise).sum()).abs().argsort()
        typical = one.softmax(-1)[near]
        num_needed = int((typical.cumsum(0) - typical < torch.tensor(typical_p)).sum())
        assert len(kept(one, typical_p=typical_p) ^ set(near[:num_needed].tolist())) <= 4


def test_ranks_count_the_likelier_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 5.0, 0.0, 1.0]])
    for token_ids, ranks in (([2, 3], [3, 3]), ([1, 1], [1, 1])):
        assert [row.rank for row in token_logprobs(logits, torch.tensor(token_ids), [0, 2]).rows()] == ranks
