"""A conversation in the form that chat templates read: messages and tools as plain objects."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from server.errors import InvalidRequestError
from server.event_loop import Steps
from server.schema.decoding import MAX_DEPTH, decode_object, measure
from server.schema.fields import FunctionDefinition, Message, TextPart
from server.schema.intent import Conversation

MAX_TEXT_BYTES: Final = 8 << 20
"""The limit of a request's texts in memory. A template makes several copies of them."""
TEXT_BYTES_PER_TOKEN: Final = 24
"""The same for each token of the context, if that is more."""
MAX_ARGUMENT_VALUES: Final = 20_000
"""JSON values in the tool calls of all messages."""
LINE_END: Final = "\n"
"""Between the parts of a text, where a template takes no parts."""
_INSTRUCTION: Final = """You can call functions to answer the user. They are, one JSON schema a line:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and arguments between tags, and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def template_messages(
    conversation: Conversation, *, knows_developer: bool, joint: str = LINE_END
) -> Steps[list[dict[str, Any]]]:
    """Return the messages, with `joint` between the parts of a text.

    Raises InvalidRequestError for arguments that no template could write.
    """
    messages: list[dict[str, Any]] = []
    num_values = 0
    for number, message in enumerate(conversation.messages):
        fields = _message(message, joint, knows_developer=knows_developer)
        calls = [
            (f"tool_calls[{at}].function", call.id, call.called) for at, call in enumerate(message.tool_calls or ())
        ]
        if not calls and (function := message.function_call) is not None:
            calls = [("function_call", function.name, function)]
        if calls:
            fields["tool_calls"] = written = []
        for name, id_, function in calls:
            field = conversation.param_of(number, f"{name}.arguments")
            num_values += yield from _num_values(function.arguments or "", field)
            if num_values > MAX_ARGUMENT_VALUES:
                refusal = f"The arguments of all tool calls hold more than {MAX_ARGUMENT_VALUES} JSON values."
                raise InvalidRequestError(refusal, param=field)
            called = {"name": function.name, "arguments": arguments_of(function.arguments, field)}
            written.append({"id": id_, "type": "function", "function": called})
        messages.append(fields)
        if number % 256 == 255:
            yield
    return messages


def _message(message: Message, joint: str, *, knows_developer: bool) -> dict[str, Any]:
    role = message.role
    if role == "developer" and not knows_developer:
        role = "system"
    elif role == "function":  # the deprecated spelling of a tool's answer
        role = "tool"
    # Templates that take the parts of other turns take one text as a result.
    joint = LINE_END if role == "tool" else joint
    fields: dict[str, Any] = {"role": role, "content": message_text(message.content, joint)}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    if message.reasoning_content is not None:
        fields["reasoning_content"] = message.reasoning_content
    return fields


def arguments_of(text: str | None, field: str) -> Any:
    """Parse OpenAI's JSON string of arguments: templates print arguments as JSON themselves.

    A text that holds no object is returned as it is. Raises InvalidRequestError for halves of surrogate pairs.
    """
    arguments = decode_object(text or "{}", field)
    return text if arguments is None else arguments


def _num_values(text: str, field: str) -> Steps[int]:
    """Return the JSON values in arguments, 0 for few: templates parse and write them in one go."""
    if text.count("[") + text.count("{") + text.count(",") <= MAX_DEPTH:
        return 0
    try:
        return (yield from measure(text.encode("utf-8", "replace"))).num_values
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message.replace("The body", "The JSON"), param=field) from None


def text_size(conversation: Conversation) -> tuple[int, int]:
    """Return the characters of the messages, and their bytes in memory: one wide character makes a whole text wide."""
    texts = list(texts_of(conversation))
    return sum(map(len, texts)), sum(map(sys.getsizeof, texts))


def texts_of(conversation: Conversation) -> Iterator[str]:
    """Yield the texts of the messages that may be long."""
    for message in conversation.messages:
        if isinstance(message.content, str):
            yield message.content
        else:
            yield from (text for part in message.content or () if (text := part.text or part.refusal))
        yield from filter(None, (message.name, message.tool_call_id, message.reasoning_content))
        calls = [(call.id, call.called) for call in message.tool_calls or ()]
        if message.function_call is not None:
            calls.append(("", message.function_call))
        for id_, function in calls:
            yield from (id_, function.name, function.arguments or "")


def message_text(content: str | Sequence[TextPart] | None, joint: str = LINE_END) -> str:
    """Join text parts, without empty ones: one string fits every template."""
    if content is None or isinstance(content, str):
        return content or ""
    return joint.join(filter(None, [part.text if part.text is not None else part.refusal for part in content]))


def template_tools(given: Sequence[FunctionDefinition], *, sorts_schemas: bool = False) -> list[dict[str, Any]] | None:
    """Return the tools, with nulls for no description and no parameters, as vLLM has them; None for no tools.

    `sorts_schemas`: equal schemas with other orders of keys are equal prompts.
    """
    tools = []
    for tool in given:
        function: dict[str, Any] = {"name": tool.name, "description": tool.description}
        function["parameters"] = tool.parameters
        if sorts_schemas:
            function["parameters"] = json.loads(json.dumps(tool.parameters, sort_keys=True))
        if tool.strict is not None:
            function["strict"] = tool.strict
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
