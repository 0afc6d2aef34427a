"""The prompt of a request of any API, which is not run, and where two prompts part."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from server.api.chat import render_chat
from server.api.formatting import encode_json
from server.api.limits import TokenLimits, in_vocabulary
from server.api.messages import messages_intent
from server.api.responses import responses_intent
from server.api.tokenize import encode_any
from server.models.served_model import ServedModel
from server.schema.decoding import TextLimit, decode_text, invalid
from server.schema.fields import ModelFields
from server.schema.intent import Conversation
from server.schema.messages import COUNT_TOKENS
from server.schema.requests import CHAT, COMPLETION, RESPONSES
from server.text.differences import Place, differences, first_place, shared_length, volatile

Api = Literal["chat", "completions", "responses", "messages"]
MAX_NAMED: Final = 8
_BLOCK_TYPES: Final = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})
_NO_TEXT: Final = frozenset({"model", "max_tokens", "max_completion_tokens", "max_output_tokens", "stream", "user"})
_TURN: Final = re.compile(r"(messages|input)\[\d+\]")
_ANTHROPIC_FIELDS: Final = frozenset(
    {"system", "stop_sequences", "thinking", "output_config", "context_management", "anthropic_version", "thread"}
)
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt that a body becomes."""

    body: dict[str, Any]
    model: ServedModel
    salt: str | None
    text: str
    """Empty for a prompt of token ids."""
    ids: list[int]
    is_cut: bool
    """`truncate_prompt_tokens` has cut it."""


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """Where the prompts of two bodies part, without their text. B is the later one."""

    model: str
    block_size: int
    num_tokens_a: int
    num_tokens_b: int
    num_shared_tokens: int = 0
    goes_on: bool = False
    """One prompt begins with the other."""
    field: str | None = None
    """The place in the bodies; None: the template's own text differs."""
    character: int | None = None
    volatile: str = ""
    num_shared_tokens_without: int | None = None
    """Tokens that would be shared if this field were the same; None: unknown."""
    other_fields: tuple[str, ...] = ()
    """Fields in which the bodies differ, where the template's own text does."""
    prefill_tokens_per_s: float | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Return the tokens of B that A's blocks save: whole blocks, and never the last token."""
        return min(self.num_shared_tokens, self.num_tokens_b - 1) // self.block_size * self.block_size


def api_of(body: Mapping[str, Any]) -> Api:
    """Return the API to which a body belongs by its fields. Raises InvalidRequestError."""
    if "messages" in body:
        return "messages" if _is_anthropic(body) else "chat"
    if "input" in body:
        return "responses"
    if "prompt" in body:
        return "completions"
    raise invalid("body", "has none of messages, input and prompt: is it a request?")


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    if not _ANTHROPIC_FIELDS.isdisjoint(body):
        return True
    messages, tools = body["messages"], body.get("tools")
    if any(isinstance(tool, dict) and "input_schema" in tool for tool in (tools if isinstance(tools, list) else ())):
        return True
    contents = [m.get("content") for m in (messages if isinstance(messages, list) else ()) if isinstance(m, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return any(part.get("type") in _BLOCK_TYPES or "cache_control" in part for part in parts)


async def read_prompt(raw: bytes, find: Callable[[str], ServedModel], api: Api | None = None) -> Prompt:
    """Render and tokenise a body as its route does. `find` returns a model by name. Raises ApiError."""
    try:
        body = decode_text(raw.decode(), "body")
        fields = _FIELDS.decode(raw)
    except (ValueError, RecursionError) as error:
        raise invalid("body", f"must be a JSON object: {error}") from None
    name = body.get("model") or ""
    if not isinstance(name, str):
        raise invalid("model", "must be a string")
    model = find(name)
    raw = encode_json({**fields, "model": model.name})
    request: ModelFields
    text, ids = "", list[int]()
    match api or api_of(body):
        case "completions":
            request = completion = await COMPLETION.read(raw, TextLimit)
            first = completion.prompts()[0]
            if isinstance(first, str):
                text = first
                ids = await encode_any(text, model, "prompt", add_bos=completion.add_special_tokens is not False)
            else:
                ids = list(in_vocabulary(first, model.bundle.vocab_size, "prompt"))
        case chat_api:
            request, conversation = await _conversation(raw, chat_api)
            rendered = await render_chat(conversation, model)
            text = rendered.text
            ids = await encode_any(text, model, conversation.names.messages, client_offsets=rendered.client_offsets)
    kept = TokenLimits(request, "messages").truncated(ids)
    return Prompt(body, model, request.cache_salt, text, kept, len(kept) < len(ids))


async def _conversation(raw: bytes, api: Api) -> tuple[ModelFields, Conversation]:
    match api:
        case "chat":
            chat = await CHAT.read(raw, TextLimit)
            return chat, chat.intent().conversation
        case "responses":
            responses = await RESPONSES.read(raw, TextLimit)
            return responses, responses_intent(responses).conversation
    messages = await COUNT_TOKENS.read(raw, TextLimit)
    return messages, (await messages_intent(messages)).conversation


def compare(a: Prompt, b: Prompt) -> Parting:
    """Return where two prompts part. It takes tenths of a second for large bodies: run it in a thread."""
    parting = Parting(
        model=b.model.adapter or b.model.name,
        block_size=b.model.bundle.block_size,
        num_tokens_a=len(a.ids),
        num_tokens_b=len(b.ids),
    )
    for name, differs in (("model", a.model.root(b"") != b.model.root(b"")), ("cache_salt", a.salt != b.salt)):
        if differs:
            return replace(parting, field=name, volatile=f"another {name}, which shares nothing")
    parting = replace(parting, num_shared_tokens=shared_length(a.ids, b.ids))
    if a.is_cut or b.is_cut:
        return replace(parting, field="truncate_prompt_tokens", volatile="the beginning is cut off")
    if parting.num_shared_tokens == min(len(a.ids), len(b.ids)):
        return replace(parting, goes_on=True, volatile="nothing: one prompt begins with the other")
    found = differences(a.body, b.body)
    place = first_place(found, a.text, b.text)
    if place is not None:
        difference = place.difference
        if difference.leaves and _TURN.fullmatch(difference.path):
            why = "nothing: the conversation goes on"
            return replace(parting, goes_on=True, field=difference.path, volatile=why)
        without, why = _shared_without(place, a, b), volatile(place)
        where = {"field": difference.path, "character": place.character}
        return replace(parting, **where, volatile=why, num_shared_tokens_without=without)
    paths = [difference.path for difference in found if difference.path not in _NO_TEXT]
    if ids := next((path for path in paths if path.startswith("prompt")), None):
        return replace(parting, field=ids, volatile="token ids")
    goes_on = shared_length(a.text, b.text) == min(len(a.text), len(b.text)) > 0
    why = "the template's own text"
    return replace(parting, goes_on=goes_on, volatile=why, other_fields=tuple(paths[:MAX_NAMED]))


def _shared_without(place: Place, a: Prompt, b: Prompt) -> int | None:
    """Return how many tokens the prompts would share if they agreed in this place."""
    if place.rest is None:
        return None
    end_a, end_b = place.rest
    num_same = shared_length(a.text[end_a:], b.text[end_b:])
    [ids] = b.model.tokenizer.encode_texts([b.text[: end_b + num_same]])
    return min(len(ids), len(b.ids))
