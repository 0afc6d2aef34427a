"""Requests of the gateway's bench: prompts of a given length in tokens, each with another text."""

from __future__ import annotations

import json
import random
from typing import Any, Final

from tokenizers import Tokenizer

_TEXT: Final = """
the flight from London to Boston leaves at noon and my booking has two bags which I would like to change because
of an error in the name please check what the policy states about refunds for a cancelled reservation
"""
_WORDS: Final = _TEXT.split()


class Traffic:
    def __init__(self, model: str, tokenizer: Tokenizer, seed: int = 0) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._random = random.Random(seed)

    def text(self, num_tokens: int) -> str:
        words = [f"Request {self._random.randrange(10**9)}:"]
        words += self._random.choices(_WORDS, k=max(0, num_tokens - 8))
        ids = self._tokenizer.encode(" ".join(words), add_special_tokens=False).ids[:num_tokens]
        return self._tokenizer.decode(ids)

    def chat(self, num_tokens: int, *, max_tokens: int = 16, stream: bool = False, greedy: bool = False) -> bytes:
        """Return the body of a chat. `greedy`: with a temperature of 0."""
        sampling = {"temperature": 0} if greedy else {}
        return self._body([{"role": "user", "content": self.text(num_tokens)}], max_tokens, stream, **sampling)

    def two_turns(self, num_tokens: int, *, max_tokens: int = 16) -> tuple[bytes, bytes]:
        """A conversation's first turn, and the second that grows from it to about `num_tokens`."""
        messages = [{"role": "user", "content": self.text(num_tokens - 150)}]
        first = self._body(messages, max_tokens, False)
        messages += [
            {"role": "assistant", "content": " the" * max_tokens},
            {"role": "user", "content": self.text(100)},
        ]
        return first, self._body(messages, max_tokens, False)

    def _body(self, messages: list[dict[str, str]], max_tokens: int, stream: bool, **sampling: float) -> bytes:
        body: dict[str, Any] = {"model": self._model, "messages": messages, "max_tokens": max_tokens} | sampling
        if stream:
            body["stream"] = True
        return json.dumps(body).encode()
