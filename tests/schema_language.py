"""The language of a JSON Schema's grammar, byte by byte: which texts it takes, and texts drawn from it."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from worker.engine.grammar import to_llguidance
from worker.wire import Grammar

_EOS = 256


class _Bytes:
    eos_token_id = _EOS
    bos_token_id = None
    tokens = [bytes([value]) for value in range(256)] + [b"<eos>"]
    special_token_ids = [_EOS]  # noqa: RUF012

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def matcher(grammar: Grammar) -> LLMatcher:
    """Return the compiled grammar. A failure fails the test."""
    compiled = LLMatcher(tokenizer(), to_llguidance(grammar), log_level=0)
    assert not compiled.is_error(), (compiled.get_error(), grammar.text)
    return compiled


def takes(start: LLMatcher, text: str) -> bool:
    """Return whether a text, with its end, is in the language."""
    ids = [*text.encode(), _EOS]
    return bool(start.deep_copy().validate_tokens(ids) == len(ids))


def drawn(start: LLMatcher, seed: int, max_bytes: int = 400) -> str | None:
    """Return a text of the language that ends as soon as it may; None: it grew too long."""
    chooser, state, text = random.Random(seed), start.deep_copy(), bytearray()
    while len(text) < max_bytes:
        bits = np.unpackbits(np.frombuffer(state.compute_bitmask(), np.uint8), bitorder="little")
        ids = np.flatnonzero(bits[: _EOS + 1]).tolist()
        assert ids, text
        if _EOS in ids:
            return text.decode()
        plain = [id_ for id_ in ids if 32 < id_ < 127] or ids
        closing = [id_ for id_ in plain if chr(id_) in '"}]'] if chooser.random() < 0.5 else []
        id_ = chooser.choice(closing or plain)
        state.consume_token(id_)
        text.append(id_)
        if state.is_stopped():
            return text.decode()
    return None


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
