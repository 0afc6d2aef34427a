"""Bodies of requests from the engine's own OpenAPI schema: the same for the same seed.

Most fields have a value of their type, some one of another: errors are answers too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

WRONG: Final = 0.08
"""The share of fields with a value of another type."""
_TEXTS: Final = ("Count to ten", "Größe, 日本語, 🙂", "a\ttab\nand a line", "x", "", "What is the capital of France?")
_WRONG: Final = (-1, 3.5, "text", [], {}, ["x", 1], True, None, 1 << 40)
_INTEGERS: Final = (0, 1, 2, 3, 5, 7, 20, -1)
_NUMBERS: Final = (0, 0.5, 0.9, 1.0, 1.5, -0.5)
_REQUIRED: Final = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt",),
    "/v1/messages": ("messages", "max_tokens"),
    "/v1/responses": ("input",),
}
_LENGTHS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_KINDS: Final[dict[str, Callable[[random.Random], Any]]] = {
    "string": lambda chance: chance.choice(_TEXTS),
    "integer": lambda chance: chance.choice(_INTEGERS),
    "number": lambda chance: chance.choice(_NUMBERS),
    "boolean": lambda chance: chance.random() < 0.6,
    "null": lambda chance: None,
}
PARAMETERS: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Final = {"name": "get_weather", "description": "Tells the weather.", "parameters": PARAMETERS}
_CALLED: Final = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}


class Bodies:
    """Generates bodies for one schema."""

    def __init__(self, openapi: Mapping[str, Any], seed: int) -> None:
        self._schemas: Mapping[str, Any] = openapi["components"]["schemas"]
        self._paths: Mapping[str, Any] = openapi["paths"]
        self._seed = seed

    def of(self, path: str, count: int) -> Iterator[dict[str, Any]]:
        """Yield `count` bodies without `model` and `stream`. Answers are short, and greedy or with a seed."""
        schema = self._resolved(self._paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"])
        names = sorted(set(schema["properties"]) - {"model", "stream", *_REQUIRED[path], *_LENGTHS})
        chance = random.Random(f"{path} {self._seed}")
        for _ in range(count):
            body: dict[str, Any] = _conversation(path, chance)
            for name in chance.sample(names, chance.choice((0, 1, 1, 2, 3))):
                wrong = chance.random() < WRONG
                body[name] = chance.choice(_WRONG) if wrong else _known(name, path, chance)
                if body[name] is _UNKNOWN:
                    body[name] = self._value(schema["properties"][name], chance, 0)
            yield _repeatable(body, path, chance)

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def _value(self, schema: Mapping[str, Any], chance: random.Random, depth: int) -> Any:
        """Return a value that a schema allows, or nearly."""
        schema = self._resolved(schema)
        for several in ("anyOf", "oneOf"):
            if several in schema:
                options = [each for each in schema[several] if each.get("type") != "null"]
                return self._value(chance.choice(options), chance, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return chance.choice(schema["enum"])
        if schema.get("type") == "array":
            count = 0 if depth > 4 else chance.choice((0, 1, 2))
            return [self._value(schema.get("items", {}), chance, depth + 1) for _ in range(count)]
        if schema.get("type") == "object":
            return self._object(schema, chance, depth)
        return _KINDS[schema.get("type", "string")](chance)

    def _object(self, schema: Mapping[str, Any], chance: random.Random, depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if not properties and isinstance(schema.get("additionalProperties"), dict):
            return {chance.choice(("1", "7", "x")): self._value(schema["additionalProperties"], chance, depth + 1)}
        return {
            name: self._value(each, chance, depth + 1)
            for name, each in properties.items()
            if name in required or (depth < 3 and chance.random() < 0.3)
        }


_UNKNOWN: Final = object()


def _known(name: str, path: str, chance: random.Random) -> Any:
    """Return a value that a random choice would hardly find, or _UNKNOWN."""
    if name == "tools":
        if path == "/v1/messages":
            return [{"name": "get_weather", "description": "Tells the weather.", "input_schema": PARAMETERS}]
        flat = {"type": "function"} | FUNCTION
        return [flat if path == "/v1/responses" else {"type": "function", "function": FUNCTION}]
    if name == "structured_outputs":
        return chance.choice(({"regex": "[a-c]{3}"}, {"choice": ["yes", "no"]}, {"json": PARAMETERS}))
    if name == "logit_bias":
        return {str(chance.randrange(40, 90)): 100}
    if name == "allowed_token_ids":
        return [chance.randrange(40, 90) for _ in range(3)]
    return _UNKNOWN


def _conversation(path: str, chance: random.Random) -> dict[str, Any]:
    """Return a body with a prompt of some form."""
    length = chance.randrange(1, 8)
    text = chance.choice(_TEXTS[:4])
    if path == "/v1/completions":
        prompts: tuple[Any, ...] = (text, text, [1, 50, 60], ["Once", "Twice"], [[40, 41], [42]], "")
        return {"prompt": chance.choice(prompts), "max_tokens": length}
    if path == "/v1/responses":
        items = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": text}]
        parts = [{"role": "user", "content": [{"type": "input_text", "text": text}]}]
        past: list[dict[str, Any]] = [
            *items,
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ]
        return {"input": chance.choice((text, items, parts, past)), "max_output_tokens": length}
    user = {"role": "user", "content": chance.choice((text, [{"type": "text", "text": text}]))}
    messages: list[dict[str, Any]] = [user]
    match chance.randrange(5):
        case 0:
            messages = [user, {"role": "assistant", "content": "Yes."}, user]
        case 1 if path == "/v1/messages":
            used = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Rome"}}
            result = {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}
            messages = [user, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
        case 1:
            result = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
            messages = [user, {"role": "assistant", "tool_calls": [_CALLED]}, result]
        case 2 if path != "/v1/messages":
            messages = [{"role": "system", "content": "Be brief."}, user]
    name = "max_completion_tokens" if path != "/v1/messages" and chance.random() < 0.3 else "max_tokens"
    return {"messages": messages, name: length}


def _repeatable(body: dict[str, Any], path: str, chance: random.Random) -> dict[str, Any]:
    """Return a body whose answer does not depend on chance in the engine."""
    number = body.get("n")
    if isinstance(number, int) and number > 1:
        body |= {"n": 2, "temperature": 1.0}
    if body.get("temperature") in (0, None) and "temperature" not in body:
        body["temperature"] = 0
    if body["temperature"] != 0 and path != "/v1/messages":
        body["seed"] = chance.randrange(1000)
    elif path == "/v1/messages":
        body["temperature"] = 0  # it takes no seed
    return body
