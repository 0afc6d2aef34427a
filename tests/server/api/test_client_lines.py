"""Lines that agents write for other servers: removed at their one place by every route, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from server.api.prompts.client_lines import CLIENT_LINES, MAX_LINE_CHARS, body_without_line, conversation_without_line
from server.schema.fields import Message, TextPart
from server.schema.intent import Conversation
from server.text.chat_template import ChatTemplate
from server.text.template_input import message_text
from tests.server.conftest import CHATML
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import Says
from tests.server.test_app import post, post_once

DOCS = Path(__file__).parents[3] / "docs" / "api.md"
LINE = "x-anthropic-billing-header: cc_version=2.1.197.3a3; cc_entrypoint=cli;"
OTHER = "x-anthropic-billing-header: cc_version=2.1.198.f0e; cc_entrypoint=sdk-ts; cch=00000;"
SYSTEM = "You are an agent.\nAnswer in short words."
USER: Any = {"role": "user", "content": "Weather?"}
NEAR_MISSES = [
    f" {LINE}",
    f"\n{LINE}",
    f"Note: {LINE}",
    f"{LINE} You are an agent.",
    LINE.upper(),
    LINE.replace(":", "", 1),
    LINE.partition(" ")[0],
    "x-anthropic-billing-header: what does this header mean?",
    "x-anthropic-billing-header: cc_version=2 is the version",
    LINE.replace("billing", "other"),
    f"{LINE[:-1]}{'x' * MAX_LINE_CHARS};",
    f"`{LINE}`",
    f"{LINE}\x0b{SYSTEM}",
    f"{LINE}\r{SYSTEM}",
]
TEMPLATE = ChatTemplate(CHATML, bos_token=None, eos_token=None)


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def messages_body(system: Any, *messages: Any) -> tuple[str, dict[str, Any]]:
    fields = {} if system is None else {"system": system}
    return "/v1/messages", {"model": "tiny", "max_tokens": 64, "messages": [*messages, USER], **fields}


def chat_body(*messages: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": "tiny", "max_tokens": 64, "messages": [*messages, USER]}


def responses_body(instructions: str | None, *messages: Any) -> tuple[str, dict[str, Any]]:
    fields = {} if instructions is None else {"instructions": instructions}
    return "/v1/responses", {"model": "tiny", "max_output_tokens": 64, "input": [*messages, USER], **fields}


REMOVED: dict[str, tuple[Any, Any]] = {
    "block": (messages_body([text(LINE), text(SYSTEM)]), messages_body([text(SYSTEM)])),
    "first line of the first block": (messages_body([text(f"{LINE}\n{SYSTEM}")]), messages_body([text(SYSTEM)])),
    "first line of a text": (messages_body(f"{LINE}\n{SYSTEM}"), messages_body(SYSTEM)),
    "first line with a carriage return": (messages_body(f"{LINE}\r\n{SYSTEM}"), messages_body(SYSTEM)),
    "all of the system prompt": (messages_body([text(LINE)]), messages_body(None)),
    "all of it, with a line end": (messages_body(f"{LINE}\n"), messages_body(None)),
    "all of it but an empty block": (messages_body([text(LINE), text("")]), messages_body(None)),
    "system message": (
        messages_body(None, {"role": "system", "content": f"{LINE}\n{SYSTEM}"}),
        messages_body(None, {"role": "system", "content": SYSTEM}),
    ),
    "chat": (
        chat_body({"role": "system", "content": f"{LINE}\n{SYSTEM}"}),
        chat_body({"role": "system", "content": SYSTEM}),
    ),
    "developer's part": (
        chat_body({"role": "developer", "content": [text(LINE), text(SYSTEM)]}),
        chat_body({"role": "developer", "content": [text(SYSTEM)]}),
    ),
    "empty system message": (chat_body({"role": "system", "content": LINE}), chat_body()),
    "instructions": (responses_body(f"{LINE}\n{SYSTEM}"), responses_body(SYSTEM)),
    "item": (
        responses_body(None, {"role": "developer", "content": f"{LINE}\n{SYSTEM}"}),
        responses_body(None, {"role": "developer", "content": SYSTEM}),
    ),
}
"""Bodies with the line, and the same ones without it."""
KEPT: dict[str, Any] = {
    "user's message": chat_body({"role": "user", "content": LINE}),
    "assistant's message": chat_body(USER, {"role": "assistant", "content": LINE}),
    "tool result": messages_body(
        SYSTEM,
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "read", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": LINE}]},
    ),
    "second line": messages_body(f"{SYSTEM}\n{LINE}\n{SYSTEM}"),
    "second block": messages_body([text(SYSTEM), text(LINE)]),
    "second system message": chat_body({"role": "system", "content": SYSTEM}, {"role": "system", "content": LINE}),
    "system message behind a user's": chat_body(USER, {"role": "system", "content": LINE}),
    "second of two lines": messages_body(f"{LINE}\n{LINE}\n{SYSTEM}"),
    "item behind instructions": responses_body(SYSTEM, {"role": "developer", "content": LINE}),
}


async def test_routes_and_counters_render_the_prompt_without_the_line(says: Says) -> None:
    worker = says("x")
    async with gateway(worker) as target:
        for place, bodies in REMOVED.items():
            for path, body in bodies:
                status, _, raw = await post(target.url, body, path)
                assert status == 200, (place, raw)
            removed, plain = (list(request.prompt_ids) for request in worker.received[-2:])
            assert removed == plain, place
            counter = {"/v1/messages": "/v1/messages/count_tokens", "/v1/chat/completions": "/tokenize"}.get(path)
            if counter is not None:
                _, _, raw = await post(target.url, bodies[0][1], counter)
                counted = json.loads(raw)
                assert counted.get("input_tokens", counted.get("count")) == len(plain), place
        num_counted = sum(bodies[0][0] != "/v1/responses" for bodies in REMOVED.values())
        assert target.metrics.removed_lines.sum("claude-code-billing") == len(REMOVED) + num_counted


async def test_the_same_words_elsewhere_stay(says: Says, raw_tokenizer: Tokenizer) -> None:
    worker = says("x")
    async with gateway(worker) as target:
        for place, (path, body) in KEPT.items():
            status, _, raw = await post(target.url, body, path)
            assert status == 200, (place, raw)
            prompt = raw_tokenizer.decode(list(worker.received[-1].prompt_ids))
            assert prompt.count(LINE) == 1, place
        for near in NEAR_MISSES:
            path, body = chat_body({"role": "system", "content": near})
            await post(target.url, body, path)
            assert near in raw_tokenizer.decode(list(worker.received[-1].prompt_ids))
        assert target.metrics.removed_lines.sum("claude-code-billing") == 1, "of the two lines, the first"


async def test_the_option_keeps_the_line(says: Says, raw_tokenizer: Tokenizer) -> None:
    worker = says("x")
    async with gateway(worker, keep_client_lines=True) as target:
        for place, ((path, body), _) in REMOVED.items():
            await post(target.url, body, path)
            assert LINE in raw_tokenizer.decode(list(worker.received[-1].prompt_ids)), place
        assert target.metrics.removed_lines.sum("claude-code-billing") == 0


async def test_errors_name_the_messages_that_the_client_sent(says: Says) -> None:
    arguments = json.dumps([[]] * 21_000)
    calls = [{"id": "1", "function": {"name": "f", "arguments": arguments}}]
    sent = [{"role": "system", "content": LINE}, USER, {"role": "assistant", "tool_calls": calls}]
    path, body = chat_body(*sent)
    status, _, raw = await post_once(gateway(says("x")), body, path)
    assert (status, json.loads(raw)["error"]["param"]) == (400, "messages[2].tool_calls[0].function.arguments")


NAMES = st.text("abcv_", min_size=1, max_size=8)
VALUES = st.text("a1.-_=", max_size=8)
LINES = st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=4).map(
    lambda pairs: "x-anthropic-billing-header: " + "; ".join(f"{name}={value}" for name, value in pairs)
)
TEXTS = st.lists(st.sampled_from([LINE, OTHER, "words", "\n", "\r\n", " ", *NEAR_MISSES]), max_size=4).map("".join)
CONTENTS = TEXTS | st.lists(TEXTS.map(lambda part: TextPart(type="text", text=part)), max_size=3)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
MESSAGES = st.builds(Message, role=ROLES, content=CONTENTS)


def begins(message: Message, line: str, *, own_part: bool) -> Message:
    """Return the message with a line, as its first part or the first line of it."""
    content = message.content
    if isinstance(content, str):
        return msgspec.structs.replace(message, content=f"{line}\n{content}")
    assert content is not None
    first, rest = (line, content) if own_part or not content else (f"{line}\n{content[0].text}", content[1:])
    return msgspec.structs.replace(message, content=[TextPart(type="text", text=first), *rest])


def rendered(messages: list[Message]) -> str:
    conversation, _ = conversation_without_line(Conversation(messages=messages))
    return TEMPLATE.render(conversation).text


@given(messages=st.lists(MESSAGES, min_size=1, max_size=4), first=LINES, second=LINES, own_part=st.booleans())
def test_conversations_that_differ_in_the_line_share_a_prompt(
    messages: list[Message], first: str, second: str, own_part: bool
) -> None:
    system = msgspec.structs.replace(messages[0], role="system")
    one, other = ([begins(system, line, own_part=own_part), *messages[1:]] for line in (first, second))
    assert rendered(one) == rendered(other)
    assert conversation_without_line(Conversation(messages=one))[1] == "claude-code-billing"


@given(messages=st.lists(MESSAGES, max_size=4))
def test_nothing_else_changes(messages: list[Message]) -> None:
    before = msgspec.json.encode(messages)
    conversation = Conversation(messages=messages)
    kept, removed = conversation_without_line(conversation)
    assert msgspec.json.encode(messages) == before, "the client's messages are never changed in place"
    if not removed:
        assert kept is conversation
        return
    assert messages[0].role in ("system", "developer")
    line, _, rest = message_text(messages[0].content).partition("\n")
    assert CLIENT_LINES[removed].fullmatch(line)
    assert kept.messages[1 - kept.num_removed :] == messages[1:], "all other messages are as they were"
    left = "" if kept.num_removed else message_text(kept.messages[0].content)
    assert left in (rest, rest.removeprefix("\n")), "a part that is empty now goes, too"


def test_lines_in_bodies_for_engines() -> None:
    fields = {"messages": [{"role": "developer", "content": f"{LINE}\n{SYSTEM}"}, USER]}
    left, rule = body_without_line(fields)
    assert (rule, left["messages"][0]["content"]) == ("claude-code-billing", SYSTEM)


def test_the_docs_have_the_table_of_the_code() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("## Client lines\n")[2].partition("\n## ")[0]
    for rule, line in CLIENT_LINES.items():
        [row] = [row for row in section.splitlines() if row.startswith(f"| `{rule}` |")]
        assert line.fullmatch(row.strip("|").split("|")[2].strip(" `"))
