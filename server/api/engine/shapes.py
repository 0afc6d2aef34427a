"""Bodies for engines that write the text: messages in a shape that the engine's template takes.

The engine renders the probes, once for each model, when a body first has a shape that some template refuses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from server.api.engine.media import CHAT_PATH
from server.api.engine.prompts import Digests, EnginePrompts
from server.api.formatting import decoded, encode_json
from server.errors import MESSAGES_PATH, RESPONSES_PATH, InternalError, InvalidRequestError
from server.event_loop import run_sliced
from server.models.served_model import ServedModel
from server.schema.wishes import BUDGET_NAMES, EFFORT_NAMES, EFFORTS, TOGGLES, WORDS, Wish, Wishes
from server.text.shape_probes import TOOL_NAME, Finding, ShapeProbe, find_shapes
from server.text.shapes import CLOSE, OPEN, Shapes, Turn, as_text, filled, repaired, without_marks
from server.text.switches import Grants, find_grants
from worker.wire import EngineCall, Rendered

_T = TypeVar("_T")

TEXTS: Final = {CHAT_PATH: "messages", MESSAGES_PATH: "messages", RESPONSES_PATH: "input"}
EFFORT: Final = EFFORT_NAMES[0]
_ENGINES_BUDGET: Final = "thinking_token_budget"
"""Some engines hold the budget in this field themselves."""
_TRANSLATED: Final = frozenset({*WORDS} - {EFFORT, _ENGINES_BUDGET})
"""Words that engines read otherwise, or not at all."""
EFFORT_FIELDS: Final = {MESSAGES_PATH: "output_config.effort", RESPONSES_PATH: "reasoning.effort"}
"""Fields that hold the effort, where it is not a field of its own."""
LEADS: Final = {MESSAGES_PATH: "system", RESPONSES_PATH: "instructions"}
"""Fields that hold the system message."""
_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
"""The last two are of chats. A turn of another role is refused by the template, in its own words."""
_ALL: Final = Shapes(
    turns="parted",
    first_user=True,
    fills=frozenset({"user", "assistant", "system", "tool"}),
    second_system=True,
    late_system=True,
    developer=True,
    orphans=True,
    late_results=True,
    answered_results=True,
    missing_results=True,
    lists_arguments=True,
    short_ids=True,
)
Render = Callable[[EngineCall], Awaitable[Rendered]]


class EngineShapes:
    """The shapes of engines' templates. Owned by `EngineTexts`."""

    def __init__(self, prompts: EnginePrompts, *, is_strict: bool) -> None:
        """`is_strict`: refuse what a template does not take."""
        self._prompts = prompts
        self._is_strict = is_strict
        self._known: dict[tuple[str, frozenset[Digests]], tuple[Shapes, Grants]] = {}

    async def repaired(
        self, path: str, fields: dict[str, Any], model: ServedModel, digests: frozenset[Digests], render: Render
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the fields of a body, and the names of the repairs.

        `digests` identify the templates of its engines. Raises ApiError.
        """
        turns = _turns(path, fields)
        if turns is None:
            return fields, ()
        tools = decoded(fields.get("tools"))
        filled_tools = _filled(path, tools)
        choices = [replace(_ALL, counts_tools=counts) for counts in (False, True)]
        possible = {name for shapes in choices for name in repaired(shapes, turns, has_tools=True)[1]}
        has_marks = any(bracket in encode_json(turns).decode() for bracket in (OPEN, CLOSE))
        has_system = turns[:1] and turns[0]["role"] in ("system", "developer")
        if not (possible or has_marks or has_system or filled_tools != tools):
            return fields, ()
        shapes, _ = await self._found(model, digests, render)
        if has_marks and shapes.marks:
            turns = [*await run_sliced(without_marks(turns))]
        changed, repairs = repaired(replace(shapes, thoughts="reasoning_content"), turns, has_tools=bool(tools))
        if repairs or has_marks:
            kept = {name: item for name, item in fields.items() if name != LEADS.get(path)}
            fields = kept | _body(path, changed)
        if shapes.fills_tools and filled_tools != tools:
            fields, repairs = {**fields, "tools": filled_tools}, (*repairs, "tool-fields")
        if repairs and self._is_strict:
            message = f"The model's chat template does not take {', '.join(repairs)} (--strict-template)."
            raise InvalidRequestError(message, param=TEXTS[path])
        return fields, repairs

    async def granted(
        self, path: str, fields: dict[str, Any], model: ServedModel, digests: frozenset[Digests], render: Render
    ) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
        """Return the fields with wishes about thoughts as the engine's template takes them.

        Returns the names of those changed, and the fields that change nothing. Raises ApiError.
        """
        holder, _, name = EFFORT_FIELDS.get(path, EFFORT).rpartition(".")
        kwargs, holding = decoded(fields.get("chat_template_kwargs")) or {}, fields
        if holder:
            holding = decoded(fields.get(holder)) or {}
        if not isinstance(kwargs, dict) or not isinstance(holding, dict):  # the engine refuses it in its own words
            return fields, (), ()
        wishes, forced = Wishes(), model.forced_kwargs
        wishes.add_switches({each: value for each, value in kwargs.items() if model.template_kwargs.get(each) != value})
        if (effort := decoded(holding.get(name))) in EFFORTS:
            wishes.add(effort, EFFORT_FIELDS.get(path, EFFORT))
        if path == CHAT_PATH:
            wishes.add_words({word: decoded(fields.get(word)) for word in WORDS if word != EFFORT})
            fields = {field: value for field, value in fields.items() if field not in _TRANSLATED}
        if wishes.wish == Wish():
            return fields, (), tuple(wishes.unread)
        _, grants = await self._found(model, digests, render)
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
        if effort is not None or holding.get(name) is not None:
            holding = {**holding, name: None if EFFORT in forced else effort}
            fields = fields | ({holder: holding} if holder else {name: holding[name]})
        ignored = {part: wishes.fields[part] for part in granted.ignored}
        if ignored.get("budget") == _ENGINES_BUDGET:
            del ignored["budget"]
        return fields, granted.repairs, (*ignored.values(), *wishes.unread)

    async def _found(self, model: ServedModel, digests: frozenset[Digests], render: Render) -> tuple[Shapes, Grants]:
        """Return what the engine's template takes."""
        key = (model.fingerprint, digests)
        if model.template is not None and await self._prompts.shares_template(digests, model):
            return model.template.shapes, model.template.grants
        if key not in self._known:
            ask = partial(_probed, model=model, render=render)
            shapes = await ask(find_shapes(lambda turns, _: turns))
            names = {*EFFORT_NAMES, *BUDGET_NAMES, *[name for name, _, _ in TOGGLES]} - model.forced_kwargs.keys()
            self._known[key] = shapes, await ask(find_grants(names, None, lists_tools=False))
        return self._known[key]


async def _probed(finding: Finding[_T], model: ServedModel, render: Render) -> _T:
    text = None
    try:
        while True:
            text = await _text(finding.send(text), model, render)
    except StopIteration as found:
        result: _T = found.value
        return result


async def _text(probe: ShapeProbe, model: ServedModel, render: Render) -> str | None:
    """Return what the engine's template writes for a probe; None if it refuses it."""
    body = _body(CHAT_PATH, probe.messages) | {"max_tokens": 1} | ({"model": model.adapter} if model.adapter else {})
    body |= {"tools": probe.tools} if probe.tools else {}
    switches = {**model.template_kwargs, **(probe.switches or {}), **model.forced_kwargs}
    if EFFORT in switches:
        body[EFFORT] = switches.pop(EFFORT)
    body |= {"chat_template_kwargs": switches} if switches else {}
    try:
        rendered = await render(EngineCall(CHAT_PATH, encode_json(body)))
    except (InvalidRequestError, InternalError):
        return None
    if model.tokenizer.is_engine_only:  # its text is unknown: all of it is taken as shown
        return f"{TOOL_NAME}{encode_json(probe.messages).decode()}{rendered.prompts[0]}"
    return model.tokenizer.decode(rendered.prompts[0])


def _turns(path: str, fields: Mapping[str, Any]) -> list[Turn] | None:
    """Return the turns of a body; None for one of another form, which the engine refuses in its own words.

    `own` are the blocks and items that a turn of Messages or Responses is made of.
    """
    lead, messages = (decoded(fields.get(names.get(path, ""))) for names in (LEADS, TEXTS))
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return None
    turns: list[Turn] = [{"role": "system", "content": lead}] if lead else []
    for message in messages:
        if path == RESPONSES_PATH and (message.get("type") or "message") != "message":
            _add_item(turns, message)
            continue
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls") or []
        is_known = role in (_ROLES if path == CHAT_PATH else _ROLES[:4]) and isinstance(calls, list)
        if not is_known or not all(isinstance(call, dict) for call in calls):
            return None
        if path == MESSAGES_PATH and isinstance(content, list) and _is_content(content):
            turns += _turns_of_blocks(role, content)
        elif path == RESPONSES_PATH:
            _add_message(turns, message)
        else:
            turns.append({**message, "content": content})
            if (thoughts := turns[-1].pop("reasoning", None)) is not None:  # which vLLM reads first
                turns[-1]["reasoning_content"] = thoughts
    return turns if all(_is_content(turn["content"]) for turn in turns) else None


def _filled(path: str, tools: Any) -> Any:
    """Return the tools with descriptions and parameters. Tools that the engine runs or refuses are kept."""
    if not isinstance(tools, list):
        return tools
    changed: list[Any] = []
    for tool in tools:
        if path == CHAT_PATH and isinstance(tool, dict) and isinstance(tool.get("function"), dict):
            tool = {**tool, "function": filled(tool["function"])}
        elif path == RESPONSES_PATH and isinstance(tool, dict) and tool.get("type") == "function":
            tool = filled(tool)
        elif path == MESSAGES_PATH and isinstance(tool, dict) and "input_schema" in tool:
            tool = filled(tool, "input_schema")
        changed.append(tool)
    return changed


def _is_content(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(part, dict) for part in value)
    return value is None or isinstance(value, str)


def _turns_of_blocks(role: str, blocks: list[dict[str, Any]]) -> list[Turn]:
    results = [block for block in blocks if block.get("type") == "tool_result"]
    turns: list[Turn] = []
    for block in results:
        turns.append(
            {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content"), "own": [block]}
        )
    others = [block for block in blocks if block.get("type") != "tool_result"]
    calls = [{"id": block.get("id")} for block in blocks if block.get("type") == "tool_use"]
    if others or not results:
        turns.append({"role": role, "content": others, "tool_calls": calls})
    return turns


def _add_message(turns: list[Turn], message: dict[str, Any]) -> None:
    """Add a message. Thoughts before it are of its turn."""
    turn = {"role": message["role"], "content": message.get("content"), "tool_calls": [], "own": [message]}
    is_assistants = turns and message["role"] == turns[-1]["role"] == "assistant"
    if is_assistants and not (turns[-1]["content"] or turns[-1]["tool_calls"]):
        turn["own"] = [*turns.pop()["own"], message]
    turns.append(turn)


def _add_item(turns: list[Turn], item: dict[str, Any]) -> None:
    """Add an item that is no message. Calls in a row, with the thoughts and the text before, are one turn."""
    if str(item["type"]).endswith("_output"):
        turns.append(
            {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output"), "own": [item]}
        )
        return
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": "", "tool_calls": [], "own": []})
    turns[-1]["own"].append(item)
    if "call_id" in item:
        turns[-1]["tool_calls"].append({"id": item["call_id"]})


def _body(path: str, turns: list[Turn]) -> dict[str, Any]:
    """Return the fields of a body that hold the turns."""
    written: list[Any] = []
    for turn in turns:
        if path == RESPONSES_PATH:
            written += _items(turn)
        elif path == MESSAGES_PATH:
            written.append(_message_of_blocks(turn))
        else:
            written.append({**turn, "tool_calls": _calls(turn)} if turn.get("tool_calls") else turn)
    return {TEXTS[path]: written}


def _items(turn: Turn) -> list[dict[str, Any]]:
    """Return the items of a turn. Its content is that of its first message."""
    content, own = turn["content"], turn.get("own", [])
    if turn["role"] == "tool":
        [item] = own or [{"type": "function_call_output"}]
        return [{**item, "call_id": turn["tool_call_id"], "output": content}]
    message: dict[str, Any] | None = {"type": "message", "role": turn["role"], "content": content}
    calls, items = iter(turn.get("tool_calls") or ()), []
    for item in own:
        if (item.get("type") or "message") != "message":
            items.append({**item, "call_id": next(calls)["id"]} if "call_id" in item else item)
        elif message is not None:
            items.append(item | message)
            message = None
    if message is not None and (content or not own):
        items.insert(0, message)
    return items


def _message_of_blocks(turn: Turn) -> dict[str, Any]:
    content = turn["content"]
    if turn["role"] == "tool":
        [block] = turn.get("own") or [{"type": "tool_result"}]
        block = {**block, "tool_use_id": turn["tool_call_id"]}
        return {"role": "user", "content": [block if content is None else {**block, "content": content}]}
    if isinstance(content, list):
        calls = iter(turn.get("tool_calls") or ())
        content = [
            {**block, "id": next(calls)["id"]} if block.get("type") == "tool_use" else block for block in content
        ]
    return {"role": turn["role"], "content": content}


def _calls(turn: Turn) -> list[Any]:
    calls = []
    for call in turn["tool_calls"]:
        if isinstance(function := call.get("function"), dict) and "arguments" in function:
            call = {**call, "function": {**function, "arguments": as_text(function["arguments"])}}
        calls.append(call)
    return calls
