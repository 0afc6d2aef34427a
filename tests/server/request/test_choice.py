"""One choice, fed with frames by hand: the text it releases, and its end."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from server.request.choice import MAX_PENDING_IDS, Choice, ChoiceDelta, GenerationSpec
from server.text.detokenizer import TextRules, TokenBytes
from worker.wire import SamplingParams, TokenLogprobs, Tokens

SPECIAL_ID = 2


@pytest.fixture(scope="module")
def token_bytes(raw_tokenizer: Tokenizer) -> TokenBytes:
    return TokenBytes(raw_tokenizer, json.loads(raw_tokenizer.to_str()))


def choice_of(token_bytes: TokenBytes, *, with_logprobs: bool = False, min_tokens: int = 0, **rules: Any) -> Choice:
    spec: Any = SimpleNamespace(
        model=SimpleNamespace(tokenizer=SimpleNamespace(token_bytes=token_bytes)),
        seeds=(5,),
        sampling=SamplingParams(max_tokens=9, min_tokens=min_tokens, logprobs=0 if with_logprobs else None),
        rules=TextRules(**rules),
        first_index=0,
        text_request=None,
    )
    return Choice(spec, 0)


@pytest.mark.parametrize(("clamps", "max_model_len", "num_tokens"), [(True, 16, 6), (True, 40, 9), (False, 16, 9)])
def test_an_answer_is_clamped_to_the_context_of_its_worker(clamps: bool, max_model_len: int, num_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=9, min_tokens=1, top_k=3)
    spec: Any = SimpleNamespace(prompt_ids=[1] * 10, clamps_max_tokens=clamps, sampling=sampling)
    assert GenerationSpec.sampling_at(spec, max_model_len) == replace(sampling, max_tokens=num_tokens)


def letter(token_bytes: TokenBytes, text: str) -> int:
    return next(id_ for id_ in range(600) if token_bytes[id_] == text.encode())


def take(choice: Choice, token_bytes: TokenBytes, text: str, *, with_logprobs: bool = False) -> bool:
    """A token a letter, in one frame."""
    ids = tuple(letter(token_bytes, one) for one in text)
    return choice.take(Tokens(0, ids, tuple(TokenLogprobs(-0.5, ()) for _ in ids) if with_logprobs else None))


def drained(choice: Choice) -> ChoiceDelta:
    delta = choice.take_delta()
    assert delta is not None
    return delta


def shown(delta: ChoiceDelta, token_bytes: TokenBytes) -> str:
    return b"".join(token_bytes[entry.token_id] for entry in delta.entries).decode()


def test_the_start_of_a_stop_string_is_released_at_the_end(token_bytes: TokenBytes) -> None:
    choice = choice_of(token_bytes, stops=("END",))
    assert not take(choice, token_bytes, "aEN")
    assert drained(choice).text == "a"
    choice.finish("length")
    last = drained(choice)
    assert (last.text, last.finish_reason, last.stop_reason) == ("EN", "length", None)
    assert choice.take_delta() is None


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, ""), (1, "a"), (2, "a"), (3, "a-b"), (4, "a-b-c"), (6, "a-b-c-d")]
)
def test_a_stop_string_ends_no_answer_before_min_tokens(token_bytes: TokenBytes, min_tokens: int, text: str) -> None:
    choice = choice_of(token_bytes, min_tokens=min_tokens, stops=("a", "-b", "-", "-cd"))
    for one in "a-b-c-d":
        if take(choice, token_bytes, one):
            break
    assert len(choice.output_ids) > min_tokens
    choice.finish("length")
    assert drained(choice).text == text


def test_log_probabilities_come_with_the_text_of_their_tokens(token_bytes: TokenBytes) -> None:
    choice = choice_of(token_bytes, stops=("END",), with_logprobs=True)
    take(choice, token_bytes, "aEN", with_logprobs=True)
    assert shown(drained(choice), token_bytes) == "a"
    take(choice, token_bytes, "b", with_logprobs=True)
    assert shown(drained(choice), token_bytes) == "ENb"
    take(choice, token_bytes, "E", with_logprobs=True)
    choice.finish("length")
    assert shown(drained(choice), token_bytes) == "E"


def test_tokens_of_a_stop_string_have_no_log_probabilities(token_bytes: TokenBytes) -> None:
    choice = choice_of(token_bytes, stops=("END",), with_logprobs=True)
    assert take(choice, token_bytes, "aENDb", with_logprobs=True)
    delta = drained(choice)
    assert (delta.text, shown(delta, token_bytes)) == ("a", "a")
    assert (delta.finish_reason, delta.stop_reason) == ("stop", "END")
    assert len(choice.output_ids) == 4, "what follows the stop string is not taken"


def test_a_stop_token_is_named_unless_it_is_the_models_own(token_bytes: TokenBytes) -> None:
    own, asked_for = choice_of(token_bytes), choice_of(token_bytes)
    own.finish("stop", SPECIAL_ID)
    asked_for.finish("stop", letter(token_bytes, "b"))
    assert [drained(choice).stop_reason for choice in (own, asked_for)] == [None, letter(token_bytes, "b")]


def test_an_answer_is_complete_without_its_last_frame(token_bytes: TokenBytes) -> None:
    """A worker may be lost between its last Tokens frame and its Finished frame."""
    choice = choice_of(token_bytes, terminal_ids=frozenset({SPECIAL_ID}))
    take(choice, token_bytes, "ab")
    choice.finish_if_complete(max_tokens=3)
    assert not choice.done
    choice.finish_if_complete(max_tokens=2)
    assert choice.finish_reason == "length"
    choice.reset()
    choice.take(Tokens(0, (letter(token_bytes, "a"), SPECIAL_ID)))
    choice.finish_if_complete(max_tokens=2)
    assert choice.finish_reason == "stop", "its own end, and the limit at once"


def test_text_is_decoded_in_bounded_parts_and_drained_in_one(token_bytes: TokenBytes) -> None:
    choice = choice_of(token_bytes)
    for _ in range(3 * MAX_PENDING_IDS):
        take(choice, token_bytes, "ab")
        assert len(choice.output_ids) - choice._num_decoded <= MAX_PENDING_IDS
    delta = drained(choice)
    assert delta.text == "ab" * 3 * MAX_PENDING_IDS
    assert delta.token_ids == choice.output_ids
