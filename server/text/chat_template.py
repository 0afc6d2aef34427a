"""Render a model's own chat template in jinja2's immutable sandbox: messages in, the prompt's text out.

The template comes with the model's files and is code. It can neither reach Python's objects nor change its input. The
sandbox does not bound work, such as loops that write nothing or `'x' * 10**9`. So every loop checks the clock at each
turn, and products are bounded. A request can set known switches, but never send a template.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.nodes
import msgspec
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.errors import InvalidRequestError
from server.event_loop import Steps, run_now, run_sliced
from server.schema.decoding import MAX_DEPTH, measure
from server.schema.fields import FunctionCall, Message, TextPart, Tool
from server.schema.intent import Conversation
from server.text.call_ids import number_calls, writes_ids
from server.text.control_tokens import Marker, RenderedPrompt

MAX_RENDER_S: Final = 5.0
MAX_HOLD_S: Final = 0.03
"""Time that a template may hold the event loop without writing text."""
MAX_PRODUCT: Final = 1 << 20
"""Characters or items in a product, bits in a power."""
MAX_RENDERED_CHARS: Final = 16 * 1024 * 1024
MAX_TEXT_BYTES: Final = 8 << 20
"""The limit of a request's texts in memory. A template makes several copies of them."""
TEXT_BYTES_PER_TOKEN: Final = 24
"""The same for each token of the context, if that is more."""
MAX_ARGUMENT_VALUES: Final = 20_000
"""JSON values in the tool calls of all messages."""
ALLOWED_KWARGS: Final = frozenset(
    {"enable_thinking", "thinking", "reasoning_effort", "date_string", "tools_in_user_message"}
)
"""Switches that public templates read. Any other name could shadow a variable of the template."""

_INSTRUCTION: Final = """You can call functions to answer the user. They are, one JSON schema a line:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and arguments between tags, and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>"""
_CHECK: Final = "headstart_check_clock"
_CONTINUATION_MARK: Final = "\u2063headstart-continue\u2063"


class TemplateError(ValueError):
    """The model's template does not compile."""


class _GenerationTag(Extension):
    """Accept `{% generation %}`, which marks the assistant's part for training and means nothing in a prompt."""

    tags = {"generation"}  # noqa: RUF012 (the declaration of jinja2's own class)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as Hugging Face's renderer does: jinja2's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with the filters, tags and globals that chat templates use."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Raise TemplateRuntimeError for a product that is too large."""
        integers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and integers and left.bit_length() * abs(right) > MAX_PRODUCT:
            raise jinja2.TemplateRuntimeError("a power is too large")
        for text, times in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and isinstance(times, int) and len(text) * times > MAX_PRODUCT:
                raise jinja2.TemplateRuntimeError("a product is too long")
        return super().call_binop(context, operator, left, right)

    def bounded(self, tree: jinja2.nodes.Template) -> jinja2.Template:
        """Compile a template whose loops check the clock. Its variables include those of a `RenderClock`."""
        for loop in tree.find_all(jinja2.nodes.For):
            check = jinja2.nodes.Call(jinja2.nodes.Name(_CHECK, "load"), [], [], None, None)
            loop.body.insert(0, jinja2.nodes.ExprStmt(check).set_lineno(loop.lineno))
        template = self.from_string(tree)
        template.globals = dict(template.globals)  # renderings copy it: a plain dict is quick to copy
        return template


class HeldTooLongError(Exception):
    """The template wrote nothing for too long."""


class RenderClock:
    """Limits the time of one rendering. Every loop of the template checks it."""

    def __init__(self, max_s: float = MAX_RENDER_S, hold_s: float = float("inf")) -> None:
        """`hold_s`: the longest time between two calls of `rest`."""
        self._left_s, self._hold_s = max_s, hold_s
        self.begin()

    def begin(self) -> None:
        self._begun_s = time.monotonic()

    def rest(self) -> Steps[None]:
        """Pause the clock while others use the event loop."""
        self._left_s -= time.monotonic() - self._begun_s
        yield
        self.begin()

    def variables(self) -> dict[str, Any]:
        return {_CHECK: self._check}

    def _check(self) -> None:
        """Raise TemplateRuntimeError after `max_s`, HeldTooLongError after `hold_s`."""
        running_s = time.monotonic() - self._begun_s
        if running_s > self._left_s:
            raise jinja2.TemplateRuntimeError(f"it took more than {MAX_RENDER_S:g} s")
        if running_s > self._hold_s:
            raise HeldTooLongError


