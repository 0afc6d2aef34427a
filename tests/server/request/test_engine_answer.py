"""Events of plain content are edited as bytes: the client gets what parsing them would give."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from server.request.choice import ChoiceDelta, EngineTextRequest
from server.request.engine_answer import EngineAnswer
from server.workers.connection import WorkerLost
from worker.common.capabilities import CHAT
from worker.wire import EngineCall

PIECES = [b" the", b"\xc3", b"\xa9", b'"', b"\\", b"\n", b"", b" a"]


class Tokens:
    token_bytes = PIECES


class ParsedAnswer(EngineAnswer):
    """Parses each event."""

    def _take_plain(self, data: bytes, ids: Sequence[int]) -> bool:
        return False


def answers(*, is_read: bool, shows_ids: bool) -> tuple[EngineAnswer, EngineAnswer]:
    request = EngineTextRequest(
        call=EngineCall(CHAT, b"{}", streams=True),
        is_read=is_read,
        head={"id": Raw(b'"own"'), "model": Raw(b'"m"')},
        shows_usage=False,
        has_usage=True,
        shows_ids=shows_ids,
        is_resumable=True,
    )
    tokenizer: Any = Tokens()
    return EngineAnswer(request, tokenizer), ParsedAnswer(request, tokenizer)


texts = st.text(max_size=6) | st.sampled_from(['"', "\\", '","content":"', '"token_ids":[1]', "\u2028", "é", '"delta"'])
choices = st.fixed_dictionaries(
    {
        "index": st.just(0),
        "delta": st.fixed_dictionaries({}, optional={"content": texts, "role": st.just("assistant")}),
    },
    optional={
        "logprobs": st.none(),
        "finish_reason": st.sampled_from([None, None, None, "stop"]),
        "token_ids": st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=5),
        "delta_": st.none(),
    },
)
events = st.fixed_dictionaries(
    {"id": st.sampled_from(["a", "a", "b"]), "choices": st.lists(choices, min_size=1, max_size=1)},
    optional={"created": st.integers(1, 2), "usage": st.none(), "token_ids": st.just([1])},
)


@given(
    stream=st.lists(st.tuples(events, st.booleans()), max_size=12),
    is_read=st.booleans(),
    shows_ids=st.booleans(),
    is_compact=st.booleans(),
    lost_at=st.integers(0, 20),
)
def test_bytes_and_parsing_are_equal(
    stream: list[tuple[dict[str, Any], bool]], is_read: bool, shows_ids: bool, is_compact: bool, lost_at: int
) -> None:
    edited, parsed = answers(is_read=is_read, shows_ids=shows_ids)
    ids: list[int] = []
    for number, (event, is_ascii) in enumerate(stream):
        separators = (",", ":") if is_compact else None
        data = json.dumps(event, separators=separators, ensure_ascii=is_ascii).encode()
        ids += event["choices"][0].get("token_ids") or ()
        for answer in (edited, parsed):
            if number == lost_at:
                answer._is_rest = True
                answer._shape = None
            answer.take(data, ids)
        assert list(map(shown, edited.take_deltas())) == list(map(shown, parsed.take_deltas()))
        for name in ("_is_plain", "_shows_all", "_num_shown_ids", "num_output_tokens"):
            assert getattr(edited, name) == getattr(parsed, name)


@given(tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=12), cuts=st.sets(st.integers(1, 12)))
def test_events_of_several_tokens_can_go_on_too(tokens: list[int], cuts: set[int]) -> None:
    """Whatever was sent ends with a token, or the answer cannot go on."""
    answer, _ = answers(is_read=False, shows_ids=False)
    decoder, sent, held = codecs.getincrementaldecoder("utf-8")("replace"), "", 0
    for number in range(1, len(tokens) + 1):
        if number not in cuts and number > 1:
            continue
        content = decoder.decode(b"".join(PIECES[each] for each in tokens[held:number]))
        choice = {"index": 0, "delta": {"content": content}, "token_ids": tokens[held:number]}
        answer.take(json.dumps({"id": "x", "choices": [choice]}).encode(), tokens[:number])
        sent, held = sent + content, number
        if answer._shows_all and "\ufffd" not in sent:
            shown_ids = tokens[: answer._num_shown_ids]
            assert b"".join(PIECES[each] for each in shown_ids) == sent.encode()


def test_a_half_character_does_not_keep_back_the_rest() -> None:
    answer, _ = answers(is_read=False, shows_ids=False)
    choice = {"index": 0, "delta": {"content": " the a"}, "token_ids": [0, 7, 1]}
    answer.take(json.dumps({"id": "x", "choices": [choice]}).encode(), [0, 7, 1])
    assert (answer._shows_all, answer._num_shown_ids) == (True, 2)


def shown(delta: ChoiceDelta) -> tuple[Any, ...]:
    return delta.event, [*delta.parts], delta.finish_reason, delta.stop_reason, [*delta.logprobs], [*delta.call_ids]


@pytest.mark.parametrize("is_read", [False, True])
def test_the_second_event_is_not_parsed(is_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, _ = answers(is_read=is_read, shows_ids=False)
    event = b'{"id":"x","choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null,"token_ids":[%d]}]}'
    answer.take(event % (b"a", 0), [0])
    monkeypatch.delattr(EngineAnswer, "_take")
    answer.take(event % (b'\\"b', 1), [0, 1])
    last = answer.take_deltas()[-1]
    if is_read:
        assert last.parts[-1].text == '"b'
    else:
        assert json.loads(last.event)["choices"][0] == {
            "index": 0, "delta": {"content": '"b'}, "finish_reason": None, "token_ids": None,
        }  # fmt: skip


@pytest.mark.parametrize("content", [b'"a', b'"a\\"', b'"a" "b"', b'"a","b":"c"', b"1", b'"\xff"'])
def test_what_is_no_string_is_parsed(content: bytes) -> None:
    answer, _ = answers(is_read=False, shows_ids=False)
    event = b'{"id":"x","choices":[{"index":0,"delta":{"content":%b},"finish_reason":null,"token_ids":[%d]}]}'
    answer.take(event % (b'"a"', 0), [0])
    assert not answer._take_plain(event % (content, 1), [0, 1])
    if content != b'"a","b":"c"':
        with pytest.raises(WorkerLost):
            answer.take(event % (content, 1), [0, 1])
