"""Where the prompts of two bodies part, by the ops port of a real gateway: every API, and two kinds of template."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from server import cli
from server.errors import InvalidRequestError
from server.ops.prefix import path_of
from tests.server.conftest import bundle_of
from tests.server.scripted_worker import ScriptedWorker, listening
from tests.server.test_app import post
from tests.server.test_gateway import Process, gateway_process

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


def changed(body: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """Return a copy with another value at a field, such as `tools[1].name`."""
    copy = copied(body)
    place: Any = copy
    *path, last = [int(step) if step.isdigit() else step for step in re.findall(r"\w+", field)]
    for step in path:
        place = place[step]
    place[last] = value
    return copy


def reordered(value: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(value.items()))


PARAMETERS: Final = "tools[1].function.parameters"
UUID: Final = "0f8fad5b-d9cb-469f-a165-70867728950e"
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
FIELD_OF: Final = {
    chat: "messages[0].content",
    responses: "instructions",
    messages: "system[1].text",
    completion: "prompt",
}
"""The field that a body's first text stands in."""
TEXTS: Final = {
    "chat, an ISO date": (chat, LONG + "Today is {}.", "2026-11-24", "2026-11-25"),
    "chat, a date in words": (chat, LONG + "It is {}, 2026.", "Tuesday, November 24", "Tuesday, December 1"),
    "chat, a weekday": (chat, "It is {}. " + LONG, "Monday", "Thursday"),
    "chat, a time": (chat, LONG + "Now: 2026-11-24T13:59:{}Z", "08", "41"),
    "chat, an id": (chat, "Session {}.\n" + LONG, UUID, "7c9e6679-7425-40de-944b-e07fc1f90ae7"),
    "chat, an id with the same ends": (chat, "Session {}.\n" + LONG, UUID, UUID.replace("469f", "4c9f")),
    "chat, a text that the template trims": (chat, f"  {LONG}Be {{}}.  ", "kind", "short"),
    "chat, white space": (chat, "Do{}this.\n" + LONG, "  ", " "),
    "responses, a path": (responses, LONG + "Folder: /home/{}/project", "ann", "bob"),
    "responses, a count": (responses, LONG + "You have {} files open.", "9", "12"),
    "messages, an id in a client's line": (messages, "build cc_version=2.1.197.{}; entry=cli\n" + LONG, "a3f", "9b1"),
    "messages, a commit": (messages, LONG + "HEAD is {}", "5b957ae1c0", "5d28904aa1"),
    "messages, a Unix time": (messages, LONG + "epoch {}", "1795528748", "1795528799"),
    "completions, a date": (completion, LONG + "On {}.11.2026 it", "24", "25"),
}
"""A text with a place in it, and what stands there in either body."""
VALUES: Final[dict[str, tuple[dict[str, Any], str, Any]]] = {
    "chat, the order of keys": (chat(), f"{PARAMETERS}.properties", reordered(SCHEMA["properties"])),
    "chat, a number in a schema": (chat(), f"{PARAMETERS}.properties.limit.maximum", 250),
    "chat, a tool's description": (chat(), "tools[1].function.description", 'To write "files" in Z\u00fcrich.'),
    "responses, the user's text": (responses(), "input[0].content[0].text", "Which files have changed?"),
    "messages, the order of keys": (messages(), "tools[2].input_schema", reordered(SCHEMA)),
    "messages, a tool's input": (USED, "messages[1].content[0].input.limit", 8),
    "messages, a tool's result": (USED, "messages[2].content[0].content", "it is full today"),
    "another cache salt": (chat(), "cache_salt", "mine"),
}
"""A body, and a field that has another value in the other one."""
PAIRS: Final[dict[str, tuple[dict[str, Any], dict[str, Any], str | None]]] = {
    **{
        name: (make(text.format(one)), make(text.format(other)), FIELD_OF[make])
        for name, (make, text, one, other) in TEXTS.items()
    },
    **{name: (body, changed(body, field, value), field) for name, (body, field, value) in VALUES.items()},
    "chat, a text that goes on as the template does": (
        chat(user="Which files?"),
        chat(user="Which files?<br>"),
        "messages[1].content",
    ),
    "chat, the order of tools": (
        chat(),
        chat(tools=[*chat()["tools"][:1], *reversed(chat()["tools"][1:])]),
        "tools[1].function.name",
    ),
    "chat, a tool's list of values": (chat(), changed(chat(), f"{PARAMETERS}.required", ["path", "limit"]), None),
    "chat, one tool more": (
        chat(),
        chat(tools=[*chat()["tools"], {"type": "function", "function": {"name": "erase"}}]),
        None,
    ),
    "chat, a call's arguments": (
        CALLED,
        changed(CALLED, "messages[2].tool_calls[0].function.arguments", '{"path": "/srv/b/x"}'),
        "messages[2].tool_calls[0].function.arguments.path",
    ),
    "responses, the order of tools": (responses(), responses(tools=responses()["tools"][::-1]), "tools[0].name"),
    "completions, token ids": (completion(list(range(5, 60))), completion([*range(5, 40), 7, 8]), None),
    "a cut beginning": (chat(), chat(truncate_prompt_tokens=40), None),
}
"""Two bodies, and where they part. None: in the text of the template, or in what it makes of a field."""


