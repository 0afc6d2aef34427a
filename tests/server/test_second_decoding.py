"""Texts inside texts, foreign types and broken bytes: each body is answered, or refused in its API's own shape.

A walk over the types of the bodies finds the fields, so that a new one is tried too.
"""

from __future__ import annotations

import json
import random
from typing import Any, Final

import msgspec
import pytest
from tokenizers import Tokenizer

from server.api.embeddings import EmbeddingRequest
from server.schema.messages import CountTokensRequest, MessagesRequest
from server.schema.requests import ChatRequest, CompletionRequest, ResponsesRequest
from tests.server.conftest import bundle_of
from tests.server.gateway_app import gateway
from tests.server.messages_grammar import check_error
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import post

KINDS: Final[dict[str, Any]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": ChatRequest,
}
USER: Final = [{"role": "user", "content": "x"}]
BASES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/embeddings": {"input": "x"},
    "/tokenize": {"messages": USER},
}
HALVES: Final = (r"\ud83d", r"\ude00", r"\ud83d\u0041", r"\ud83d\ude00", r"\\ud83d")
TEXTS: Final = (
    *(f'{{"a": "{half}"}}' for half in HALVES),
    *(f'{{"type": "object", "properties": {{"{half}": {{"const": "{half}"}}}}}}' for half in HALVES),
    *(f'"{half}"' for half in HALVES),
    *HALVES,
    *(
        '{"city": "Os',
        "[1, 2]",
        "null",
        "5",
        '"text"',
        "true",
        "",
        "{}",
        '{"a": NaN}',
        "1e999",
        "[" * 120,
        '{"a":' * 120,
    ),
)
VALUES: Final = (
    None,
    True,
    0,
    -1,
    2.5,
    "x",
    [],
    {},
    [None],
    [{}],
    {"a": None},
    [[1]],
    {"type": 5},
    "\ud83d",
    {"\ud83d": 1},
)
WORDS: Final[dict[str, tuple[Any, ...]]] = {
    "role": ("user", "assistant", "tool", "system"),
    "type": (
        *("function", "custom", "text", "tool_use", "tool_result", "thinking", "function_call", "message", "reasoning"),
        *("function_call_output", "custom_tool_call", "json_schema", "namespace", "grammar", "local_shell_call"),
    ),
    "name": ("f",),
    "id": ("call00001",),
    "call_id": ("call00001",),
    "tool_call_id": ("call00001",),
    "tool_use_id": ("call00001",),
    "arguments": TEXTS,
}


def made(kind: Any, name: str, choose: random.Random, depth: int = 0) -> Any:
    """Return a value of a type, or now and then of another one."""
    if choose.random() < 0.06:
        return choose.choice(VALUES)
    if name in WORDS and choose.random() < 0.8:
        return choose.choice(WORDS[name])
    if isinstance(kind, msgspec.inspect.UnionType):
        options = [each for each in kind.types if not isinstance(each, msgspec.inspect.NoneType)]
        return made(choose.choice(options), name, choose, depth)
    match type(kind).__name__:
        case "StructType":
            fields = [each for each in kind.fields if each.required or choose.random() < (0.4 if depth < 4 else 0.1)]
            return {each.encode_name: made(each.type, each.name, choose, depth + 1) for each in fields}
        case "ListType":
            num_items = choose.randint(1, 3) if depth < 6 else 0
            return [made(kind.item_type, name, choose, depth + 1) for _ in range(num_items)]
        case "DictType" | "AnyType" | "RawType":
            return choose.choice(
                (json.loads('{"type": "object", "properties": {"a": {"type": "string"}}}'), *TEXTS, *VALUES)
            )
        case "LiteralType":
            return choose.choice(kind.values)
        case "StrType":
            return choose.choice(TEXTS)
        case "BoolType":
            return choose.random() < 0.5
        case "IntType" | "FloatType":
            return choose.choice((0, 1, 2, 0.5))
    return choose.choice(VALUES)


def check_answer(status: int, raw: bytes, data: bytes) -> None:
    """A refusal has to be a 4xx with four keys."""
    assert status < 500, (data, raw)
    error = {} if status == 200 else json.loads(raw)["error"]
    assert status != 200 or b'"error":{' not in raw, (data, raw)
    assert not error or set(error) == {"message", "type", "param", "code"}, data
    assert error.get("type", "invalid_request_error") == "invalid_request_error", data


@pytest.mark.parametrize("num_bodies", [350, pytest.param(2800, marks=pytest.mark.deep)])
async def test_no_body_is_a_server_error(num_bodies: int, raw_tokenizer: Tokenizer) -> None:
    choose = random.Random(num_bodies)
    worker = ScriptedWorker(bundle_of(raw_tokenizer), reply=[50, 51])
    statuses: dict[int, int] = {}
    async with gateway(worker, tool_parser="hermes") as running:
        for number in range(num_bodies):
            path = list(KINDS)[number % len(KINDS)]
            fields = msgspec.inspect.type_info(KINDS[path]).fields  # type: ignore[attr-defined]
            chosen = choose.sample([each for each in fields if each.name not in ("model", "n", "best_of")], 2)
            body = BASES[path] | {each.encode_name: made(each.type, each.name, choose) for each in chosen}
            data = json.dumps({"model": "tiny", **body}).encode()
            if choose.random() < 0.05:
                at = choose.randrange(len(data))
                data = data[:at] + choose.randbytes(choose.randint(0, 3)) + data[at + choose.randint(0, 5) :]
            status, headers, raw = await post(running.url, data, path)
            statuses[status] = statuses.get(status, 0) + 1
            if status != 200 and path.startswith("/v1/messages"):
                kinds = ("not_found_error" if status == 404 else "invalid_request_error",)
                assert check_error(raw, headers)["type"] in kinds, (data, raw)
            elif not path.startswith("/v1/messages"):
                check_answer(status, raw, data)
    assert statuses[200] > num_bodies // 20, statuses
