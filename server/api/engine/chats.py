"""Bodies of Messages and Responses as bodies of chats, whose text an engine writes.

The prompts are those of vLLM's own routes, but where these lose something. docs/architecture/engine_text.md lists it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from server.api.formatting import encode_json
from server.schema.blocks import image_url
from server.schema.decoding import NULL
from server.schema.fields import LeftOut, Message, ModelFields, RequestFields, ResponseFormat, TextPart
from server.schema.intent import ChatIntent
from server.schema.messages import CountTokensRequest

_HINTS: Final = {*RequestFields.__struct_fields__} - {"cache_salt", "priority", "model"}
_SAME_FIELDS: Final = [name for name in ModelFields.__struct_fields__ if name not in _HINTS | {"stop"}]
"""Fields with one name in all bodies."""


def keep_images(messages: Sequence[Message]) -> None:
    """Put images back where they are left out."""
    for message in messages:
        if isinstance(message.content, list):
            message.content = [_image(part) if isinstance(part, LeftOut) else part for part in message.content]


def _image(part: LeftOut) -> TextPart:
    media = part.part
    url = image_url(media.type, media.source, media.image_url, media.detail)
    return part if url is NULL else TextPart(type="image_url", image_url=url)


def chat_of(intent: ChatIntent) -> bytes:
    """Return the body of a chat, without the length of its answer."""
    conversation, fields = intent.conversation, intent.fields
    body = {name: value for name in _SAME_FIELDS if (value := getattr(fields, name)) is not None}
    tools, choice, logprobs = conversation.tools, intent.named_tool, intent.num_top_logprobs
    joins = isinstance(fields, CountTokensRequest)
    body |= {
        "messages": [each for m in conversation.messages for each in _messages(m, joins=joins)],
        "tools": [{"type": "function", "function": tool} for tool in tools],
        "tool_choice": intent.tool_mode if choice is None else {"type": "function", "function": {"name": choice.name}},
        "parallel_tool_calls": None if intent.parallel_tool_calls else False,
        "stop": list(intent.stops),
        "thinking_token_budget": conversation.wishes.wish.budget,
        "chat_template_kwargs": conversation.template_kwargs,
        "response_format": None if intent.response_format is None else _format(intent.response_format),
        "stream_options": {"include_usage": True} if fields.stream else None,
    }
    if not tools:
        del body["tool_choice"]
    if conversation.is_continued:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": logprobs}
    return encode_json({name: value for name, value in body.items() if value not in (None, [], {})})


def _messages(message: Message, *, joins: bool) -> Iterator[dict[str, Any]]:
    """Yield the chat's messages of one. `joins`: texts of a system message or a result are one, as vLLM has them."""
    content: Any = message.content
    images: list[dict[str, Any]] = []
    if isinstance(content, list):
        parts = [_part(part) for part in content if part.text or part.type == "image_url" or not joins]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        if joins and message.role in ("system", "tool"):
            content = ("\n" if message.role == "tool" else "").join(texts)
            images = [part for part in parts if part["type"] != "text"]
        elif len(parts) == len(texts) == 1 and (joins or message.role == "assistant"):
            content = texts[0]
        else:
            content = parts
    written = {"role": message.role, "content": content, "reasoning": message.reasoning_content}
    written |= {"tool_call_id": message.tool_call_id, "tool_calls": message.tool_calls and _calls(message)}
    kept = {name: value for name, value in written.items() if value is not None}
    if not (joins and message.role == "user" and content == []):
        yield kept
    if images:
        yield {"role": "user", "content": images}


def _part(part: TextPart) -> dict[str, Any]:
    if part.type == "image_url":
        return {"type": "image_url", "image_url": part.image_url}
    return {"type": "text", "text": part.text if part.refusal is None else part.refusal}


def _calls(message: Message) -> list[dict[str, Any]]:
    functions = [(call.id, call.called) for call in message.tool_calls or ()]
    return [
        {"id": id_, "type": "function", "function": {"name": each.name, "arguments": each.arguments or "{}"}}
        for id_, each in functions
    ]


def _format(given: ResponseFormat) -> dict[str, Any]:
    """Return a format. A schema needs a name, as vLLM gives it."""
    if given.type != "json_schema" or given.given_schema is None:
        return {"type": given.type}
    named = given.json_schema
    schema = {"name": "json_schema" if named is None else named.name, "schema": given.given_schema[1]}
    return {"type": "json_schema", "json_schema": schema | ({} if named is None else {"strict": named.strict})}
