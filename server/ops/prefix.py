"""The first difference of two prompts, after which the second one finds no block of the first.

The difference is shown as decoded text. The field to blame differs between the bodies, and its text spans the position
of the difference in both prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from server.request.choice import GenerationSpec
from server.schema.decoding import invalid

NUM_BEFORE: Final = 20  # tokens shown before the difference: enough to find it in the text
NUM_AFTER: Final = 40  # tokens shown after it: enough for a date, an id or a path
MAX_FIELDS: Final = 8  # the first differences matter most, and the answer stays small
MAX_CHANCE_CHARS: Final = 32
"""Past the end of the shorter field, the prompts may agree by chance for this long."""
_SCHEMA: Final = re.compile(r"tools\[.*?\.(?:parameters|input_schema)\b")
_MESSAGES_FIELDS: Final = frozenset({"system", "stop_sequences", "thinking", "output_config", "context_management"})
_MESSAGES_PARTS: Final = re.compile(
    rb'(?<!\\)"(?:input_schema|cache_control|tool_use_id)"\s*:|"type"\s*:\s*"(?:tool_use|thinking|redacted_thinking)"'
)


def path_of(raw: bytes, body: Mapping[str, Any]) -> str:
    """Return the route to which a body belongs by its fields. Raises InvalidRequestError."""
    if "messages" in body:
        is_chat = _MESSAGES_FIELDS.isdisjoint(body) and not _MESSAGES_PARTS.search(raw)
        return "/v1/chat/completions" if is_chat else "/v1/messages"
    for field, path in (("input", "/v1/responses"), ("prompt", "/v1/completions")):
        if field in body:
            return path
    raise invalid("body", "has none of messages, input and prompt: is it a request?")


def compare(a: GenerationSpec, b: GenerationSpec, bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first difference of two prompts as JSON. Large bodies take tenths of a second: use a thread."""
    size, decode, prompts = b.model.bundle.block_size, b.model.tokenizer.decode, (a.prompt_ids, b.prompt_ids)
    name, same_root = b.model.adapter or b.model.name, a.root == b.root
    shared = _shared_length(*prompts) if same_root else 0
    begin, end = max(0, shared - NUM_BEFORE), shared + NUM_AFTER
    texts = [decode(ids) for ids in prompts]
    at = _shared_length(*texts)
    goes_on = same_root and at == min(map(len, texts))
    fields = [dict(_texts(body)) for body in bodies]
    differing = [path for path in fields[0] | fields[1] if fields[0].get(path) != fields[1].get(path)]
    both = list(zip(fields, texts, strict=True))
    lengths = {path: min(_length_at(each[path], text, at) for each, text in both if path in each) for path in differing}
    field = max(filter(lengths.get, lengths), key=lengths.__getitem__, default=None)
    if not same_root:
        field = "cache_salt" if name == (a.model.adapter or a.model.name) else "model"
    sorts_schemas = b.model.template is not None and b.model.template.sorts_schemas
    reordered = None if goes_on or field or sorts_schemas else _reordered(*fields)
    return {
        "model": name,
        "block_size": size,
        "num_tokens_a": len(a.prompt_ids),
        "num_tokens_b": len(b.prompt_ids),
        "num_shared_tokens": shared,
        # Whole blocks, and never the last token.
        "num_cached_tokens": max(0, min(shared, len(b.prompt_ids) - 1)) // size * size,
        "goes_on": goes_on,
        "field": field or reordered,
        "reordered": reordered is not None,
        "differing": differing[:MAX_FIELDS],
        "around": [[decode(ids[begin:shared]), decode(ids[shared:end])] for ids in prompts],
    }


def _shared_length(a: Sequence[object], b: Sequence[object]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(a), len(b)))


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text and number of a body with its path; also in the JSON of a call's arguments."""
    if isinstance(value, str) and path.endswith("arguments") and value.startswith("{"):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _texts(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and not isinstance(value[0], int):  # but no token ids
        for number, item in enumerate(value):
            yield from _texts(item, f"{path}[{number}]")
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)


def _reordered(a: Mapping[str, str], b: Mapping[str, str]) -> str | None:
    """Return the first part of a tool's schema whose keys are in another order in the other body's fields."""
    orders = [[path for path in each if path in a and path in b and _SCHEMA.match(path)] for each in (a, b)]
    pair = next((pair for pair in zip(*orders, strict=True) if pair[0] != pair[1]), None)
    return None if pair is None else pair[0][: _shared_length(*pair)].rpartition(".")[0]


def _length_at(value: str, text: str, at: int) -> int:
    """Return the length of a field's text if it is in the prompt around position `at`; 0 if not."""
    forms = (value.strip(), json.dumps(value, ensure_ascii=False)[1:-1])
    found = [form for form in forms if form in text[max(0, at - MAX_CHANCE_CHARS - len(form)) : at + len(form)]]
    return max(map(len, found), default=0)
