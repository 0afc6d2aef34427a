"""Mutated bodies: whatever comes, no 5xx, and every refusal is a four-key object."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from server.schema import requests
from server.schema.requests import ChatRequest, CompletionRequest
from tests.server.api.test_tools import WEATHER
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from worker.wire import TokenizerBundle

JSON = {"content-type": "application/json"}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "n"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ],
    "tools": [WEATHER],
    "tool_choice": "auto",
    "logit_bias": {"5": 1.0},
    "stop": ["a", "b"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 5,
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "temperature": 0.5,
    "seed": 1,
    "metadata": {"a": "b"},
    "bad_words": ["x"],
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
}
COMPLETION: dict[str, Any] = {
    "model": "tiny",
    "prompt": ["one", "two"],
    "echo": True,
    "logprobs": 2,
    "max_tokens": 4,
    "best_of": 2,
    "n": 1,
    "stop": "x",
    "stop_token_ids": [5],
    "structured_outputs": {"choice": ["a"]},
    "min_tokens": 1,
}
CHAT_FIELDS = [*ChatRequest.__struct_fields__, *requests.CHAT.refused]
COMPLETION_FIELDS = [*CompletionRequest.__struct_fields__, *requests.COMPLETION.refused]
Base = tuple[str, dict[str, Any], list[str]]
"""A route, a valid body, and the fields of the route."""
BASES: list[Base] = [
    ("/v1/chat/completions", CHAT, CHAT_FIELDS),
    ("/v1/completions", COMPLETION, COMPLETION_FIELDS),
]
RAW = [
    "NaN",
    "-Infinity",
    "1e309",
    "-1e309",
    "1" + "0" * 400,
    '"\\ud800"',
    '"\\udfff\\ud800"',
    "[" * 200 + "]" * 200,
    "1.0",
    "-0.0",
]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63) - 1,
    2**64,
    0.5,
    -3.5,
    1e300,
    "",
    "x",
    "1",
    "\0",
    "🎉" * 50,
    "<|im_end|>",
    [],
    [None],
    [[]],
    [1],
    ["x"],
    {},
    {"a": None},
    {"type": "function"},
    {"type": "json_object"},
    {"regex": "(a*)*"},
    [[[[1]]]],
]


class Mutations:
    def __init__(self, seed: int, bases: list[Base] = BASES) -> None:
        self._bases = bases
        self._random = random.Random(seed)
        self._raw: dict[str, str] = {}

    def body(self) -> tuple[str, bytes]:
        rng = self._random
        path, base, fields = rng.choice(self._bases)
        body = json.loads(json.dumps(base))
        self._raw = {}
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.4:
                body[rng.choice(fields)] = self._value()
            else:
                self._mutate(body)
        text = json.dumps(body)
        for mark, raw in self._raw.items():
            text = text.replace(f'"{mark}"', raw)
        data = text.encode()
        if rng.random() < 0.05:
            cut = rng.randrange(len(data))
            data = (
                data[:cut]
                + bytes(rng.randrange(256) for _ in range(rng.randint(0, 3)))
                + data[cut + rng.randint(0, 5) :]
            )
        return path, data

    def _mutate(self, node: Any) -> None:
        rng = self._random
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                return
            key = rng.choice(keys)
            child = node[key]
            if isinstance(child, dict | list) and child and rng.random() < 0.7:
                node = child
                continue
            match rng.randrange(4):
                case 0:
                    del node[key]
                case 1 if isinstance(node, dict):
                    node[self._text()] = copy.deepcopy(child)
                case _:
                    node[key] = copy.deepcopy(self._value())  # its parts may stand elsewhere in the body
            return

    def _value(self) -> Any:
        rng = self._random
        if rng.random() < 0.2:
            mark = f"@@{len(self._raw)}@@"
            self._raw[mark] = rng.choice(RAW)
            return mark
        return self._text() if rng.random() < 0.1 else rng.choice(VALUES)

    def _text(self) -> str:
        return "".join(chr(self._random.choice([0, 9, 10, 32, 65, 0xE9, 0x4F60, 0x1F389, 0xFFFF])) for _ in range(5))


def check_answer(status: int, raw: bytes, data: bytes) -> bool:
    """Return whether the body was answered; a refusal has to be a 4xx with four keys."""
    assert status < 500, (data, raw)
    if status == 200:
        assert b'"error"' not in raw, (data, raw)
        return True
    error = json.loads(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"}, data
    assert error["type"] == "invalid_request_error", data
    return False


@pytest.mark.parametrize(("num_bodies", "seed"), [(600, 1), pytest.param(5000, 2, marks=pytest.mark.deep)])
async def test_mutated_bodies(bundle: TokenizerBundle, raw_tokenizer: Tokenizer, num_bodies: int, seed: int) -> None:
    worker = ScriptedWorker(bundle, reply=raw_tokenizer.encode('{"a": 1} and more text').ids)
    mutations = Mutations(seed)
    num_ok = 0
    async with gateway(worker) as target, aiohttp.ClientSession() as session:
        for _ in range(num_bodies):
            path, data = mutations.body()
            async with session.post(target.url + path, data=data, headers=JSON) as response:
                num_ok += check_answer(response.status, await response.read(), data)
    assert num_bodies / 50 < num_ok < num_bodies, "the mutations neither break everything nor nothing"
