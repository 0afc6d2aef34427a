"""Bodies for engines that write the text: messages in a shape that the engine's template takes.

The engine renders the probes, once for each model, when a body first has a shape that some template refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import Struct

from server.api.engine.media import CHAT_PATH
from server.api.engine.prompts import EnginePrompts
from server.api.engine.rendering import Digests, EngineRenderer
from server.api.formatting import encode_json
from server.errors import InternalError, InvalidRequestError
from server.event_loop import run_sliced
from server.models.served_model import ServedModel
from server.schema.wishes import BUDGET_NAMES, EFFORT_NAMES, EFFORTS, TOGGLES, WORDS, Wish, Wishes
from server.text.shape_probes import TOOL_NAME, Finding, ShapeProbe, find_shapes
from server.text.shapes import CLOSE, OPEN, Shapes, Turn, as_text, filled, repaired, without_marks
from server.text.switches import Grants, find_grants
from worker.wire import EngineCall

_T = TypeVar("_T")
EFFORT: Final = EFFORT_NAMES[0]
_ENGINES_BUDGET: Final = "thinking_token_budget"
"""Some engines hold the budget in this field themselves."""
_TRANSLATED: Final = frozenset({*WORDS} - {EFFORT, _ENGINES_BUDGET})
"""Words that engines read otherwise, or not at all."""
_FLAGS: Final[dict[str, Any]] = {each.name: True for each in fields_of(Shapes) if each.type == "bool"}
_ALL: Final = Shapes(turns="parted", fills=frozenset({"user", "assistant", "system", "tool"}), **_FLAGS)
"""Every shape that some template refuses."""


class EngineShapes:
    """The shapes of engines' templates. Owned by `EngineTexts`."""

    def __init__(self, renderer: EngineRenderer, prompts: EnginePrompts, *, is_strict: bool) -> None:
        """`is_strict`: refuse what a template does not take."""
        self._renderer = renderer
        self._prompts = prompts
        self._is_strict = is_strict
        self._known: dict[tuple[str, frozenset[Digests]], tuple[Shapes, Grants]] = {}

    async def repaired(self, fields: dict[str, Any], model: ServedModel) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the fields of a body, and the names of the repairs. Raises ApiError."""
        turns = _turns(fields)
        if turns is None:
            return fields, ()
        tools = fields.get("tools")
        filled_tools = filled(tools)
        choices = [replace(_ALL, counts_tools=counts) for counts in (False, True)]
        possible = {name for shapes in choices for name in repaired(shapes, turns, has_tools=bool(tools))[1]}
        has_marks = any(bracket in encode_json(turns).decode() for bracket in (OPEN, CLOSE))
        if not (possible or has_marks or filled_tools != tools):
            return fields, ()
        shapes, _ = await self._found(model)
        if has_marks and shapes.marks:
            turns = [*await run_sliced(without_marks(turns))]
        changed, repairs = repaired(replace(shapes, thoughts="reasoning_content"), turns, has_tools=bool(tools))
        if repairs or has_marks:
            fields = fields | _body(changed)
        if shapes.fills_tools and filled_tools != tools:
            fields, repairs = {**fields, "tools": filled_tools}, (*repairs, "tool-fields")
        if repairs and self._is_strict:
            message = f"The model's chat template does not take {', '.join(repairs)} (--strict-template)."
            raise InvalidRequestError(message, param="messages")
        return fields, repairs

    async def granted(
        self, fields: dict[str, Any], wishes: Wishes | None, model: ServedModel
    ) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
        """Return the fields with wishes about thoughts as the engine's template takes them.

        `wishes`: those of a body that was of another API.

        Returns the names of those changed, and the fields that change nothing. Raises ApiError.
        """
        kwargs, forced = fields.get("chat_template_kwargs") or {}, model.forced_kwargs
        if not isinstance(kwargs, dict):  # the engine refuses it in its own words
            return fields, (), ()
        if wishes is None:
            wishes = Wishes({each: value for each, value in kwargs.items() if model.template_kwargs.get(each) != value})
            if (asked := fields.get(EFFORT)) in EFFORTS:
                wishes.add(asked, EFFORT)
            wishes.add_words({word: fields.get(word) for word in WORDS if word != EFFORT})
            fields = {field: value for field, value in fields.items() if field not in _TRANSLATED}
        if wishes.wish == Wish():
            return fields, (), tuple(wishes.unread)
        _, grants = await self._found(model)
        granted = grants.of(wishes.wish)
        if granted.repairs and self._is_strict:
            message = f"The model's chat template does not take {', '.join(granted.repairs)} (--strict-template)."
            raise InvalidRequestError(message, param=next(iter(wishes.fields.values())))
        refused = wishes.switches if "thinking" in granted.repairs else wishes.switches.intersection(EFFORT_NAMES)
        switches = {each: value for each, value in kwargs.items() if each not in refused} | granted.switches
        effort = switches.pop(EFFORT, None) if EFFORT in granted.switches else None
        if not any(EFFORT in each.switches for each in grants.by_wish.values()):  # the engine may read it elsewhere
            effort = wishes.wish.effort
        if switches or forced or kwargs:
            fields = {**fields, "chat_template_kwargs": {**switches, **forced}}
        if effort is not None or fields.get(EFFORT) is not None:
            fields = {**fields, EFFORT: None if EFFORT in forced else effort}
        ignored = {part: wishes.fields[part] for part in granted.ignored}
        if _ENGINES_BUDGET in fields:
            ignored.pop("budget", None)
        return fields, granted.repairs, (*ignored.values(), *wishes.unread)

    async def _found(self, model: ServedModel) -> tuple[Shapes, Grants]:
        """Return what the engine's template takes."""
        key = (model.fingerprint, self._renderer.digests(model))
        if model.template is not None and await self._prompts.shares_template(model):
            return model.template.shapes, model.template.grants
        if key not in self._known:
            shapes = await self._probed(find_shapes(lambda turns, _: turns), model)
            names = {*EFFORT_NAMES, *BUDGET_NAMES, *[name for name, _, _ in TOGGLES]} - model.forced_kwargs.keys()
            self._known[key] = shapes, await self._probed(find_grants(names, None, lists_tools=False), model)
        return self._known[key]

    async def _probed(self, finding: Finding[_T], model: ServedModel) -> _T:
        text = None
        try:
            while True:
                text = await self._text(finding.send(text), model)
        except StopIteration as found:
            result: _T = found.value
            return result

    async def _text(self, probe: ShapeProbe, model: ServedModel) -> str | None:
        """Return what the engine's template writes for a probe; None if it refuses it."""
        body = _body(probe.messages) | {"max_tokens": 1} | ({"model": model.adapter} if model.adapter else {})
        body |= {"tools": probe.tools} if probe.tools else {}
        switches = {**model.template_kwargs, **(probe.switches or {}), **model.forced_kwargs}
        if EFFORT in switches:
            body[EFFORT] = switches.pop(EFFORT)
        body |= {"chat_template_kwargs": switches} if switches else {}
        try:
            rendered = await self._renderer.render(EngineCall(CHAT_PATH, encode_json(body)), model)
        except (InvalidRequestError, InternalError):
            return None
        if model.tokenizer.is_engine_only:  # its text is unknown: all of it is taken as shown
            return f"{TOOL_NAME}{encode_json(probe.messages).decode()}{rendered.prompts[0]}"
        return model.tokenizer.decode(rendered.prompts[0])


class _Message(Struct):
    """The form of a message that can be repaired. The engine refuses any other in its own words."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


def _turns(fields: Mapping[str, Any]) -> list[Turn] | None:
    """Return the turns of a body; None for one of another form."""
    messages: Any = fields.get("messages")
    try:
        msgspec.convert(messages, list[_Message])
    except msgspec.ValidationError:
        return None
    turns: list[Turn] = [{**message, "content": message.get("content")} for message in messages]
    for turn in turns:
        if (thoughts := turn.pop("reasoning", None)) is not None:  # which vLLM reads first
            turn["reasoning_content"] = thoughts
    return turns


def _body(turns: list[Turn]) -> dict[str, Any]:
    """Return the field of a body that holds the turns."""
    return {"messages": [{**turn, "tool_calls": _calls(turn)} if turn.get("tool_calls") else turn for turn in turns]}


def _calls(turn: Turn) -> list[Any]:
    calls = []
    for call in turn["tool_calls"]:
        if isinstance(function := call.get("function"), dict) and "arguments" in function:
            call = {**call, "function": {**function, "arguments": as_text(function["arguments"])}}
        calls.append(call)
    return calls
