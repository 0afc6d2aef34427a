"""The fields that the bodies of several routes have in common.

ModelFields          what every generating route takes, /v1/responses included
+-- SamplingFields   what chats and completions share: see `server.schema.types`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta, Struct

from server.errors import InvalidRequestError
from server.schema.decoding import unsupported
from server.schema.parts import ResponseFormat, StreamOptions, StructuredOutputs

MAX_STOP_CHARS: Final = 1024

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
ShortText = Annotated[str, Meta(max_length=64)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_NOTHING: Final[tuple[object, ...]] = (None, False, "", [])
_PRIVATE: Final = "is not offered on the public port"
_CONSTRAINTS: Final = "is not offered: use structured_outputs"


class ModelFields(Struct, kw_only=True):
    """The model, how it draws, and hints: the same on every generating route, vLLM's extensions included."""

    hints: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        }
    )
    refused: ClassVar[Mapping[str, str]] = {
        "bootstrap_host": _PRIVATE,
        "bootstrap_port": _PRIVATE,
        "bootstrap_room": _PRIVATE,
        "custom_logit_processor": _PRIVATE,
        "ebnf": _CONSTRAINTS,
        "grammar": _CONSTRAINTS,
        "guided_choice": _CONSTRAINTS,
        "guided_grammar": _CONSTRAINTS,
        "guided_json": _CONSTRAINTS,
        "guided_regex": _CONSTRAINTS,
        "json_schema": _CONSTRAINTS,
        "kv_transfer_params": _PRIVATE,
        "logits_processors": _PRIVATE,
        "lora_path": _PRIVATE,
        "mirostat": "is not offered",
        "moderation": "is not offered",
        "n_predict": "is not offered: use max_tokens",
        "prompt_embeds": _PRIVATE,
        "regex": _CONSTRAINTS,
        "repeat_penalty": "is not offered: use repetition_penalty",
        "return_hidden_states": _PRIVATE,
        "return_tokens_as_token_ids": "is not offered: use return_token_ids",
        "session_params": _PRIVATE,
        "stop_regex": "is not offered: use stop",
        "thinking_token_budget": "is not offered: use reasoning_effort",
        "use_beam_search": "is not offered: the server samples",
        "vllm_xargs": _PRIVATE,
    }

    model: Annotated[str, Meta(min_length=1, max_length=1024)]
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    stream: bool | None = None
    stop: str | list[str] | None = None
    seed: Int64 | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    structured_outputs: StructuredOutputs | None = None

    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[str], Meta(max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1_000_000)] | None = None
    truncate_prompt_tokens: PositiveCount | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None

    metadata: dict[str, Annotated[str, Meta(max_length=512)]] | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: ShortText | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    store: bool | None = None
    user: str | None = None

    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    custom_logit_processor: Any = None
    ebnf: Any = None
    grammar: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    json_schema: Any = None
    kv_transfer_params: Any = None
    logits_processors: Any = None
    lora_path: Any = None
    mirostat: Any = None
    moderation: Any = None
    n_predict: Any = None
    prompt_embeds: Any = None
    regex: Any = None
    repeat_penalty: Any = None
    return_hidden_states: Any = None
    return_tokens_as_token_ids: Any = None
    session_params: Any = None
    stop_regex: Any = None
    thinking_token_budget: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_fields(self) -> None:
        """What is refused, and what no single field's type can say. Raises InvalidRequestError."""
        for field, why in self.refused.items():
            if getattr(self, field) not in _NOTHING:
                raise unsupported(field, why)
        stops = self.stop_strings
        if len(stops) > 4:
            raise InvalidRequestError("stop takes at most 4 strings.", param="stop")
        if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise InvalidRequestError(f"a stop string has 1 to {MAX_STOP_CHARS} characters.", param="stop")
        if self.metadata is not None and (len(self.metadata) > 16 or any(len(key) > 64 for key in self.metadata)):
            raise InvalidRequestError("metadata takes 16 pairs with keys of 64 characters.", param="metadata")
        if self.structured_outputs is not None:
            self.structured_outputs.check()


class SamplingFields(ModelFields, kw_only=True):
    """What chat and completions share."""

    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def check(self) -> None:
        """Raises InvalidRequestError."""
        self.check_fields()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed with stream: true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs is not available with stream: true.", param="prompt_logprobs")
        formatted = self.response_format
        if formatted is None or formatted.type == "text":
            return
        if self.structured_outputs is not None:
            text = "response_format and structured_outputs exclude each other."
            raise InvalidRequestError(text, param="structured_outputs")
        if formatted.type == "json_schema" and formatted.json_schema is None:
            raise InvalidRequestError("json_schema is required.", param="response_format.json_schema")
