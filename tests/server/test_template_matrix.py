"""Shapes of conversations over all templates and APIs, by the gateway's text and by the engine's."""

from __future__ import annotations

from typing import Final

import pytest
from tokenizers import Tokenizer

from tests.server.conftest import bundle_of
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.template_matrix import PAIRS, SHAPES, refusals
from tests.server.test_agents import AGENTS, recorded
from tests.server.test_app import post
from tests.server.text.conversations import BODIES, CHAT_PATH
from tests.server.text.template_families import FAMILIES

SINGLE: Final = [(name,) for name in SHAPES]


@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("family", ["system-first", "alternating-tools"])
async def test_every_shape_is_answered(family: str, by_engine: bool) -> None:
    _, found = await refusals(family, SINGLE, by_engine=by_engine, streams=(False,))
    assert not found


@pytest.mark.deep
@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
async def test_every_pair_of_shapes_is_answered(family: str, by_engine: bool) -> None:
    _, found = await refusals(family, PAIRS, by_engine=by_engine)
    assert not found


@pytest.mark.parametrize("family", ["system-first", *(pytest.param(each, marks=pytest.mark.deep) for each in FAMILIES)])
async def test_recorded_agents_are_answered(family: str, raw_tokenizer: Tokenizer) -> None:
    bundle = bundle_of(raw_tokenizer, max_model_len=1 << 18, chat_template=FAMILIES[family])
    async with gateway(ScriptedWorker(bundle, reply=[50, 51])) as running:
        for agent in AGENTS:
            for request in recorded(agent):
                status, _, raw = await post(running.url, request["body"], request["path"], **request["headers"])
                assert status == 200, (agent, raw)


async def test_repairs_are_shown_or_refused(raw_tokenizer: Tokenizer) -> None:
    bundle = bundle_of(raw_tokenizer, chat_template=FAMILIES["system-first"])
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "system", "user")]
    for path in BODIES:
        body = {"model": "tiny", "max_tokens": 2, "messages": messages}
        if path not in (CHAT_PATH, "/v1/messages"):
            body = {"model": "tiny", "input": messages}
        for strict in (False, True):
            worker = ScriptedWorker(bundle, reply=[50, 51])
            async with gateway(worker, strict_template=strict) as running:
                status, headers, raw = await post(running.url, body, path)
                if strict:
                    assert (status, b"system (--strict-template)" in raw) == (400, True)
                    continue
                assert (status, headers["x-headstart-repaired"]) == (200, "system")
                assert running.metrics.repairs.sum("system") == 1


async def test_the_operator_gives_a_template_and_its_switches(raw_tokenizer: Tokenizer) -> None:
    worker = ScriptedWorker(bundle_of(raw_tokenizer), reply=[50, 51])
    source, kwargs = "{{ messages[0].content }} {{ mood }}{{ messages | length }}", {"": {"mood": "calm"}}
    async with gateway(worker, chat_template={"tiny": source}, default_chat_template_kwargs=kwargs) as running:
        prompts = []
        for given in ({}, {"chat_template_kwargs": {"mood": "glad", "unread": 1}}):
            for path, text in ((CHAT_PATH, "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")):
                fields = {"max_tokens": 2} if text == "messages" else {}
                body = {"model": "tiny", text: [{"role": "user", "content": "Hi"}], **fields, **given}
                status, _, raw = await post(running.url, body, path)
                assert status == 200, raw
                prompts.append(raw_tokenizer.decode(worker.received[-1].prompt_ids))
    assert prompts == ["Hi calm1"] * 3 + ["Hi glad1"] * 3
