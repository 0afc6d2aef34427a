"""Find how a model writes calls and reasoning: by its chat template, else by the tokens of its vocabulary.

A template that mentions markers may have taken them from another family. So it renders a call, which the format has to
read.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

from server.config import GatewayConfig
from server.errors import InvalidRequestError
from server.schema.fields import FunctionCall, FunctionDefinition, Message, ToolCall
from server.schema.intent import Conversation
from server.text.chat_template import ChatTemplate
from server.text.formats import FORMATS, formats_of, with_calls_of
from server.text.formats.base import ToolFormat
from server.text.formats.reasoning import THOUGHT_FORMATS, ThoughtFormat, thoughts_of
from server.text.output_parser import OutputParser, OutputRules
from server.text.tokenizer import Tokenizer
from worker.wire import TokenizerBundle

_QUESTION: Final = "What is the weather in Reykjavik?"
_CITY: Final = "Tegucigalpa"
_CALL: Final = FunctionCall(name="get_weather", arguments=json.dumps({"city": _CITY}))


def formats(
    bundle: TokenizerBundle, tokenizer: Tokenizer, template: ChatTemplate | None, config: GatewayConfig
) -> tuple[ToolFormat | None, ThoughtFormat | None, bool]:
    """Return how a model writes calls and reasoning, and whether it was trained on the calls."""
    source = bundle.tool_template or bundle.chat_template or ""
    tokens = tokenizer.added_tokens
    takes_tools = template is not None and template.takes_tools
    known = _tool_format(source, tokens, template) if template is not None else None
    if config.tool_parser is not None:
        known = FORMATS[config.tool_parser]
    tools = known
    if not takes_tools:  # the tools are written into a message that asks for Hermes' form
        tools = FORMATS["hermes"] if known is None else with_calls_of(known, FORMATS["hermes"])
    thoughts = thoughts_of(source, tokens)
    if config.reasoning is not None:
        thoughts = THOUGHT_FORMATS.get(config.reasoning)
    return tools, thoughts, known is not None


def _tool_format(source: str, tokens: Collection[str], template: ChatTemplate) -> ToolFormat | None:
    """Return the first possible format that reads the template's own call."""
    written = _written_call(template, tokens) if template.takes_tools else ""
    possible = formats_of(source, tokens if template.takes_tools else ())
    return next((each for each in possible if not written or _reads(each, written)), None)


def _written_call(template: ChatTemplate, tokens: Collection[str]) -> str:
    """Return what a template writes for a call, without the header of the turn; "" when it refuses or omits one.

    The header is what the prompt of an answer begins with too, cut between tokens or lines.
    """
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "a city"}}}
    tool = FunctionDefinition(name=_CALL.name, description="Return the weather.", parameters=parameters)
    call = ToolCall(id="call00001", function=_CALL)  # Mistral's templates want nine letters or digits
    messages = [Message(role="user", content=_QUESTION), Message(role="assistant", content="", tool_calls=[call])]
    try:
        asked = template.render(Conversation(messages=messages[:1], tools=[tool])).text
        text = template.render(Conversation(messages=messages, tools=[tool], add_generation_prompt=False)).text
    except InvalidRequestError:
        return ""
    header, written = asked.rpartition(_QUESTION)[2], text.rpartition(_QUESTION)[2]
    same = next((at for at, pair in enumerate(zip(header, written, strict=False)) if pair[0] != pair[1]), len(header))
    if same < len(header):
        starts = [written.rfind(token, 0, same + len(token)) for token in tokens]
        ends = [at + len(token) for at, token in zip(starts, tokens, strict=True) if at >= 0]
        same = max([written.rfind("\n", 0, same) + 1, *starts, *(end for end in ends if end <= same)])
    return written[same:] if _CITY in written else ""


def _reads(tools: ToolFormat, written: str) -> bool:
    """Return whether a format reads a call that begins as its own grammar would have it."""
    if tools.opens and tools.opens[0] not in written:
        return False
    deltas = OutputParser(OutputRules(tools=tools, tool_names=frozenset({_CALL.name}))).feed(written, last=True)
    names = [text for kind, text in deltas if kind == "call"]
    try:
        arguments = json.loads("".join(text for kind, text in deltas if kind == "arguments"))
    except ValueError:
        return False
    return names == [_CALL.name] and arguments == {"city": _CITY}