class ChatTemplate:
    """One compiled template. `render` is thread-safe, and pure except for `strftime_now`."""

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None) -> None:
        try:
            environment = TemplateEnvironment()
            tree = environment.parse(source)
            constants = [node.value for node in tree.find_all(jinja2.nodes.Const)]
            self._template = environment.bounded(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"chat_template: {error}") from error
        self._constants = [value for value in constants if isinstance(value, str)]
        self._marker: Marker | None = None
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._knows_developer = "developer" in source
        self._writes_ids = writes_ids(source)
        self.takes_tools = "tools" in source
        """False: tools and calls are written into messages, see `with_tools`."""

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
            return await run_sliced(self._rendering(conversation, RenderClock(hold_s=MAX_HOLD_S)))
        except HeldTooLongError:
            return await asyncio.get_running_loop().run_in_executor(executor, self.render, conversation)

    def _rendering(self, conversation: Conversation, clock: RenderClock) -> Steps[RenderedPrompt]:
        yield from _check_arguments(conversation)
        names, messages = conversation.names, []
        for number, message in enumerate(conversation.messages, 1):
            messages.append(self._message(message))
            if number % 256 == 0:
                yield
        if self._writes_ids:
            number_calls(messages)
        tools = _tools(conversation.tools)
        kwargs = _template_kwargs(conversation)
        mark = ""
        if self._marker is not None:
            others = msgspec.json.encode([tools, kwargs]).decode() if tools or kwargs else ""
            mark = yield from self._marker.mark_for([*_texts(conversation), others])
            messages, tools, kwargs = yield from self._marker.marking([messages, tools, kwargs], mark)
        if not self.takes_tools:
            messages = with_tools(messages, tools or [])
        continued = conversation.is_continued
        if continued:
            messages[-1]["content"] += _CONTINUATION_MARK
        variables: dict[str, Any] = {
            **self._tokens,
            **kwargs,
            **clock.variables(),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": not continued and conversation.add_generation_prompt,
        }
        del messages, tools, kwargs
        try:
            text = yield from self._run(variables, clock, mark, names.messages)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message.replace(mark, ""), param=error.param) from error
        if continued:
            text, found, _ = text.rpartition(_CONTINUATION_MARK)
            if not found:
                refusal = "this model's template cannot continue a message."
                raise InvalidRequestError(refusal, param=names.continue_final_message)
        return RenderedPrompt(text) if self._marker is None else (yield from self._marker.unmark(text, mark))

    def _run(self, variables: dict[str, Any], clock: RenderClock, mark: str, param: str) -> Steps[str]:
        """Return the text with its marks, which do not count towards its length. Errors name `param`.

        Clears `variables`, which hold the marked texts.
        """
        parts: list[str] = []
        num_chars = 0
        clock.begin()
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                num_chars += len(part) - len(mark) * part.count(mark)
                if num_chars > MAX_RENDERED_CHARS:
                    raise InvalidRequestError("the rendered messages are too long.", param=param)
                if len(parts) % 16 == 0:
                    yield from clock.rest()
        except InvalidRequestError:
            raise
        except jinja2.TemplateError as error:
            message = f"The model's chat template refuses these messages: {error}"
            raise InvalidRequestError(message, param=param) from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            message = f"The model's chat template cannot render these messages ({type(error).__name__})."
            raise InvalidRequestError(message, param=param) from error
        variables.clear()
        return "".join(parts)

    def _message(self, message: Message) -> dict[str, Any]:
        role = message.role
        if role == "developer" and not self._knows_developer:
            role = "system"
        elif role == "function":  # the deprecated spelling of a tool's answer
            role = "tool"
        fields: dict[str, Any] = {"role": role, "content": message_text(message.content)}
        for name in ("name", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                fields[name] = value
        if (reasoning := message.reasoning_content or message.reasoning) is not None:
            fields["reasoning_content"] = reasoning
        if message.tool_calls:
            fields["tool_calls"] = [_call(call.id, call.called) for call in message.tool_calls]
        elif message.function_call:
            fields["tool_calls"] = [_call(message.function_call.name, message.function_call)]
        return fields


def text_size(conversation: Conversation) -> tuple[int, int]:
    """Return the characters of the messages, and their bytes in memory: one wide character makes a whole text wide."""
    num_chars = num_bytes = 0
    for text in _texts(conversation):
        num_chars += len(text)
        num_bytes += sys.getsizeof(text)
    return num_chars, num_bytes


def _texts(conversation: Conversation) -> Iterator[str]:
    """Yield the texts of the messages that may be long."""
    for message in conversation.messages:
        if isinstance(message.content, str):
            yield message.content
        else:
            yield from (text for part in message.content or () if (text := part.text or part.refusal))
        yield from filter(None, (message.name, message.tool_call_id, message.reasoning_content, message.reasoning))
        calls = [(call.id, call.called) for call in message.tool_calls or ()]
        if message.function_call is not None:
            calls.append(("", message.function_call))
        for id_, function in calls:
            yield from (id_, function.name, function.arguments or "")


def message_text(content: str | Sequence[TextPart] | None) -> str:
    """Join text parts by line ends: text-only templates take one string."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text if part.text is not None else part.refusal or "" for part in content)


def _check_arguments(conversation: Conversation) -> Steps[None]:
    """Raise InvalidRequestError for too many JSON values in arguments: templates parse and write them in one go."""
    num_values = 0
    for number, message in enumerate(conversation.messages):
        calls = enumerate(message.tool_calls or ())
        functions = {f"tool_calls[{place}].function": call.called for place, call in calls}
        if message.function_call is not None:
            functions["function_call"] = message.function_call
        for name, function in functions.items():
            text, param = function.arguments or "", conversation.place(number, f"{name}.arguments")
            if text.count("[") + text.count("{") + text.count(",") <= MAX_DEPTH:
                continue
            try:
                shape = yield from measure(text.encode("utf-8", "replace"))
            except InvalidRequestError as error:
                raise InvalidRequestError(error.message.replace("The body", "The JSON"), param=param) from None
            num_values += shape.num_values
            if num_values > MAX_ARGUMENT_VALUES:
                refusal = f"The arguments of all tool calls hold more than {MAX_ARGUMENT_VALUES} JSON values."
                raise InvalidRequestError(refusal, param=param)


def _call(id_: str, function: FunctionCall) -> dict[str, Any]:
    """Parse OpenAI's JSON string of arguments: templates print arguments as JSON themselves."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        arguments = function.arguments
    return {"id": id_, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _tools(given: Sequence[Tool]) -> list[dict[str, Any]] | None:
    tools = []
    for tool in given:
        assert tool.function is not None, "checked with the request"
        function: dict[str, Any] = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
        tools.append({"type": "function", "function": function})
    return tools or None


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write tools into the system message, and calls and results as text, for a template without tools.

    The answer is read as `hermes`.
    """
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    instruction = _INSTRUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{instruction}"}, *plain[1:]]
    return [{"role": "system", "content": instruction}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join(part for part in (message["content"], *written) if part)
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _template_kwargs(conversation: Conversation) -> dict[str, Any]:
    kwargs = dict(conversation.template_kwargs)
    for name in kwargs:
        if name not in ALLOWED_KWARGS:
            message = f"chat_template_kwargs takes only {', '.join(sorted(ALLOWED_KWARGS))}."
            raise InvalidRequestError(message, param="chat_template_kwargs")
    if conversation.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", conversation.reasoning_effort)
        if conversation.reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
    return kwargs
