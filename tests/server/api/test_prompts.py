"""Where the prompts of two bodies part: every kind of volatile text, in every API and in two kinds of template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
import pytest
from tokenizers import Tokenizer

from server.api.prompts import Parting, api_of, compare, read_prompt
from server.config import GatewayConfig
from server.errors import InvalidRequestError
from server.models.served_model import ServedModel, build_model
from tests.server.conftest import bundle_of

WITH_TOOLS: Final = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|im_start|>system\\n' + system | trim }}"
    "{% if tools %}{{ '\\n\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content.split('</think>')[-1] }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' }}{{ call.function | tojson }}{{ '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
)
SYSTEM: Final = "You are a careful agent.\nAnswer in short sentences, and say when you do not know.\n"
SCHEMA: Final = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "limit": {"type": "integer", "maximum": 100}},
    "required": ["path"],
}
NAMES: Final = ("read", "write", "search")


@pytest.fixture(scope="module", params=["without tools", "with tools"])
def model(request: pytest.FixtureRequest, raw_tokenizer: Tokenizer) -> Iterator[ServedModel]:
    """A model whose template has no tools, which go into the system message, and one whose template has."""
    changes = {"chat_template": WITH_TOOLS} if request.param == "with tools" else {}
    with ThreadPoolExecutor(1) as executor:
        yield build_model(bundle_of(raw_tokenizer, **changes), executor, GatewayConfig(workers=("http://127.0.0.1:9",)))


def copied(value: Any) -> Any:
    """Return a copy in which no part stands twice."""
    return json.loads(json.dumps(value))


def chat(system: str = SYSTEM, user: str = "Which files are there?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    tools = [
        {"type": "function", "function": {"name": name, "description": f"To {name} files.", "parameters": SCHEMA}}
        for name in NAMES
    ]
    return copied({"model": "tiny", "messages": messages, "tools": tools, **fields})


def responses(system: str = SYSTEM, user: str = "Which files are there?", **fields: Any) -> dict[str, Any]:
    tools = [
        {"type": "function", "name": name, "description": f"To {name} files.", "parameters": SCHEMA} for name in NAMES
    ]
    content = [{"type": "input_text", "text": user}]
    items = [{"type": "message", "role": "user", "content": content}]
    return copied({"model": "tiny", "instructions": system, "input": items, "tools": tools, **fields})


def messages(system: str = SYSTEM, user: str = "Which files are there?", **fields: Any) -> dict[str, Any]:
    tools = [{"name": name, "description": f"To {name} files.", "input_schema": SCHEMA} for name in NAMES]
    blocks = [
        {"type": "text", "text": "Be kind."},
        {"type": "text", "text": system, "cache_control": {"type": "ephemeral"}},
    ]
    turns = [{"role": "user", "content": [{"type": "text", "text": user}]}]
    body = {"model": "tiny", "max_tokens": 8, "system": blocks, "messages": turns, "tools": tools}
    return copied({**body, **fields})


def completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, **fields}


def changed(body: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """Return a copy with another value at a path."""
    copy = copied(body)
    place: Any = copy
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return copy


def reordered(value: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(value.items()))


CHAT_TOOL: Final = ("tools", 1, "function")
LONG: Final = SYSTEM * 3
CALL: Final = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path":"/srv/a/x"}'}}
CALLED: Final = chat(messages=[*chat()["messages"], {"role": "assistant", "content": "", "tool_calls": [CALL]}])
USED: Final = messages(
    messages=[
        *messages()["messages"],
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"limit": 7}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "it is empty today"}],
        },
    ]
)
THOUGHT: Final = "<think>Let me see.</think>The folder holds 5 files, and two of them are new since then."
ANSWERED: Final = chat(messages=[*chat()["messages"], {"role": "assistant", "content": THOUGHT}])
PAIRS: Final[dict[str, tuple[dict[str, Any], dict[str, Any], str, int | None, str]]] = {
    "chat, an ISO date": (
        chat(f"{LONG}Today is 2026-11-24."),
        chat(f"{LONG}Today is 2026-11-25."),
        "messages[0].content",
        len(LONG) + 18,
        "a date",
    ),
    "chat, a date in words": (
        chat(f"{LONG}It is Tuesday, November 24, 2026."),
        chat(f"{LONG}It is Tuesday, December 1, 2026."),
        "messages[0].content",
        len(LONG) + 15,
        "a date",
    ),
    "chat, a weekday": (
        chat("It is Monday. " + LONG),
        chat("It is Thursday. " + LONG),
        "messages[0].content",
        6,
        "a date",
    ),
    "chat, a time": (
        chat(f"{LONG}Now: 2026-11-24T13:59:08Z"),
        chat(f"{LONG}Now: 2026-11-24T13:59:41Z"),
        "messages[0].content",
        len(LONG) + 22,
        "a time",
    ),
    "chat, an id": (
        chat("Session 0f8fad5b-d9cb-469f-a165-70867728950e.\n" + LONG),
        chat("Session 7c9e6679-7425-40de-944b-e07fc1f90ae7.\n" + LONG),
        "messages[0].content",
        8,
        "an id",
    ),
    "chat, an id with the same ends": (
        chat("Session 0f8fad5b-d9cb-469f-a165-70867728950e.\n" + LONG),
        chat("Session 0f8fad5b-d9cb-4c9f-a165-70867728950e.\n" + LONG),
        "messages[0].content",
        23,
        "an id",
    ),
    "chat, a text that the template trims": (
        chat(f"  {LONG}Be kind.  "),
        chat(f"  {LONG}Be short.  "),
        "messages[0].content",
        len(LONG) + 5,
        "other text",
    ),
    "chat, a text that goes on as the template does": (
        chat(user="Which files?"),
        chat(user="Which files?<br>"),
        "messages[1].content",
        12,
        "other text",
    ),
    "chat, a text of which the template drops a part": (
        ANSWERED,
        changed(ANSWERED, ("messages", 2, "content"), THOUGHT.replace("5", "61")),
        "messages[2].content",
        43,
        "a number",
    ),
    "chat, white space": (
        chat("Do  this.\n" + LONG),
        chat("Do this.\n" + LONG),
        "messages[0].content",
        3,
        "white space",
    ),
    "chat, the order of tools": (
        chat(),
        chat(tools=[*chat()["tools"][:1], *reversed(chat()["tools"][1:])]),
        "tools[1].function.name",
        0,
        "the order of items",
    ),
    "chat, the order of keys": (
        chat(),
        changed(chat(), (*CHAT_TOOL, "parameters", "properties"), reordered(SCHEMA["properties"])),
        "tools[1].function.parameters.properties",
        None,
        "the order of keys",
    ),
    "chat, a number in a schema": (
        chat(),
        changed(chat(), (*CHAT_TOOL, "parameters", "properties", "limit", "maximum"), 250),
        "tools[1].function.parameters.properties.limit.maximum",
        0,
        "a number",
    ),
    "chat, a tool's description": (
        chat(),
        changed(chat(), (*CHAT_TOOL, "description"), 'To write "files" in Z\u00fcrich.'),
        "tools[1].function.description",
        9,
        "other text",
    ),
    "chat, a tool's list of values": (
        chat(),
        changed(chat(), (*CHAT_TOOL, "parameters", "required"), ["path", "limit"]),
        "tools[1].function.parameters.required[1]",
        None,
        "an item that only one has",
    ),
    "chat, one tool more": (
        chat(),
        chat(tools=[*chat()["tools"], {"type": "function", "function": {"name": "erase"}}]),
        "tools[3]",
        None,
        "an item that only one has",
    ),
    "chat, a call's arguments": (
        CALLED,
        changed(CALLED, ("messages", 2, "tool_calls", 0, "function", "arguments"), '{"path": "/srv/b/x"}'),
        "messages[2].tool_calls[0].function.arguments.path",
        5,
        "a path",
    ),
    "responses, a path": (
        responses(f"{LONG}Folder: /home/ann/project"),
        responses(f"{LONG}Folder: /home/bob/project"),
        "instructions",
        len(LONG) + 14,
        "a path",
    ),
    "responses, a count": (
        responses(f"{LONG}You have 9 files open."),
        responses(f"{LONG}You have 12 files open."),
        "instructions",
        len(LONG) + 9,
        "a number",
    ),
    "responses, the user's text": (
        responses(),
        responses(user="Which files have changed?"),
        "input[0].content[0].text",
        12,
        "other text",
    ),
    "responses, the order of tools": (
        responses(),
        responses(tools=responses()["tools"][::-1]),
        "tools[0].name",
        0,
        "the order of items",
    ),
    "messages, an id in a client's line": (
        messages("build cc_version=2.1.197.a3f; entry=cli\n" + LONG),
        messages("build cc_version=2.1.197.9b1; entry=cli\n" + LONG),
        "system[1].text",
        25,
        "an id",
    ),
    "messages, a commit": (
        messages(f"{LONG}HEAD is 5b957ae1c0"),
        messages(f"{LONG}HEAD is 5d28904aa1"),
        "system[1].text",
        len(LONG) + 9,
        "an id",
    ),
    "messages, a Unix time": (
        messages(f"{LONG}epoch 1795528748"),
        messages(f"{LONG}epoch 1795528799"),
        "system[1].text",
        len(LONG) + 14,
        "a time",
    ),
    "messages, the order of keys": (
        messages(),
        changed(messages(), ("tools", 2, "input_schema"), reordered(SCHEMA)),
        "tools[2].input_schema",
        None,
        "the order of keys",
    ),
    "messages, a tool's input": (
        USED,
        changed(USED, ("messages", 1, "content", 0, "input", "limit"), 8),
        "messages[1].content[0].input.limit",
        0,
        "a number",
    ),
    "messages, a tool's result": (
        USED,
        changed(USED, ("messages", 2, "content", 0, "content"), "it is full today"),
        "messages[2].content[0].content",
        6,
        "other text",
    ),
    "completions, a date": (
        completion(f"{LONG}On 24.11.2026 it"),
        completion(f"{LONG}On 25.11.2026 it"),
        "prompt",
        len(LONG) + 4,
        "a date",
    ),
    "completions, token ids": (
        completion(list(range(5, 60))),
        completion([*range(5, 40), 7, 8]),
        "prompt[35]",
        None,
        "token ids",
    ),
    "another cache salt": (
        chat(),
        chat(cache_salt="mine"),
        "cache_salt",
        None,
        "another cache_salt, which shares nothing",
    ),
    "a cut beginning": (
        chat(),
        chat(truncate_prompt_tokens=40),
        "truncate_prompt_tokens",
        None,
        "the beginning is cut off",
    ),
}


def parting_of(model: ServedModel, a: dict[str, Any], b: dict[str, Any]) -> Parting:
    async def read() -> Parting:
        prompts = [await read_prompt(json.dumps(body).encode(), lambda name: model) for body in (a, b)]
        return compare(*prompts)

    return asyncio.run(read())


@pytest.mark.parametrize("name", PAIRS)
def test_the_volatile_place_is_found(model: ServedModel, name: str) -> None:
    a, b, field, character, volatile = PAIRS[name]
    parting = parting_of(model, a, b)
    assert (parting.field, parting.character, parting.volatile) == (field, character, volatile)
    assert not parting.goes_on
    assert parting.num_cached_tokens <= parting.num_shared_tokens < parting.num_tokens_b
    back = parting_of(model, b, a)
    assert (back.field, back.volatile, back.num_shared_tokens) == (field, volatile, parting.num_shared_tokens)


def test_what_the_template_does_not_write_is_not_named(model: ServedModel) -> None:
    a = messages(user="Go!", metadata={"user_id": "session-1"}, max_tokens=9)
    b = messages(user="Stop", metadata={"user_id": "session-2"}, max_tokens=8)
    del b["system"][1]["cache_control"]
    b["tools"] = [reordered(tool) for tool in b["tools"]]
    parting = parting_of(model, a, b)
    assert (parting.field, parting.character) == ("messages[0].content[0].text", 0)


def test_a_switch_of_the_template_is_named_among_the_fields(raw_tokenizer: Tokenizer) -> None:
    with ThreadPoolExecutor(1) as executor:
        bundle = bundle_of(
            raw_tokenizer,
            chat_template=WITH_TOOLS.replace("{{ '<|im_start|>system", "{{ enable_thinking }}{{ '<|im_start|>system"),
        )
        model = build_model(bundle, executor, GatewayConfig(workers=("http://127.0.0.1:9",)))
        a, b = (chat(chat_template_kwargs={"enable_thinking": switch}) for switch in (True, False))
        parting = parting_of(model, a, b)
    assert (parting.field, parting.volatile) == (None, "the template's own text")
    assert parting.other_fields == ("chat_template_kwargs.enable_thinking",)


@pytest.mark.parametrize("answer", ["The files are a and b.", ""])
def test_a_conversation_that_goes_on_keeps_its_prefix(model: ServedModel, answer: str) -> None:
    first = chat()
    turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    parting = parting_of(model, first, chat(messages=[*first["messages"], *turns]))
    assert parting.goes_on
    assert parting.num_shared_tokens >= parting.num_tokens_a - 1
    assert parting_of(model, first, first).goes_on


def test_without_the_volatile_text_the_rest_would_be_shared(model: ServedModel) -> None:
    a, b = (chat(f"Date: 2026-11-{day}.\n{LONG}", user=user) for day, user in ((24, "One"), (25, "Two")))
    parting = parting_of(model, a, b)
    assert parting.field == "messages[0].content"
    assert parting.num_shared_tokens_without is not None
    same = parting_of(model, a, chat(f"Date: 2026-11-24.\n{LONG}", user="Two"))
    assert parting.num_shared_tokens_without == same.num_shared_tokens > 4 * parting.num_shared_tokens


def test_the_fields_of_a_body_tell_its_api() -> None:
    assert api_of(chat()) == "chat"
    assert api_of(responses()) == "responses"
    assert api_of(messages()) == "messages"
    assert api_of(completion("x")) == "completions"
    assert (
        api_of({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]}) == "messages"
    )
    with pytest.raises(InvalidRequestError, match="none of messages, input and prompt"):
        api_of({"model": "tiny"})


def test_an_answer_holds_no_text_of_the_bodies(model: ServedModel) -> None:
    for a, b, *_ in PAIRS.values():
        answer = msgspec.json.encode(parting_of(model, a, b)).decode()
        assert "careful agent" not in answer
        assert "files are there" not in answer
