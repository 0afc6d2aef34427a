"""Prompts of chats that the gateway renders, though the engine writes the answer: they save a call of `/render`.

A body has classes of shape, as `CHAT_PROBES` names them. The ids of the probes of each must be equal at the gateway and
at every engine of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from cache.records import Candidate
from server.api.formatting import encode_json
from server.errors import ApiError
from server.models.served_model import ServedModel
from server.schema.decoding import TextLimit
from server.schema.requests import CHAT
from server.text.template_sandbox import TemplateError
from server.text.tokenizer import TooManyTokensError
from worker.common.chat_probes import CHAT_PROBES, WITH_TOOLS, digests
from worker.wire import Rendered

Digests = tuple[tuple[str, str], ...]
_WITHOUT_PROMPT: Final = frozenset(
    {
        *("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "seed", "n"),
        *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "logprobs"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "top_logprobs", "cache_salt", "priority"),
        *("prompt_cache_key", "user", "metadata", "return_token_ids", "parallel_tool_calls"),
    }
)
"""Fields of a body that no prompt depends on."""
_USUAL: Final = frozenset({"plain", "plain+tools", "calls"})
"""The classes that show a template's shapes."""


class _Part(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _CalledFunction(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class _Call(Struct, forbid_unknown_fields=True, kw_only=True):
    id: str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction


class _Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None

    @property
    def has_empty(self) -> bool:
        """Return whether the content or a part of it is empty. Calls need no content."""
        if isinstance(self.content, list):
            return not all(part.text for part in self.content)
        return not self.content and not self.tool_calls


class _Function(Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"] = "function"
    function: _Function


class _Kwargs(Struct, forbid_unknown_fields=True):
    enable_thinking: bool | None = None


class _Prompt(Struct, forbid_unknown_fields=True):
    messages: list[_Message]
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: _Kwargs | None = None
    reasoning_effort: str | None = None

    def classes(self) -> set[str]:
        """Return the classes of shape that the body has."""
        calls = [call for message in self.messages for call in message.tool_calls or ()]
        tools, choice = [tool.function for tool in self.tools or ()], self.tool_choice
        thinks = self.chat_template_kwargs and self.chat_template_kwargs.enable_thinking
        has_parts = any(isinstance(message.content, list) for message in self.messages)
        has_calls = bool(calls) or any(message.role == "tool" for message in self.messages)
        of_turns = {
            "plain": True,
            "empty": any(message.has_empty for message in self.messages),
            "parts": has_parts,
            "calls": has_calls,
            "parts_calls": has_parts and has_calls,
            "broken": not all(_is_object(call.function.arguments) for call in calls),
            "thinks": thinks is True,
            "thinks_not": thinks is False,
            f"effort_{self.reasoning_effort}": self.reasoning_effort is not None,
        }
        of_tools = {
            "bare": not all(tool.description and tool.parameters for tool in tools),
            "strict": any(tool.strict is not None for tool in tools),
            "no_call": bool(tools) and choice == "none",
            "forced_call": choice not in (None, "none", "auto"),
        }
        ending = WITH_TOOLS if tools else ""
        found = {name + ending for name, is_there in of_turns.items() if is_there}
        return found | {name for name, is_there in of_tools.items() if is_there}


_prompt_of: Final = msgspec.json.Decoder(_Prompt).decode


def prompt_classes(fields: Mapping[str, Any]) -> set[str]:
    """Return the classes of shape of a chat's body. Raises msgspec.ValidationError for one that has others."""
    return _prompt_of(encode_json({n: value for n, value in fields.items() if n not in _WITHOUT_PROMPT})).classes()


class EnginePrompts:
    """Renders the prompts of chats whose template the engine shares. Owned by `EngineTexts`."""

    def __init__(self) -> None:
        self._digests: dict[str, Digests] = {}
        """Digests of the probes, by the fingerprint of a model."""

    async def render(
        self, fields: Mapping[str, Any], model: ServedModel, candidates: Sequence[Candidate]
    ) -> Rendered | None:
        """Return the prompt of a chat's body; None if the engine must render it."""
        shared = await self._shared({candidate.member.chat_probes for candidate in candidates}, model)
        if not shared:
            return None
        try:
            classes = prompt_classes(fields)
        except msgspec.ValidationError:
            return None
        if not classes <= shared:
            return None
        return await _rendered(encode_json({**fields, "model": model.name}), model)

    async def shares_template(self, found: Set[Digests], model: ServedModel) -> bool:
        """Return whether all engines of a model, by their digests, have the gateway's template."""
        return await self._shared(found, model) >= _USUAL

    async def _shared(self, found: Set[Digests], model: ServedModel) -> Set[str]:
        """Return the classes whose ids are equal everywhere."""
        if not any(found):
            return frozenset()
        if model.fingerprint not in self._digests:
            own: dict[str, list[tuple[int, ...] | None]] = {name: [] for name in CHAT_PROBES}
            for name, bodies in CHAT_PROBES.items():
                for body in bodies:
                    rendered = await _rendered(encode_json(body | {"model": model.name}), model)
                    own[name].append(None if rendered is None else rendered.prompts[0])
            self._digests[model.fingerprint] = digests(own)
        equal = set(self._digests[model.fingerprint])
        return {name for name, _ in equal.intersection(*found)}


async def _rendered(body: bytes, model: ServedModel) -> Rendered | None:
    """Return a chat's prompt; None if it is refused, or does not fit. Control tokens of the client become text."""
    if model.template is None or model.tokenizer.is_of_engine:
        return None
    try:
        request = await CHAT.read(body, TextLimit)
        conversation = request.intent().conversation
        template = model.template_for(conversation) or model.template
        rendered = await template.render_in_slices(conversation, model.tokenizer.executor)
        max_tokens = model.max_model_len
        ids = await model.tokenizer.encode(rendered.text, client_offsets=rendered.client_offsets, most=max_tokens)
    except (ApiError, TemplateError, TooManyTokensError):
        return None
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    tokens_left = max_tokens - len(ids)
    longest = min(tokens_left, model.bundle.sampling_defaults.max_tokens or tokens_left) if asked is None else asked
    return Rendered((tuple(ids),), (longest,)) if ids and 0 < longest <= tokens_left else None


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except msgspec.DecodeError:
        return False
