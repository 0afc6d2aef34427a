"""Prompts of chats that the gateway renders for the engine, where both have the same template."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from cache.records import WorkerMember
from tests.server.api.engine_worker import engine_gateway
from tests.server.api.test_engine_control import TEMPLATE, TemplateWorker, calling, chat_of, responses, tool, user
from tests.server.conftest import bundle_of
from tests.server.test_app import post, post_once
from worker.common.chat_probes import CHAT_PROBES, digests

CHAT = "/v1/chat/completions"
SHARED = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] %}
{{- call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""


@dataclass(eq=False)
class ProbedWorker(TemplateWorker):
    """An adapter that has rendered the probes by its engine."""

    template: str = SHARED
    unlike: tuple[str, ...] = ()
    """Classes of which its engine makes other ids."""

    def member(self) -> WorkerMember:
        prompts = {name: [self.known_ids(name, probe) for probe in bodies] for name, bodies in CHAT_PROBES.items()}
        return replace(super().member(), chat_probes=digests(prompts))

    def known_ids(self, name: str, probe: dict[str, Any]) -> list[int] | None:
        if name in self.unlike:
            return [1, 2, 3]
        with contextlib.suppress(ValueError):
            return self.prompt_ids(CHAT, probe)
        return None


@pytest.fixture
def engine(raw_tokenizer: Tokenizer) -> ProbedWorker:
    return ProbedWorker(bundle_of(raw_tokenizer, chat_template=SHARED), tokenizer=raw_tokenizer)


FUNCTION = {"name": "f", "arguments": '{"a": [1.5, null, true, "é"]}'}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
KNOWN: list[dict[str, Any]] = [
    chat_of(user("Größe, 日本語 🙂\t\r\n <b> & 'x'")),
    chat_of({"role": "system", "content": "Be brief."}, user(), {"role": "assistant", "content": " a "}, user()),
    chat_of(user(), tools=[tool(parameters={"type": "object", "properties": {"é": {"type": "string"}}})]),
    chat_of(user(), calling(**FUNCTION), {"role": "tool", "tool_call_id": "c", "content": "sunny"}, user()),
    chat_of(user(), tools=[tool(parameters=SCHEMA)], tool_choice="required"),
    chat_of(user(), reasoning_effort="low"),
    chat_of(user(name="Bob"), structured_outputs={"regex": "a+"}, store=True, stream_interval=4),
    chat_of(chat_template_kwargs={"enable_thinking": False}, temperature=0.5, max_tokens=9, stop=["x"]),
]
EFFORTS = ("none", "minimal", "low", "medium", "high")
TURNS: dict[str, dict[str, Any]] = {
    "plain": chat_of(user()),
    "parts": chat_of(user([{"type": "text", "text": "a"}])),
    "calls": KNOWN[3],
    "parts_calls": chat_of(user([{"type": "text", "text": "a"}]), *KNOWN[3]["messages"][1:]),
    "empty": chat_of({"role": "system", "content": ""}, user()),
    "broken": chat_of(user(), calling(name="f", arguments="{"), user()),
    "named": chat_of(user(name="Bob")),
    "thinks": chat_of(user(), chat_template_kwargs={"enable_thinking": True}),
    "thinks_not": chat_of(user(), chat_template_kwargs={"enable_thinking": False}),
    **{f"effort_{each}": chat_of(user(), reasoning_effort=each) for each in EFFORTS},
}
CLASSES: dict[str, dict[str, Any]] = {
    **TURNS,
    **{f"{name}+tools": body | {"tools": [tool(parameters=SCHEMA)]} for name, body in TURNS.items()},
    "bare": chat_of(user(), tools=[{"type": "function", "function": {"name": "f"}}]),
    "strict": chat_of(user(), tools=[tool(strict=True)]),
    "no_call": chat_of(user(), tools=[tool(parameters=SCHEMA)], tool_choice="none"),
    "forced_call": KNOWN[4],
}
"""A body of each class."""


async def test_known_chats_are_not_rendered_by_the_engine(engine: ProbedWorker) -> None:
    """The ids that the engine gets are its own."""
    async with engine_gateway(engine) as target:
        for body in KNOWN:
            status, _, raw = await post(target.url, body)
            assert status == 200, raw
    assert engine.rendered == []
    assert [list(request.prompt_ids) for request in engine.received] == [engine.prompt_ids(CHAT, b) for b in KNOWN]
    assert engine.received[-1].sampling.max_tokens == 9
    assert engine.received[0].sampling.max_tokens == 2048 - len(engine.received[0].prompt_ids)


THOUGHT = {"type": "thinking", "thinking": "b", "signature": ""}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_of({"role": "developer", "content": "a"})),
        (CHAT, chat_of(user(), {"role": "assistant", "content": "a", "reasoning_content": "b"})),
        (CHAT, chat_of(documents=[{"title": "t", "text": "a"}])),
        (CHAT, chat_of(chat_template_kwargs={"title": "t"})),
        (CHAT, chat_of(response_format={"type": "json_object"})),
        (CHAT, chat_of(max_tokens=100_000)),
        ("/v1/messages", chat_of(user(), {"role": "assistant", "content": [THOUGHT]}, user(), max_tokens=5)),
    ],
)
async def test_other_bodies_are_rendered_by_the_engine(engine: ProbedWorker, path: str, body: dict[str, Any]) -> None:
    await post_once(engine_gateway(engine), body, path)
    assert engine.rendered


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages", chat_of(system="s", max_tokens=5)), ("/v1/responses", responses(user(), instructions="s"))],
)
async def test_other_apis_are_chats(engine: ProbedWorker, path: str, body: dict[str, Any]) -> None:
    """Their prompts are those of a chat with the same messages, and the gateway renders them."""
    same = chat_of({"role": "system", "content": "s"}, user())
    async with engine_gateway(engine) as target:
        status, _, raw = await post(target.url, body, path)
        assert status == 200, raw
    assert engine.rendered == []
    (request,) = engine.received
    assert list(request.prompt_ids) == engine.prompt_ids(CHAT, same)


def test_every_class_has_a_body() -> None:
    assert set(CLASSES) == set(CHAT_PROBES)


@pytest.mark.parametrize("name", CLASSES)
async def test_a_class_that_differs_is_rendered_by_the_engine(engine: ProbedWorker, name: str) -> None:
    """A body goes to the engine for one class that differs, and the others do not."""
    engine.unlike = (name,)
    async with engine_gateway(engine) as target:
        await post(target.url, CLASSES[name])
        assert engine.rendered
        engine.rendered.clear()
        if name != "plain":
            status, _, _ = await post(target.url, CLASSES["plain"])
            assert (status, engine.rendered) == (200, [])


async def test_another_template_is_the_engines(engine: ProbedWorker) -> None:
    engine.template = TEMPLATE
    status, _, _ = await post_once(engine_gateway(engine), chat_of())
    assert status == 200
    assert engine.rendered


async def test_all_workers_must_share_the_template(engine: ProbedWorker) -> None:
    other = TemplateWorker(engine.bundle, "w2", tokenizer=engine.tokenizer, template=SHARED)
    await post_once(engine_gateway(engine, other), chat_of())
    assert engine.rendered or other.rendered


async def test_control_tokens_of_clients_are_text(engine: ProbedWorker) -> None:
    body = chat_of(user("<|im_end|>"))
    async with engine_gateway(engine) as target:
        status, _, raw = await post(target.url, body)
        assert status == 200, raw
    end = engine.prompt_ids(CHAT, chat_of(user("")))
    assert engine.tokenizer is not None
    control = engine.tokenizer.token_to_id("<|im_end|>")
    [request] = engine.received
    assert list(request.prompt_ids).count(control) == end.count(control)
    assert "<|im_end|>" in engine.tokenizer.decode([each for each in request.prompt_ids if each != control])
    engine.received.clear()
    status, _, _ = await post_once(engine_gateway(engine, control_tokens_in_content=True), chat_of(user("<|im_end|>")))
    assert list(engine.received[0].prompt_ids) == engine.prompt_ids(CHAT, chat_of(user("<|im_end|>")))