IN_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(params=["without tools", "with tools"], scope="module", loop_scope="module")
async def gateway(request: pytest.FixtureRequest, raw_tokenizer: Tokenizer) -> AsyncIterator[Process]:
    """A model whose template has no tools, which go into the system message, and one whose template has."""
    changes = {"chat_template": WITH_TOOLS} if request.param == "with tools" else {}
    worker = ScriptedWorker(bundle_of(raw_tokenizer, **changes))
    async with listening(worker.app()) as worker.url, gateway_process("--workers", worker.url) as running:
        await running.until_ready()
        yield running


async def parting(gateway: Process, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    status, _, raw = await post(gateway.ops, {"a": a, "b": b}, "/prefixes/compare")
    assert status == 200, raw
    found: dict[str, Any] = json.loads(raw)
    return found


@IN_ONE_LOOP
async def test_the_field_where_they_part_is_found(gateway: Process) -> None:
    for name, (a, b, field) in PAIRS.items():
        found, back = await parting(gateway, a, b), await parting(gateway, b, a)
        assert found["field"] == field, (name, found)
        assert not found["goes_on"]
        assert found["num_cached_tokens"] <= found["num_shared_tokens"] < found["num_tokens_b"]
        assert (back["field"], back["num_shared_tokens"]) == (field, found["num_shared_tokens"]), name
        (before, one), (same, other) = found["around"]
        assert before == same, "what both share"
        assert (one == other) == (field == "cache_salt"), name


@IN_ONE_LOOP
async def test_what_the_template_does_not_write_is_not_named(gateway: Process) -> None:
    a = messages(user="Go!", metadata={"user_id": "session-1"}, max_tokens=9)
    b = messages(user="Stop", metadata={"user_id": "session-2"}, max_tokens=8)
    del b["system"][1]["cache_control"]
    b["tools"] = [reordered(tool) for tool in b["tools"]]
    assert (await parting(gateway, a, b))["field"] == "messages[0].content[0].text"


@pytest.mark.parametrize("gateway", ["with tools"], indirect=True)
@IN_ONE_LOOP
async def test_a_field_that_the_template_cuts_is_listed(gateway: Process) -> None:
    found = await parting(gateway, ANSWERED, changed(ANSWERED, "messages[2].content", THOUGHT.replace("5", "61")))
    assert (found["field"], found["differing"]) == (None, ["messages[2].content"])


@pytest.mark.parametrize("gateway", ["with tools"], indirect=True)
@IN_ONE_LOOP
async def test_keys_of_schemas_in_another_order_are_named(
    gateway: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = chat(), chat()
    b["tools"][1]["function"]["parameters"]["properties"] = dict(reversed(SCHEMA["properties"].items()))
    field = "tools[1].function.parameters.properties"
    found = await parting(gateway, a, b)
    assert (found["field"], found["reordered"], found["differing"]) == (field, True, [])
    assert await asyncio.to_thread(cli.main, ["prefix", *written(tmp_path, a, b), "--ops", gateway.ops]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"They differ first in {field}"
    assert "--sort-tool-schemas" in lines[3]
    assert not (await parting(gateway, a, a))["reordered"]


async def test_without_a_field_there_the_differing_ones_are_named(raw_tokenizer: Tokenizer) -> None:
    template = WITH_TOOLS.replace("{{ '<|im_start|>system", "{{ enable_thinking }}{{ '<|im_start|>system")
    worker = ScriptedWorker(bundle_of(raw_tokenizer, chat_template=template))
    a, b = (chat(chat_template_kwargs={"enable_thinking": switch}) for switch in (True, False))
    async with listening(worker.app()) as worker.url, gateway_process("--workers", worker.url) as gateway:
        await gateway.until_ready()
        found = await parting(gateway, a, b)
    assert (found["field"], found["differing"]) == (None, ["chat_template_kwargs.enable_thinking"])


@IN_ONE_LOOP
async def test_a_conversation_that_goes_on_keeps_its_prefix(gateway: Process) -> None:
    first = chat()
    for answer in ("The files are a and b.", ""):
        turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
        found = await parting(gateway, first, chat(messages=[*first["messages"], *turns]))
        assert found["goes_on"]
        assert found["num_shared_tokens"] >= found["num_tokens_a"] - 1
    assert (await parting(gateway, first, first))["goes_on"]


@IN_ONE_LOOP
async def test_sixty_tokens_of_both_are_shown(gateway: Process) -> None:
    words = [f"word{number}" for number in range(200)]
    a, b = (chat(" ".join([*words[:100], word, *words[100:]])) for word in ("one", "two"))
    found = await parting(gateway, a, b)
    for (before, after), word in zip(found["around"], ("one", "two"), strict=True):
        assert "word99" in before
        assert "word80" not in before
        assert after.strip().startswith(word)
        assert "word100" in after
        assert "word140" not in after


def test_the_fields_of_a_body_tell_its_route() -> None:
    bodies = {
        "/v1/chat/completions": [chat(), chat(user='{"input_schema": 1}')],
        "/v1/responses": [responses()],
        "/v1/messages": [messages(), {"messages": [{"role": "user", "content": [{"tool_use_id": "t"}]}]}],
        "/v1/completions": [completion("x")],
    }
    for path, each in bodies.items():
        for body in each:
            assert path_of(json.dumps(body).encode(), body) == path
    with pytest.raises(InvalidRequestError, match="none of messages, input and prompt"):
        path_of(b"{}", {})


def written(folder: Path, *bodies: Any) -> list[str]:
    paths = [folder / f"{name}.json" for name in "ab"]
    for path, body in zip(paths, bodies, strict=True):
        path.write_text(body if isinstance(body, str) else json.dumps(body))
    return [str(path) for path in paths]


@IN_ONE_LOOP
async def test_the_command(gateway: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def status(*arguments: str) -> int:
        return await asyncio.to_thread(cli.main, ["prefix", *arguments, "--ops", gateway.ops])

    a, b = (messages(f"{LONG}Folder: /home/{name}/src.") for name in ("ann", "bob"))
    assert await status(*written(tmp_path, a, b)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny: A has ")
    assert lines[1].endswith(" blocks of 16")
    assert lines[2] == "They differ first in system[1].text"
    assert "/home/|ann" in lines[3]
    assert "/home/|bob" in lines[4]
    assert lines[5].startswith("Cost: ")
    assert await status(*written(tmp_path, a, a), "--json") == 0
    assert json.loads(capsys.readouterr().out)["goes_on"]
    for text, problem in (
        ("[1]", "b.json: it holds no JSON object"),
        ("{", "b.json: "),
        ('{"model": "m"}', "b: body has none of messages, input and prompt"),
        ('{"model": "tiny", "messages": 5}', "b: "),
        ({**a, "model": "another"}, "'another' does not exist"),
    ):
        assert await status(*written(tmp_path, a, text)) == 2
        assert problem in capsys.readouterr().err
    assert await asyncio.to_thread(cli.main, ["prefix", *written(tmp_path, a, b), "--ops", gateway.url]) == 2
    (tmp_path / "a.json").unlink()
    assert await status(str(tmp_path / "a.json"), str(tmp_path / "b.json")) == 2
    assert "a.json: No such file" in capsys.readouterr().err
