"""One choice, fed with frames by hand: what it releases, when, and how it ends."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from server.request.choice import MAX_PENDING_IDS, Choice, ChoiceDelta
from server.text.detokenizer import TextRules, TokenBytes
from worker.wire import Finished, SamplingParams, TokenLogprobs, Tokens

SPECIAL_ID = 2


@pytest.fixture(scope="module")
def pieces(raw_tokenizer: Tokenizer) -> TokenBytes:
    return TokenBytes(raw_tokenizer, json.loads(raw_tokenizer.to_str()))


def choice_of(pieces: TokenBytes, *, with_logprobs: bool = False, **rules: Any) -> Choice:
    spec: Any = SimpleNamespace(
        model=SimpleNamespace(tokenizer=SimpleNamespace(token_bytes=pieces)),
        seeds=(5,),
        sampling=SamplingParams(max_tokens=9, logprobs=0 if with_logprobs else None),
        rules=TextRules(**rules),
        first_index=0,
    )
    return Choice(spec, 0)


def letter(pieces: TokenBytes, text: str) -> int:
    return next(id_ for id_ in range(600) if pieces[id_] == text.encode())


def take(choice: Choice, pieces: TokenBytes, text: str, *, with_logprobs: bool = False) -> bool:
    """A token a letter, in one frame."""
    ids = tuple(letter(pieces, one) for one in text)
    return choice.take(Tokens(0, ids, tuple(TokenLogprobs(-0.5, ()) for _ in ids) if with_logprobs else None))


def drained(choice: Choice) -> ChoiceDelta:
    delta = choice.drain()
    assert delta is not None
    return delta


def shown(delta: ChoiceDelta, pieces: TokenBytes) -> str:
    return b"".join(pieces[entry.token_id] for entry in delta.entries).decode()


def test_what_may_begin_a_stop_string_comes_with_the_end_at_the_latest(pieces: TokenBytes) -> None:
    choice = choice_of(pieces, stops=("END",))
    assert not take(choice, pieces, "aEN")
    assert drained(choice).text == "a"
    choice.finish(Finished(0, "length"))
    last = drained(choice)
    assert (last.text, last.finish_reason, last.stop_reason) == ("EN", "length", None)
    assert choice.drain() is None


def test_log_probabilities_come_with_the_text_of_their_tokens(pieces: TokenBytes) -> None:
    choice = choice_of(pieces, stops=("END",), with_logprobs=True)
    take(choice, pieces, "aEN", with_logprobs=True)
    assert shown(drained(choice), pieces) == "a"
    take(choice, pieces, "b", with_logprobs=True)
    assert shown(drained(choice), pieces) == "ENb"
    take(choice, pieces, "E", with_logprobs=True)
    choice.finish(Finished(0, "length"))
    assert shown(drained(choice), pieces) == "E"


def test_tokens_of_a_stop_string_have_no_log_probabilities(pieces: TokenBytes) -> None:
    choice = choice_of(pieces, stops=("END",), with_logprobs=True)
    assert take(choice, pieces, "aENDb", with_logprobs=True)
    delta = drained(choice)
    assert (delta.text, shown(delta, pieces)) == ("a", "a")
    assert (delta.finish_reason, delta.stop_reason) == ("stop", "END")
    assert len(choice.output_ids) == 4, "what follows the stop string is not taken"


def test_a_stop_token_is_named_unless_it_is_the_models_own(pieces: TokenBytes) -> None:
    own, asked_for = choice_of(pieces), choice_of(pieces)
    own.finish(Finished(0, "stop", SPECIAL_ID))
    asked_for.finish(Finished(0, "stop", letter(pieces, "b")))
    assert [drained(choice).stop_reason for choice in (own, asked_for)] == [None, letter(pieces, "b")]


def test_an_answer_is_complete_without_its_last_frame(pieces: TokenBytes) -> None:
    """Its worker may be lost between the last token and the word that it was the last."""
    choice = choice_of(pieces, terminal_ids=frozenset({SPECIAL_ID}))
    take(choice, pieces, "ab")
    choice.finish_if_complete(max_tokens=3)
    assert not choice.done
    choice.finish_if_complete(max_tokens=2)
    assert choice.finish_reason == "length"
    choice.reset()
    choice.take(Tokens(0, (letter(pieces, "a"), SPECIAL_ID)))
    choice.finish_if_complete(max_tokens=2)
    assert choice.finish_reason == "stop", "its own end, and the limit at once"


def test_text_is_decoded_in_bounded_parts_and_drained_in_one(pieces: TokenBytes) -> None:
    choice = choice_of(pieces)
    for _ in range(3 * MAX_PENDING_IDS):
        take(choice, pieces, "ab")
        assert len(choice._pending_ids) <= MAX_PENDING_IDS
    delta = drained(choice)
    assert delta.text == "ab" * 3 * MAX_PENDING_IDS
    assert delta.token_ids == choice.output_ids
