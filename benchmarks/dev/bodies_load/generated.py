"""Bodies of every route: one text, or one field, grown far beyond use. Equal seeds give equal bodies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Final

MODEL: Final = "bench"
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
EMBEDDINGS: Final = "/v1/embeddings"
TOKENIZE: Final = "/tokenize"
MIN_BYTES: Final = 1 << 12
MAX_BYTES: Final = 31 << 20

UNITS: Final[dict[str, tuple[str, ...]]] = {
    "control tokens": ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "a<|im_end|> "),
    "near tokens": ("<|", "<", "<|im_", "< ", "</think>", "<think>", "<|im_</think>end|>"),
    "spaces": (" ", "\\n", "\\t", "  a", "\\u2003"),
    "no spaces": ("a", "zyqxv", "=", "0", ".,", "_a", "#!"),
    "words": ("zyqxv ", "The quick brown fox jumps. ", "so ", " a-b", "x\\n"),
    "escapes": ("\\u00e9", "\\u0061", "\\ud83d\\ude00", '\\"[{\\\\', "\\u0001", "\\/"),
    "wide": ("\N{PARTY POPPER}", "\N{CJK UNIFIED IDEOGRAPH-4E2D}", "\N{LATIN SMALL LETTER E WITH ACUTE}"),
    "combining": ("e\N{COMBINING ACUTE ACCENT}", "\N{COMBINING ACUTE ACCENT}", "\N{HANGUL CHOSEONG KIYEOK}"),
}
"""JSON text, by kind."""
WIDENING: Final = ("", "", "\N{PARTY POPPER}", "\N{CJK UNIFIED IDEOGRAPH-4E2D}", "\N{LATIN SMALL LETTER E WITH ACUTE}")
"""One such character makes every other one of its text take as many bytes."""
_HOLE: Final = "@hole@"


@dataclass(frozen=True, slots=True)
class Body:
    kind: str
    """The kinds of its text and of the field that holds it."""
    path: str
    data: bytes


def bodies(seed: int, count: int, max_bytes: int = MAX_BYTES) -> Iterator[Body]:
    """Yield `count` bodies of 4 KiB to `max_bytes`, small ones as often as large ones."""
    rng = Random(seed)
    for _ in range(count):
        size = int(MIN_BYTES * (max_bytes / MIN_BYTES) ** rng.random())
        text_kind, units = rng.choice(list(UNITS.items()))
        path, name, shape = rng.choice(SHAPES)
        fields = {"model": MODEL, **shape(rng, size)}
        if path not in (EMBEDDINGS, TOKENIZE) and rng.random() < 0.2:
            fields["stream"] = True
        written = json.dumps(fields)
        holes = written.count(_HOLE)
        if holes:
            text = _text(rng, units, max(1, (size - len(written)) // holes))
            data = written.replace(_HOLE, text).encode()
        else:
            text_kind, data = "structure", written.encode()
        yield Body(f"{text_kind} in {name}", path, data)


def _text(rng: Random, units: tuple[str, ...], size: int) -> str:
    """Return JSON text of about `size` bytes."""
    if size > 1 << 16 and rng.random() < 0.2:  # not one unit again and again
        unit = "".join(rng.choice(units) for _ in range(1000))
    else:
        unit = rng.choice(units)
    return unit * max(1, size // len(unit.encode())) + rng.choice(WIDENING)


def _chat(name: str, make: Callable[[Random, int], dict[str, Any]], path: str = CHAT) -> Any:
    def shape(rng: Random, size: int) -> dict[str, Any]:
        fields = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        fields |= make(rng, size)
        if path == COUNT_TOKENS:
            del fields["max_tokens"]
        return fields

    return path, name, shape


def _many(size: int, item: Any, most: int = 60_000) -> list[Any]:
    return [item] * max(1, min(most, size // (len(json.dumps(item)) + 2)))


def _shared(rng: Random, size: int, each: int = 4096) -> int:
    """Return a number of texts to share the size among."""
    return max(1, min(rng.choice((2, 16, 200, 1000)), size // each))


def _nested(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}}
    return inner


def _function(parameters: Any, description: str = "d") -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": description, "parameters": parameters}}


def _said(content: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def _call(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


_WIDE_SCHEMA: Final = {"type": "object", "properties": {f"field{number}": {"type": "string"} for number in range(500)}}
SHAPES: Final[list[tuple[str, str, Callable[[Random, int], dict[str, Any]]]]] = [
    *[_chat("a message", lambda rng, size: {"messages": [_said(_HOLE)]}, path) for path in (CHAT, CHAT, MESSAGES)],
    _chat("messages", lambda rng, size: {"messages": [_said(_HOLE), _said(_HOLE, "assistant")] * _shared(rng, size)}),
    _chat("small messages", lambda rng, size: {"messages": _many(size, _said("a"))}),
    _chat("parts", lambda rng, size: {"messages": [_said([{"type": "text", "text": _HOLE}] * _shared(rng, size))]}),
    _chat("small parts", lambda rng, size: {"messages": [_said(_many(size, {"type": "text", "text": "a<"}))]}),
    _chat(
        "an image",
        lambda rng, size: {"messages": [_said([{"type": "image_url", "image_url": {"url": f"data:{_HOLE}"}}])]},
    ),
    _chat("a thought", lambda rng, size: {"messages": [_said("a", "assistant", reasoning_content=_HOLE), _said("go")]}),
    _chat(
        "arguments",
        lambda rng, size: {
            "messages": [
                _said("a", "assistant", tool_calls=[_call(json.dumps({"a": _HOLE}).replace('"', "'"))]),
                _said(_HOLE, "tool", tool_call_id="c"),
            ]
        },
    ),
    _chat(
        "values of arguments",
        lambda rng, size: {"messages": [_said("a", "assistant", tool_calls=[_call(json.dumps(_many(size, [1])))])]},
    ),
    _chat("a tool", lambda rng, size: {"tools": [_function({"type": "object"}, _HOLE)]}),
    _chat("tools", lambda rng, size: {"tools": _many(size, _function(_WIDE_SCHEMA), 128)}),
    _chat("a deep schema", lambda rng, size: {"tools": [_function(_nested(rng.randint(1, 40), {"enum": [_HOLE]}))]}),
    _chat(
        "response_format",
        lambda rng, size: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": _nested(rng.randint(1, 25), {"enum": [_HOLE]})},
            }
        },
    ),
    _chat("grammar", lambda rng, size: {"structured_outputs": {rng.choice(("grammar", "regex")): _HOLE}}),
    _chat("choices", lambda rng, size: {"structured_outputs": {"choice": _many(size, "choice", 1_000_000)}}),
    _chat("stop", lambda rng, size: {"stop": [_HOLE] * rng.randint(1, 4)}),
    _chat("user", lambda rng, size: {"user": _HOLE}),
    _chat("metadata", lambda rng, size: {"metadata": {"key": _HOLE}}),
    _chat("logit_bias", lambda rng, size: {"logit_bias": {_HOLE: 1}}),
    _chat("biases", lambda rng, size: {"logit_bias": {str(number): 1.5 for number in range(min(49_000, size // 12))}}),
    _chat("bad_words", lambda rng, size: {"bad_words": [_HOLE] * _shared(rng, size, 64)}),
    _chat("small bad_words", lambda rng, size: {"bad_words": [f"b{number}" for number in range(1024)]}),
    _chat("ids", lambda rng, size: {"allowed_token_ids": [number % 49_000 for number in range(size // 8)]}),
    _chat("an unknown field", lambda rng, size: {"unknown": {"a": [_HOLE]}}),
    _chat("small values", lambda rng, size: {"unknown": _many(size, rng.choice(([], {}, "", 1, {"a": [1]})), 600_000)}),
    _chat("kwargs", lambda rng, size: {"chat_template_kwargs": {"date_string": _HOLE}}),
    _chat("a name", lambda rng, size: {"messages": [_said("a", name=_HOLE)]}),
    _chat("a continued message", lambda rng, size: {"messages": [_said("a"), _said(_HOLE, "assistant")]}),
    _chat(
        "blocks",
        lambda rng, size: {"messages": [_said([{"type": "text", "text": _HOLE}] * _shared(rng, size))]},
        MESSAGES,
    ),
    _chat("system", lambda rng, size: {"system": [{"type": "text", "text": _HOLE}]}, MESSAGES),
    _chat(
        "small blocks",
        lambda rng, size: {
            "messages": [_said(_many(size, {"type": "tool_result", "tool_use_id": "c", "content": "a"}, 40_000))]
        },
        MESSAGES,
    ),
    _chat(
        "nested blocks",
        lambda rng, size: {
            "messages": [
                _said("a"),
                _said([{"type": "tool_use", "id": "c", "name": "f", "input": {"a": [_HOLE]}}], "assistant"),
                _said([{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": _HOLE}] * 3}]),
            ]
        },
        MESSAGES,
    ),
    _chat(
        "an image",
        lambda rng, size: {"messages": [_said([{"type": "image", "source": {"type": "base64", "data": _HOLE}}])]},
        MESSAGES,
    ),
    _chat("a message", lambda rng, size: {"messages": [_said(_HOLE)]}, COUNT_TOKENS),
    _chat("small messages", lambda rng, size: {"messages": _many(size, _said("a<"))}, COUNT_TOKENS),
    (RESPONSES, "input", lambda rng, size: {"input": _HOLE}),
    (RESPONSES, "instructions", lambda rng, size: {"input": "Hi", "instructions": _HOLE, "max_output_tokens": 2}),
    (RESPONSES, "items", lambda rng, size: {"input": [_said(_HOLE)] * _shared(rng, size), "max_output_tokens": 2}),
    (RESPONSES, "small items", lambda rng, size: {"input": _many(size, _said("a")), "max_output_tokens": 2}),
    (
        RESPONSES,
        "outputs",
        lambda rng, size: {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": _HOLE},
                {"type": "function_call_output", "call_id": "c", "output": _HOLE},
            ]
        },
    ),
    (COMPLETIONS, "prompt", lambda rng, size: {"prompt": _HOLE, "max_tokens": 2}),
    (COMPLETIONS, "prompts", lambda rng, size: {"prompt": [_HOLE] * _shared(rng, size), "max_tokens": 1}),
    (COMPLETIONS, "a cut prompt", lambda rng, size: {"prompt": _HOLE, "max_tokens": 2, "truncate_prompt_tokens": 16}),
    (COMPLETIONS, "an echoed prompt", lambda rng, size: {"prompt": _HOLE, "max_tokens": 1, "echo": True}),
    (COMPLETIONS, "ids", lambda rng, size: {"prompt": [number % 49_000 for number in range(size // 7)]}),
    (COMPLETIONS, "lists of ids", lambda rng, size: {"prompt": [[1000] * 1000] * max(1, min(1024, size // 6000))}),
    (EMBEDDINGS, "input", lambda rng, size: {"input": _HOLE}),
    (EMBEDDINGS, "inputs", lambda rng, size: {"input": [_HOLE] * _shared(rng, size)}),
    (EMBEDDINGS, "small inputs", lambda rng, size: {"input": _many(size, "a", 2048)}),
    (TOKENIZE, "prompt", lambda rng, size: {"prompt": _HOLE, "return_token_strs": rng.random() < 0.5}),
    (TOKENIZE, "messages", lambda rng, size: {"messages": [_said(_HOLE)]}),
    (TOKENIZE, "small messages", lambda rng, size: {"messages": _many(size, _said("a"))}),
    ("/detokenize", "ids", lambda rng, size: {"tokens": [number % 49_000 for number in range(size // 7)]}),
]
"""Path, name of the field, and the body's fields with holes for the text."""
