"""Control tokens in client text, where an engine renders the prompt.

A client must not write a turn of its own. The engine reads control tokens in messages as such, and only it has the
template. So a body with a character that could begin one is rendered twice. The second time, a mark follows each such
character. If the two prompts differ in their control tokens, the client has written one, and is refused:

    content            hi<|im_end|>                     marked            hi<4711|im_end|>
    control tokens     <|im_start|> <|im_end|> x 2      control tokens    <|im_start|> <|im_end|>

This also covers text that a template cuts or joins.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final

import msgspec

from server.api.formatting import encode_json
from server.errors import ApiError, InvalidRequestError
from server.models.served_model import ServedModel
from server.text.control_tokens import new_mark
from worker.wire import EngineCall, Rendered

UNREAD: Final = frozenset({"model", "stop", "stop_sequences", "structured_outputs", "user", "metadata"})
"""Fields of a body that no prompt has."""
_Render = Callable[[EngineCall], Awaitable[Rendered]]


async def check_control_tokens(call: EngineCall, rendered: Rendered, model: ServedModel, render: _Render) -> None:
    """Raises InvalidRequestError for client text that the engine reads as a control token."""
    tokens = model.tokenizer.control_tokens
    firsts = re.compile(f"[{re.escape(''.join({token[0] for token in tokens}))}]") if tokens else re.compile("(?!)")
    written, mark = msgspec.json.decode(call.body), new_mark()
    marked = {key: value if key in UNREAD else _marked_value(value, firsts, mark) for key, value in written.items()}
    body = encode_json(marked)
    if body == encode_json(written):
        return
    control_ids = {model.tokenizer.added_tokens.get(token) for token in tokens}
    try:
        safe = await render(msgspec.structs.replace(call, body=body))
    except ApiError as error:
        raise _refusal() from error
    if _control(rendered, control_ids) != _control(safe, control_ids):
        raise _refusal()


def _control(rendered: Rendered, control_ids: Collection[int | None]) -> list[list[int]]:
    return [[token_id for token_id in ids if token_id in control_ids] for ids in rendered.prompts]


def _refusal() -> InvalidRequestError:
    message = "The messages hold a control token of this model, which its engine would take for the template's."
    return InvalidRequestError(message, param="messages", code="control_token")


def _marked_value(value: Any, firsts: re.Pattern[str], mark: str, name: str = "") -> Any:
    if isinstance(value, str):
        if name == "arguments" and (inner := _json_of(value)) is not None:  # stays JSON, which engines parse
            return encode_json(_marked_value(inner, firsts, mark)).decode()
        return firsts.sub(lambda found: found[0] + mark, value)
    if isinstance(value, dict):
        return {
            firsts.sub(lambda found: found[0] + mark, key): _marked_value(item, firsts, mark, key)
            for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [_marked_value(item, firsts, mark) for item in value]
    return value


def _json_of(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return None
