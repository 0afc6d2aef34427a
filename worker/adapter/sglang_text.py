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
_SENT: Final = frozenset(
    {
        *("chat_template_kwargs", "continue_final_message", "ebnf", "frequency_penalty", "ignore_eos", "images_config"),
        *("logit_bias", "logprobs", "max_completion_tokens", "max_dynamic_patch", "max_tokens", "messages"),
        *("min_dynamic_patch", "min_p", "min_tokens", "mm_processor_kwargs", "n", "no_stop_trim"),
        *("parallel_tool_calls", "presence_penalty", "reasoning_effort", "regex", "repetition_penalty"),
        *("response_format", "return_cached_tokens_details", "return_flat_raw_output_top_logprobs"),
        *("return_flat_raw_top_logprobs_b64", "return_hidden_states", "return_input_ids_in_sglext", "return_meta_info"),
        *("return_output_ids_in_sglext", "return_prompt_token_ids", "return_routed_experts", "return_sampling_mask"),
        *("return_spec_tokens_details", "routed_experts_start_len", "sampling_logprobs_mode", "seed"),
        *("separate_reasoning", "skip_special_tokens", "stop", "stop_regex", "stop_token_ids", "stream"),
        *("stream_options", "stream_reasoning", "task", "temperature", "thinking", "tool_choice", "tools", "top_k"),
        *("top_logprobs", "top_p", "use_audio_in_video", "user", "video_config", "watermark"),
    }
)
"""Fields of SGLang 0.5.23. Others may address adapters, ranks, caches, other hosts or code."""
_NOT_SENT: Final = frozenset(
    {
        *(
            "cache_control",
            "cache_salt",
            "metadata",
            "modalities",
            "model",
            "prediction",
            "priority",
            "prompt_cache_key",
        ),
        *("prompt_cache_options", "prompt_cache_retention", "return_token_ids", "safety_identifier", "service_tier"),
        *("store", "verbosity"),
    }
)
"""Hints. A name with a colon would name an adapter. SGLang's priorities go the other way, and need an option of its."""


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
    """Return the client's body. Raises EngineRefusedError for a field that is not a client's."""
    body: dict[str, Any] = dict(decode_body(call.body))
    for name, value in body.items():
        if name not in _SENT | _NOT_SENT and bytes(value) != b"null":
            raise EngineRefusedError(400, f"{name:.64}: not sent on to this engine: leave it out", f"{name:.64}")
    return {name: value for name, value in body.items() if name in _SENT}
