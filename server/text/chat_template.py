"""Render a model's chat template: messages in, the prompt's text out. A request never sends a template."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import jinja2
import jinja2.nodes
from jinja2.meta import find_undeclared_variables

from server.errors import InvalidRequestError
from server.event_loop import Steps, run_now, run_sliced
from server.schema.fields import Message
from server.schema.intent import Conversation
from server.schema.wishes import TOGGLES
from server.text.control_tokens import Mark, Marker, RenderedPrompt
from server.text.shape_probes import PROBE_WORDS, Finding, ShapeProbe, find_shapes
from server.text.shapes import Shapes, Turn, filled, repaired, without_marks
from server.text.switches import Grants, find_grants, question
from server.text.template_input import LINE_END, template_messages, template_tools, with_tools
from server.text.template_sandbox import RenderClock, StepTooLongError, TemplateEnvironment, TemplateError

MAX_STEP_S: Final = 0.03
"""Time that a template may hold the event loop without writing text."""
MAX_PROBE_S: Final = 0.2
"""Time of a probe."""
MAX_RENDERED_CHARS: Final = 16 * 1024 * 1024  # more than a million tokens have
_OWN_VARIABLES: Final = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("conversation", "tokenize", "return_dict", "return_tensors"),
        *("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"),
    }
)
"""Variables that the gateway sets, or that are no client's to set."""

_CONTINUATION_MARK: Final = "\u2063headstart-continue\u2063"


