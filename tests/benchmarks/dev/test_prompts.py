"""The bench of long prompts: its conversations have the size that they are named after."""

from __future__ import annotations

import json

import pytest

from benchmarks.dev.gateway_load.processes import MODEL, make_bundle
from benchmarks.dev.gateway_load.traffic import Traffic
from benchmarks.dev.prompts import SIZES, conversation


@pytest.mark.parametrize("num_tokens", SIZES[:2])
def test_a_conversation_has_its_size_and_ends_with_the_user(num_tokens: int) -> None:
    _, tokenizer = make_bundle()
    messages = conversation(Traffic(MODEL, tokenizer), num_tokens)
    found = sum(len(tokenizer.encode(message["content"]).ids) for message in messages)
    assert 0.9 * num_tokens <= found <= 1.1 * num_tokens
    assert [message["role"] for message in messages[-2:]] == ["assistant", "user"]
    assert len({json.dumps(message) for message in messages}) == len(messages), "no message twice"
