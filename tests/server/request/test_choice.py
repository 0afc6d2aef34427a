"""One choice, fed with frames by hand: what it releases, when, and how it ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from server.request.choice import Choice, ChoiceDelta, merged
from server.text.detokenizer import TextRules, TokenBytes
from worker.wire import Finished, Frame, TokenLogprobs, Tokens

SPECIAL_ID = 2


@pytest.fixture(scope="module")
def pieces(raw_tokenizer: Tokenizer) -> TokenBytes:
    return TokenBytes(raw_tokenizer, json.loads(raw_tokenizer.to_str()))


def choice_of(pieces: TokenBytes, *, with_logprobs: bool = False, **rules: Any) -> Choice:
    return Choice(0, 5, pieces, TextRules(**rules), with_logprobs=with_logprobs)


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


def test_frames_are_merged_within_a_choice_and_keep_their_order() -> None:
    entry = (TokenLogprobs(-0.5, ()),)
    frames: list[Frame] = [
        *(Tokens(0, (1,)), Tokens(0, (2,)), Tokens(1, (3,)), Tokens(1, (4, 5))),
        *(Finished(1, "length"), Tokens(0, (6,)), Tokens(0, (7,), entry), Tokens(0, (8,))),
    ]
    assert list(merged(frames)) == [
        *(Tokens(0, (1, 2)), Tokens(1, (3, 4, 5))),
        *(Finished(1, "length"), Tokens(0, (6,)), Tokens(0, (7,), entry), Tokens(0, (8,))),
    ]