class ChatTemplate:
    """One compiled template. `render` is thread-safe, and pure except for `strftime_now`."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        forced: Mapping[str, Any] = MappingProxyType({}),
        is_strict: bool = False,
        sorts_schemas: bool = False,
    ) -> None:
        """`defaults`: the operator's values of switches; `forced`: those that no request changes. Raises TemplateError.

        `is_strict`: change nothing. `sorts_schemas`: see `template_tools`.
        """
        try:
            environment = TemplateEnvironment()
            tree = environment.parse(source)
            switches = find_undeclared_variables(tree)
            constants = [node.value for node in tree.find_all(jinja2.nodes.Const)]
            self._template = environment.bounded(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"chat_template: {error}") from error
        self._reserved = _OWN_VARIABLES | environment.globals.keys()
        self.switches = frozenset(switches - self._reserved)
        """The variables that the template reads, and that only a client or the operator sets."""
        self._constants = [value for value in constants if isinstance(value, str)]
        self._marker: Marker | None = None
        self._defaults = {**defaults, **forced}
        self._forced = forced
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._knows_developer = "developer" in source
        self.takes_tools = "tools" in source
        """False: tools and calls are written into messages, see `with_tools`."""
        self._is_strict = is_strict
        self.sorts_schemas = sorts_schemas
        self.shapes: Shapes = self._found(find_shapes(self._prepared))
        """The conversations that it refuses or loses."""
        self.grants: Grants = self._found(
            find_grants(self.switches - forced.keys(), self._constants, lists_tools=self.shapes.lists_tools)
        )
        """The values that it takes for wishes about thoughts."""
        self._joint = self._found_joint()

    def keep_as_text(self, control_tokens: Collection[str]) -> None:
        """Render control tokens that a request writes as text."""
        self._marker = Marker(control_tokens, self._constants)

    def plain_conversation(self) -> str:
        """Render a plain conversation; return "" when the template refuses it."""
        messages = [Message(role=role, content="-") for role in ("user", "assistant", "user")]
        try:
            return self.render(Conversation(messages=messages, add_generation_prompt=False)).text
        except InvalidRequestError:
            return ""

    def render(self, conversation: Conversation) -> RenderedPrompt:
        """Render a checked conversation. Raises InvalidRequestError when the template refuses the messages."""
        return run_now(self._rendering(conversation, RenderClock()))

    async def render_in_slices(self, conversation: Conversation, executor: Executor) -> RenderedPrompt:
        """Render on the event loop while the template keeps writing, else in a thread."""
        try:
            return await run_sliced(self._rendering(conversation, RenderClock(max_step_s=MAX_STEP_S)))
        except StepTooLongError:
            return await asyncio.get_running_loop().run_in_executor(executor, self.render, conversation)

    def _rendering(self, conversation: Conversation, clock: RenderClock) -> Steps[RenderedPrompt]:
        names = conversation.names
        messages = yield from template_messages(conversation, knows_developer=self._knows_developer, joint=self._joint)
        tools = template_tools(conversation.tools, sorts_schemas=self.sorts_schemas)
        given, tools = tools, filled(tools) if self.shapes.fills_tools else tools
        tool_repairs = () if tools == given else ("tool-fields",)
        kwargs, wish_repairs, ignored = self._switches(conversation)
        switches = kwargs
        digits = ""
        if self._marker is not None:
            mark = Mark()
            digits = mark.digits
            messages, tools, kwargs = yield from self._marker.marking([messages, tools, kwargs], mark)
        continued = conversation.is_continued
        if continued:
            messages[-1]["content"] += _CONTINUATION_MARK
        if self.shapes.marks:
            messages, tools, kwargs = yield from without_marks([messages, tools, kwargs])
        turns, repairs = repaired(self.shapes, self._prepared(messages, tools), has_tools=bool(tools))
        repairs = (*repairs, *tool_repairs, *wish_repairs)
        if repairs and self._is_strict:
            refusal = (
                f"The model's chat template does not take these messages: {', '.join(repairs)} (--strict-template)."
            )
            param = names.messages if len(repairs) > len(wish_repairs) else _field_of(conversation)
            raise InvalidRequestError(refusal, param=param)
        variables: dict[str, Any] = self._tokens | kwargs
        variables |= {"messages": turns, "tools": tools or ([] if self.shapes.lists_tools else None), "documents": None}
        variables["add_generation_prompt"] = not continued and conversation.add_generation_prompt
        del messages, turns, tools, kwargs
        try:
            text = yield from self._run(variables, clock, digits, names.messages)
        except InvalidRequestError as error:
            message, field = error.message.replace(digits, ""), self._refused_switches(conversation, switches)
            message = message.replace("these messages", field or "these messages", 1)
            raise InvalidRequestError(message, param=field or error.param) from error
        if continued:
            text, found, _ = text.rpartition(_CONTINUATION_MARK)
            if not found:
                refusal = "this model's template cannot continue a message."
                raise InvalidRequestError(refusal, param=names.continue_final_message)
        prompt = RenderedPrompt(text) if self._marker is None else (yield from self._marker.unmark(text, digits))
        return replace(prompt, repairs=repairs, ignored=ignored)

    def _prepared(self, messages: Sequence[Turn], tools: Sequence[dict[str, Any]] | None) -> Sequence[Turn]:
        return messages if self.takes_tools else with_tools(messages, tools or [])

    def _found(self, finding: Finding[Any]) -> Any:
        """Return what probes find."""
        text: str | None = None
        try:
            while True:
                text = self._probed(finding.send(text))
        except StopIteration as found:
            return found.value

    def _found_joint(self) -> str:
        """Return what the template writes between the parts of a text: white space, or nothing."""
        parts = [{"type": "text", "text": word} for word in PROBE_WORDS]
        text = self._probed(ShapeProbe([{"role": "user", "content": parts}], None)) or ""
        joint, found, _ = text.partition(PROBE_WORDS[0])[2].partition(PROBE_WORDS[1])
        return joint if found and not joint.strip() else LINE_END

    def _probed(self, probe: ShapeProbe, max_s: float = MAX_PROBE_S) -> str | None:
        """Return the text of a probe; None: the template refuses it."""
        clock = RenderClock(max_s)
        variables = {**self._tokens, **self._defaults, **(probe.switches or {})}
        variables |= {"messages": probe.messages, "tools": probe.tools}
        variables["add_generation_prompt"] = probe.switches is not None
        try:
            return run_now(self._run(variables, clock, "", "messages"))
        except InvalidRequestError:
            return None

    def _switches(self, chat: Conversation) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
        """Return the values of the switches, the names of those repaired, and the fields that change nothing."""
        given, wishes = chat.template_kwargs, chat.wishes
        if reserved := self._reserved.intersection(given):
            message = f"chat_template_kwargs takes no {min(reserved)}: it takes the switches of the template."
            raise InvalidRequestError(message, param="chat_template_kwargs")
        granted = self.grants.of(wishes.wish)
        ignored = [wishes.fields[part] for part in granted.ignored]
        unread = given.keys() - self.switches - wishes.switches
        ignored += [*wishes.unread, *[f"chat_template_kwargs.{name}" for name in given if name in unread]]
        unfound = [name for name, *_ in TOGGLES] if "thinks" in granted.ignored else []  # no probe has shown an effect
        given = {name: value for name, value in given.items() if name not in wishes.switches or name in unfound}
        values = {**self._defaults, **granted.switches, **given, **self._forced}
        values = {name: value for name, value in values.items() if name in self.switches}
        return values, granted.repairs, tuple(dict.fromkeys(ignored))

    def _refused_switches(self, chat: Conversation, switches: Mapping[str, Any]) -> str | None:
        """Return the field of switches that the template refuses in any conversation; None: it refuses this one."""
        probes = [question(given, lists_tools=self.shapes.lists_tools) for given in (switches, {})]
        if self._probed(probes[0], MAX_STEP_S) is not None or self._probed(probes[1], MAX_STEP_S) is None:
            return None
        return _field_of(chat)

    def _run(self, variables: dict[str, Any], clock: RenderClock, mark: str, param: str) -> Steps[str]:
        """Return the text with its marks, which do not count towards its length. Errors name `param`.

        Clears `variables`, which hold the marked texts.
        """
        parts: list[str] = []
        num_chars = 0
        clock.begin(variables)
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                num_chars += len(part) - len(mark) * part.count(mark)
                if num_chars > MAX_RENDERED_CHARS:
                    raise InvalidRequestError("the rendered messages are too long.", param=param)
                if len(parts) % 16 == 0:
                    yield from clock.rest()
        except jinja2.TemplateError as error:
            message = f"The model's chat template refuses these messages: {error}"
            raise InvalidRequestError(message, param=param) from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            message = f"The model's chat template cannot render these messages ({type(error).__name__})."
            raise InvalidRequestError(message, param=param) from error
        finally:
            clock.end()
        variables.clear()
        return "".join(parts)


def _field_of(chat: Conversation) -> str:
    """Return the field of a wish, for an error."""
    return next(iter(chat.wishes.fields.values()), "chat_template_kwargs")
