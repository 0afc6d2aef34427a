"""Renders prompts of chats whose answer the engine writes: each saves a call of the engine's `/render`.

The gateway's template, or its version of Jinja, may differ from an engine's. So both render the same short
conversations (`CHAT_PROBES`), grouped by shape: with tools, with calls, with parts, and so on. The gateway renders a
body if its shapes gave equal token ids here and at all engines of the model. Other bodies go to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from server.api.engine.rendering import Digests, EngineRenderer
from server.api.formatting import encode_json
from server.api.prompts.limits import TokenLimits
from server.errors import ApiError
from server.models.served_model import ServedModel
from server.schema.decoding import TextLimit
from server.schema.fields import FunctionDefinition, SamplingFields
from server.schema.requests import CHAT
from worker.common.chat_probes import CHAT_PROBES, WITH_TOOLS, digests
from worker.wire import Rendered

_IN_PROMPT: Final = {"response_format", "truncate_prompt_tokens", "truncation_side"}
_NOT_IN_PROMPT: Final = {
    *({*SamplingFields.__struct_fields__} - _IN_PROMPT),
    *("max_completion_tokens", "logprobs", "top_logprobs", "parallel_tool_calls", "spaces_between_special_tokens"),
    *("stream_interval", "thinking_token_budget"),
}
"""Fields of a body that do not change the prompt."""
_USUAL: Final = frozenset({"plain", "plain+tools", "calls"})
"""The shapes in which templates differ most: with these equal, the templates are taken for the same."""


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
    name: str | None = None

    @property
    def has_empty(self) -> bool:
        """Return whether the content or a part of it is empty. Calls need no content."""
        if isinstance(self.content, list):
            return not all(part.text for part in self.content)
        return not self.content and not self.tool_calls


class _Function(FunctionDefinition, forbid_unknown_fields=True):
    """Any other field may be in the prompt."""


class _Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"] = "function"
    function: _Function


class _Prompt(Struct, forbid_unknown_fields=True):
    """The fields for which there are probes. A body with any other field is rendered by the engine."""

    messages: list[_Message]
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[Literal["enable_thinking"], bool | None] | None = None
    reasoning_effort: str | None = None

    def shapes(self) -> set[str]:
        """Return the shapes that the body has, by their names in `CHAT_PROBES`."""
        calls = [call for message in self.messages for call in message.tool_calls or ()]
        tools, choice = [tool.function for tool in self.tools or ()], self.tool_choice
        thinks = (self.chat_template_kwargs or {}).get("enable_thinking")
        has_parts = any(isinstance(message.content, list) for message in self.messages)
        has_calls = bool(calls) or any(message.role == "tool" for message in self.messages)
        ending = WITH_TOOLS if tools else ""
        found = {
            f"plain{ending}": True,
            f"empty{ending}": any(message.has_empty for message in self.messages),
            f"parts{ending}": has_parts,
            f"calls{ending}": has_calls,
            f"parts_calls{ending}": has_parts and has_calls,
            f"broken{ending}": not all(_is_object(call.function.arguments) for call in calls),
            f"named{ending}": any(message.name for message in self.messages),
            f"thinks{ending}": thinks is True,
            f"thinks_not{ending}": thinks is False,
            f"effort_{self.reasoning_effort}{ending}": self.reasoning_effort is not None,
            "bare": not all(tool.description and tool.parameters for tool in tools),
            "strict": any(tool.strict is not None for tool in tools),
            "no_call": bool(tools) and choice == "none",
            "forced_call": choice not in (None, "none", "auto"),
        }
        return {shape for shape, is_there in found.items() if is_there}


def shapes_of(fields: Mapping[str, Any]) -> set[str]:
    """Return the shapes of a chat's body. Raises msgspec.ValidationError for a field without probes."""
    return msgspec.convert({n: value for n, value in fields.items() if n not in _NOT_IN_PROMPT}, _Prompt).shapes()


class EnginePrompts:
    """Renders the prompts of chats whose template the engine shares. Owned by `EngineTexts`."""

    def __init__(self, renderer: EngineRenderer) -> None:
        self._renderer = renderer
        self._digests: dict[str, Digests] = {}
        """Digests of the probes, by the fingerprint of a model."""

    async def render(self, fields: Mapping[str, Any], model: ServedModel) -> Rendered | None:
        """Return the prompt of a chat's body; None if the engine must render it."""
        shared = await self._shared(model)
        try:
            is_shared = bool(shared) and shapes_of(fields) <= shared
        except msgspec.ValidationError:
            is_shared = False
        return await _rendered(encode_json({**fields, "model": model.name}), model) if is_shared else None

    async def shares_template(self, model: ServedModel) -> bool:
        """Return whether all engines of a model have the gateway's template."""
        return await self._shared(model) >= _USUAL

    async def _shared(self, model: ServedModel) -> Set[str]:
        """Return the shapes whose probes have equal token ids here and at all engines."""
        engines = self._renderer.digests(model)
        if not any(engines):
            return frozenset()
        if model.fingerprint not in self._digests:
            own: dict[str, list[tuple[int, ...] | None]] = {}
            for shape, bodies in CHAT_PROBES.items():
                rendered = [await _rendered(encode_json(body | {"model": model.name}), model) for body in bodies]
                own[shape] = [None if each is None else each.prompts[0] for each in rendered]
            self._digests[model.fingerprint] = digests(own)
        return {shape for shape, _ in set(self._digests[model.fingerprint]).intersection(*engines)}


async def _rendered(body: bytes, model: ServedModel) -> Rendered | None:
    """Return a chat's prompt, and the most tokens of its answer. None: the engine must refuse it, or render it."""
    if model.template is None or model.tokenizer.is_engine_only:
        return None
    try:
        intent = (await CHAT.read(body, TextLimit)).intent()
        template = model.template_for(intent.conversation) or model.template
        rendered = await template.render_in_slices(intent.conversation, model.tokenizer.executor)
        limits = TokenLimits(intent.fields, intent.names.messages, max_tokens=intent.max_tokens)
        ids = await limits.prompt_tokens(rendered.text, model, client_offsets=rendered.client_offsets)
        return Rendered((tuple(ids),), (limits.token_budget(model, len(ids)),))
    except ApiError:
        return None


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except msgspec.DecodeError:
        return False
