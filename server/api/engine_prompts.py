"""Prompts of chats that the gateway renders, though the engine writes the answer: they save a call of `/render`.

At every worker of the model, the engine's ids of `CHAT_PROBES` must be the gateway's. Only bodies of the same kind as
these are rendered here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct

from cache.records import Candidate
from server.api.formatting import encode_json
from server.errors import ApiError
from server.models.served_model import ServedModel
from server.schema.decoding import TextLimit
from server.schema.requests import CHAT
from server.text.template_sandbox import TemplateError
from server.text.tokenizer import TooManyTokensError
from worker.common.chat_probes import CHAT_PROBES, probes_digest
from worker.wire import Rendered

_WITHOUT_PROMPT: Final = frozenset(
    {
        *("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "seed", "n"),
        *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "logprobs"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "top_logprobs", "cache_salt", "priority"),
        *("prompt_cache_key", "user", "metadata", "return_token_ids"),
    }
)
"""Fields of a body that no prompt depends on."""


class _Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


class _Function(Struct, forbid_unknown_fields=True):
    name: str
    description: str
    parameters: dict[str, Any]


class _Tool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Function


class _Kwargs(Struct, forbid_unknown_fields=True):
    enable_thinking: bool = True


class _Prompt(Struct, forbid_unknown_fields=True):
    messages: list[_Message]
    tools: list[_Tool] = []
    chat_template_kwargs: _Kwargs | None = None


_prompt_of: Final = msgspec.json.Decoder(_Prompt).decode


class EnginePrompts:
    """Renders the prompts of chats whose template the engine shares. Owned by `EngineTexts`."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        """Digests of the probes, by the fingerprint of a model."""

    async def render(
        self, body: bytes, fields: Mapping[str, Raw], model: ServedModel, candidates: Sequence[Candidate]
    ) -> Rendered | None:
        """Return the prompt of a chat; None if the engine must render it."""
        if not await self.shares_template({candidate.member.chat_probes for candidate in candidates}, model):
            return None
        try:
            _prompt_of(encode_json({name: value for name, value in fields.items() if name not in _WITHOUT_PROMPT}))
        except msgspec.ValidationError:
            return None
        return await _rendered(body, model)

    async def shares_template(self, digests: Set[str], model: ServedModel) -> bool:
        """Return whether all engines of a model, by their digests, have the gateway's template."""
        return "" not in digests and digests == {await self.digest(model)}

    async def digest(self, model: ServedModel) -> str:
        """Return the digest of the gateway's own ids of the probes."""
        if model.fingerprint not in self._digests:
            found = [await _rendered(encode_json(probe | {"model": model.name}), model) for probe in CHAT_PROBES]
            self._digests[model.fingerprint] = probes_digest(
                [None if each is None else each.prompts[0] for each in found]
            )
        return self._digests[model.fingerprint]


async def _rendered(body: bytes, model: ServedModel) -> Rendered | None:
    """Return a chat's prompt; None if it is refused, does not fit, or has a control token of the client."""
    if model.template is None or model.tokenizer.is_of_engine:
        return None
    try:
        request = await CHAT.read(body, TextLimit)
        conversation = request.intent().conversation
        template = model.template_for(conversation) or model.template
        rendered = await template.render_in_slices(conversation, model.tokenizer.executor)
        offsets, room = rendered.client_offsets, model.max_model_len
        ids = [] if offsets else await model.tokenizer.encode(rendered.text, client_offsets=offsets, room=room)
    except (ApiError, TemplateError, TooManyTokensError):
        return None
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    room = room - len(ids)
    longest = min(room, model.bundle.sampling_defaults.max_tokens or room) if asked is None else asked
    return Rendered((tuple(ids),), (longest,)) if ids and 0 < longest <= room else None
