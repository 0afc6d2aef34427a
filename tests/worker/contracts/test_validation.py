"""Requests that a worker refuses: too large for it, or with numbers out of range."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.members import make_member
from tests.worker.scheduler.engine import generate
from worker.common.capabilities import EMBEDDINGS, TOKENS
from worker.contracts.validation import refusal
from worker.scheduler.budget import BatchLimits
from worker.wire import ChoiceState, Embed, GenerateRequest, WireError, pack_request, unpack_request


def problem(request: GenerateRequest, limits: BatchLimits, pool_tokens: int) -> str | None:
    """Send the request, and return why the worker refuses it."""
    try:
        received = unpack_request(pack_request(request))
    except WireError as error:
        return str(error)
    total = limits.max_batch_total_tokens
    refused = refusal(received, make_member(max_model_len=100), pool_tokens, 50, total)
    return None if refused is None else refused.message


def test_a_request_that_can_never_fit_is_refused() -> None:
    limits = BatchLimits()

    def message(wire, pool_tokens=80):
        return problem(wire, limits, pool_tokens)

    assert message(generate(range(40), 40)) is None
    assert "KV pool of 80" in message(generate(range(41), 40))
    assert "context of 100" in message(generate(range(41), 60), 1000)
    assert "vocabulary" in message(generate([50], 1))
    assert "prompt_ids" in message(generate([], 1))
    assert "root" in message(generate([1], 1, root=b"short"))
    assert "max_tokens" in message(generate([1], -1))
    assert "output_ids" in message(generate([1], 1, resumed={0: [1, 2]}))
    assert "vocabulary" in message(generate([1], 1, resumed={0: [50]}))
    assert "choices" in message(replace(generate([1], 1), choices=()))
    twice = (ChoiceState(3, 1), ChoiceState(3, 2))
    assert "distinct indices" in message(replace(generate([1], 1), choices=twice))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -1.0),
        ("top_p", 2.0),
        ("min_p", -0.1),
        ("typical_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 1e30),
        ("presence_penalty", float("nan")),
        ("top_k", 10**12),
        ("top_k", -1),
        ("min_tokens", -1),
        ("logprobs", 10**9),
        ("prompt_logprobs", -1),
        ("logit_bias", ((1, float("inf")),)),
        ("logit_bias", ((2**63, 1.0),)),
        ("bad_words", ((-1,),)),
        ("allowed_token_ids", (2**40,)),
        ("stop_token_ids", (-5,)),
        ("stop_token_ids", (1,) * 70_000),
        ("logit_bias", ((1, float("nan")),)),
        ("logit_bias", ((50, 1.0),)),
        ("allowed_token_ids", (3, 50)),
        ("stop_token_ids", (50,)),
        ("bad_words", ((1,) * 65_537,)),
        ("priority", 1001),
        ("deadline_s", float("nan")),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, value: object) -> None:
    request = generate([1, 2], 4)
    if name in ("priority", "deadline_s"):
        request = replace(request, **{name: value})
    else:
        request = replace(request, sampling=replace(request.sampling, **{name: value}))
    message = problem(request, BatchLimits(), 80)
    assert message is not None
    assert name in message
    assert len(message) < 200


def test_lists_are_bounded_together_and_times_the_choices() -> None:
    """A client may allow and bias the whole of a large vocabulary."""
    vocab_size = 262_144
    whole = tuple(range(vocab_size))

    def refused(n: int, num_allowed: int, num_biased: int) -> str | None:
        biases = tuple((token, 0.5) for token in whole[:num_biased])
        wire = generate([1], 4, n, logit_bias=biases, allowed_token_ids=whole[:num_allowed])
        failed = refusal(wire, make_member(), 1000, vocab_size)
        return None if failed is None else failed.message

    assert refused(128, vocab_size, vocab_size) is None
    message = refused(129, vocab_size - 1, vocab_size)
    assert message is not None
    assert message.startswith("logit_bias, allowed_token_ids: 524287 ids times n = 129 choices exceed 67108864")
    assert "lower n" in message


def test_choices_out_of_range_are_refused() -> None:
    def refused(index: int, seed: int) -> bool:
        request = replace(generate([1, 2], 4), choices=(ChoiceState(index, seed),))
        return problem(request, BatchLimits(), 80) is not None

    assert not any(refused(*choice) for choice in ((2**32 - 1, 1), (0, 2**64 - 1), (0, -(2**63))))
    assert all(refused(*choice) for choice in ((2**32, 1), (-1, 1)))


@pytest.mark.parametrize(
    ("embed", "size", "fields", "problem"),
    [
        (None, 0, {"max_tokens": 4}, None),
        (None, 64, {"max_tokens": 4}, "this worker does not serve tokens"),
        (Embed(), 0, {}, "this worker does not serve embeddings"),
        (Embed(), 64, {}, None),
        (Embed(64), 64, {}, None),
        (Embed(65), 64, {}, "dimensions"),
        (Embed(), 64, {"max_tokens": 1}, "embed"),
        (Embed(), 64, {"n": 2}, "embed"),
        (Embed(), 64, {"prompt_logprobs": 0}, "embed"),
    ],
)
def test_a_worker_does_its_own_task_alone(
    embed: Embed | None, size: int, fields: dict[str, int], problem: str | None
) -> None:
    request = replace(generate([1, 2], **{"max_tokens": 0, **fields}), embed=embed)
    member = make_member(capabilities=(EMBEDDINGS if size else TOKENS,), embedding_size=size)
    refused = refusal(request, member, 80, 50)
    assert problem == (None if refused is None else refused.message.partition(":")[0])
