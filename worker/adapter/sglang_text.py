"""Chats whose text SGLang writes: the prompt's ids by its `/tokenize`, the answer by its chat API for ready ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from worker.adapter.api import EngineRefusedError, TextPart
from worker.adapter.http import CALL_TIMEOUT_S, EngineServer, understood
from worker.adapter.text import CHAT, LENGTHS, answer_of, decode_body, shorten
from worker.wire import EngineCall, GenerateRequest, Rendered

_RENDER_TIMEOUT_S: Final = 60.0
_CONVERSATION: Final = ({"role": "user", "content": "Hi"},)
_OURS: Final = (
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "cache_salt", "custom_labels", "custom_logit_processor"),
    *("data_parallel_rank", "disagg_prefill_dp_rank", "extra_key", "input_ids", "kv_hints", "lora_path", "rid"),
    *("routed_dp_rank", "session_id", "session_params"),
)
"""Fields that address adapters, ranks, caches, other hosts or code: never a client's."""
_NOT_SENT: Final = ("model", "priority", "return_token_ids")
"""A name with a colon would name an adapter. SGLang's priorities go the other way, and need an option of its."""


class SglangTexts:
    """The chat API of one SGLang server."""

    def __init__(self, server: EngineServer, rank: int | None) -> None:
        self._server = server
        self._rank = rank

    async def apis(self) -> tuple[str, ...]:
        """Return the chat API, if `/tokenize` renders messages. Older versions take texts only."""
        status, _ = await self._server.call("POST", "/tokenize", {"messages": _CONVERSATION}, CALL_TIMEOUT_S)
        return (CHAT,) if status == 200 else ()

    async def render(self, call: EngineCall) -> Rendered:
        """Return the engine's own ids of a chat. Raises EngineLostError, EngineRefusedError."""
        body = _body_of(call)
        token_ids = tuple(await self._server.token_ids(body, _RENDER_TIMEOUT_S))
        with understood("/tokenize"):
            asked = [msgspec.json.decode(body[name]) for name in LENGTHS[CHAT] if name in body]
            longest = (await self._server.model()).max_model_len - len(token_ids)
            max_tokens = next((int(length) for length in asked if length is not None), longest)
        return Rendered((token_ids,), (max(0, max_tokens),), ())

    async def answer(self, request: GenerateRequest, request_id: str) -> AsyncIterator[TextPart]:
        """Yield the answer to a request's call. Closing the iterator aborts it in the engine."""
        assert request.call is not None
        body = chat_body(request, request_id, self._rank)
        async for part in answer_of(self._server, request.call, body):
            yield part


def chat_body(request: GenerateRequest, request_id: str, rank: int | None) -> dict[str, Any]:
    """Return the engine's body: the client's, with the prompt's ids and the salt."""
    call = request.call
    assert call is not None
    body = _body_of(call) | {
        "input_ids": [*request.prompt_ids, *request.choices[0].output_ids],
        "cache_salt": request.root.hex(),
        "rid": request_id,
    }
    if not call.streams:  # SGLang gives no token ids in streams
        body["return_token_ids"] = True
    if request.adapter:
        body["lora_path"] = request.adapter
    if rank is not None:
        body["data_parallel_rank"] = rank
    shorten(body, request, CHAT)
    return body


def _body_of(call: EngineCall) -> dict[str, Any]:
    """Return the client's body. Raises EngineRefusedError for a field that is never a client's."""
    body: dict[str, Any] = dict(decode_body(call.body))
    for name in _OURS:
        if bytes(body.pop(name, b"null")) != b"null":
            raise EngineRefusedError(400, f"{name}: set by the gateway only: leave it out", name)
    return {name: value for name, value in body.items() if name not in _NOT_SENT}
