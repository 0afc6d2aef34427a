"""Control tokens in client text, where an engine renders the prompt.

A client must not write a turn of its own. The engine reads control tokens in messages as such, and only it has the
template. So a body with a character of a control token is rendered twice. The second time, a digit replaces each such
character. If the two prompts differ in their control tokens, the client has written one, and is refused:

    content            hi<|im_end|>                    replaced          hi00im_end00
    control tokens     <|im_start|> <|im_end|> x 2     control tokens    <|im_start|> <|im_end|>

This also covers text that a template cuts or joins, whatever the template does. Engines and templates
compare names such as roles, so letters, digits and `_-./` stay. A control token of only such characters is
replaced as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final

import msgspec

from server.api.formatting import encode_json
from server.errors import ApiError, InvalidRequestError
from server.event_loop import Steps, run_sliced
from server.models.served_model import ServedModel
from server.schema.decoding import unsupported
from server.text.control_tokens import any_of, replaced_by_part
from server.text.tokenizer import Tokenizer
from worker.wire import EngineCall, Rendered

UNREAD: Final = frozenset({"model", "stop", "structured_outputs", "user", "metadata", "cache_salt"})
"""Fields of a body that no prompt has."""
LENGTHS: Final = ("max_tokens", "max_completion_tokens", "min_tokens", "truncate_prompt_tokens")
"""Fields that would refuse or cut a prompt of another length."""
_IN_NAMES: Final = re.compile(r"[\w\s./-]", re.ASCII)
_SAFE: Final = "0"
_Render = Callable[[EngineCall], Awaitable[Rendered]]


async def check_control_tokens(
    call: EngineCall, body: dict[str, Any], rendered: Rendered | None, model: ServedModel, render: _Render
) -> None:
    """Raises InvalidRequestError for client text that the engine reads as a control token, and for a template.

    `rendered`: the prompt of this body, whose text is the call's; None: it is not known.
    """
    kwargs = body.get("chat_template_kwargs")  # a template of the client could write any turn
    if body.get("chat_template") is not None or (isinstance(kwargs, dict) and kwargs.get("chat_template") is not None):
        raise unsupported("chat_template", "is not offered: the model's own template is used")
    replaced = await run_sliced(_Replacement(model.tokenizer).of_body(body))
    if replaced == body:
        return
    try:
        if rendered is None or body.get("truncate_prompt_tokens") is not None:
            rendered = await render(_with_any_length(call, body))
        safe = await render(_with_any_length(call, replaced))
    except ApiError as error:
        raise _refusal() from error
    control_ids = {model.tokenizer.added_tokens.get(token) for token in model.tokenizer.control_tokens}
    if _control(rendered, control_ids) != _control(safe, control_ids):
        raise _refusal()


def _with_any_length(call: EngineCall, body: dict[str, Any]) -> EngineCall:
    """Return a call of a body that asks for one token, so that a slightly longer prompt fits too."""
    kept = {name: value for name, value in body.items() if name not in LENGTHS}
    return msgspec.structs.replace(call, body=encode_json(kept | {"max_tokens": 1}))


def _control(rendered: Rendered, control_ids: Collection[int | None]) -> list[list[int]]:
    return [[token_id for token_id in ids if token_id in control_ids] for ids in rendered.prompts]


def _refusal() -> InvalidRequestError:
    message = "The messages hold a control token of this model, which its engine would take for the template's."
    return InvalidRequestError(message, param="messages", code="control_token")


class _Replacement:
    """Replaces in texts what a control token could be made of, in steps."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        chars = {char for token in tokenizer.control_tokens for char in token if not _IN_NAMES.match(char)}
        parts = [f"[{re.escape(''.join(sorted(chars)))}]"] if chars else []
        words = [token for token in tokenizer.control_tokens if token.strip() and all(map(_IN_NAMES.match, token))]
        parts += [any_of(words).pattern] if words else []
        parts += [r"[^\x00-\x7f]"] if tokenizer.can_spell_control else []
        self._pattern = re.compile("|".join(parts) or "(?!)", re.IGNORECASE if tokenizer.can_spell_control else 0)
        self._lookahead_chars = max(map(len, words), default=1)

    def of_body(self, body: dict[str, Any]) -> Steps[dict[str, Any]]:
        replaced = {}
        for name, value in body.items():
            replaced[name] = value if name in UNREAD else (yield from self._of_value(value))
        return replaced

    def _of_value(self, value: Any, name: str = "") -> Steps[Any]:
        if isinstance(value, str):
            return (yield from (self._of_json(value) if name == "arguments" else self._of_text(value)))
        if isinstance(value, dict):
            replaced = {}
            for key, item in value.items():
                replaced[(yield from self._of_text(key))] = yield from self._of_value(item, key)
            return replaced
        if isinstance(value, Sequence):
            items = []
            for item in value:
                items.append((yield from self._of_value(item)))
            return items
        return value

    def _of_text(self, text: str) -> Steps[str]:
        return (yield from replaced_by_part(self._pattern, text, self._lookahead_chars, lambda match: _SAFE))

    def _of_json(self, text: str) -> Steps[str]:
        """Return a text that stays JSON, which engines parse, if it is JSON."""
        try:
            value = msgspec.json.decode(text)
            safe = yield from self._of_value(value)
        except (msgspec.MsgspecError, RecursionError):
            return (yield from self._of_text(text))
        return text if safe == value else encode_json(safe).decode()
