"""Answers that come back within the next prompt, as they were generated or not."""

from __future__ import annotations

import re

import aiohttp
from tokenizers import Tokenizer

from cache.hashing import hash_chain
from cache.types import BlockHash
from server.text.retokenisation import MAX_ANSWERS, RetokenisationCheck
from tests.server.gateway_app import RunningGateway, gateway
from tests.server.scripted_worker import ScriptedWorker
from worker.wire import TokenizerBundle

ROOT = BlockHash(b"r" * 16)
PROMPT = list(range(10))
ANSWER = [50, 51, 52, 53, 54, 55, 56]


def hashes(ids: list[int]) -> list[BlockHash]:
    return hash_chain(ROOT, ids, 4)


def test_an_answer_continues_only_with_its_own_tokens() -> None:
    check = RetokenisationCheck()
    assert check.continued(hashes(PROMPT)) is None
    check.answered(PROMPT, hashes(PROMPT), ANSWER, 4)
    assert check.continued(hashes(PROMPT)) is None, "the same prompt again continues nothing"
    assert check.continued(hashes([*PROMPT, *ANSWER, 7, 8, 9])) is True
    assert check.continued(hashes([*PROMPT, 50, 99, *ANSWER[2:], 7, 8, 9])) is False
    assert check.continued(hashes([1, *PROMPT, *ANSWER])) is None, "another conversation"
    check.answered(PROMPT, hashes(PROMPT), [60, 61, 62, 63, 64, 65], 4)
    assert check.continued(hashes([*PROMPT, *ANSWER, 7, 8, 9])) is True, "one of several answers"


def test_recorded_answers_are_bounded() -> None:
    check = RetokenisationCheck()
    for first in range(MAX_ANSWERS + 10):
        prompt = [first, 1, 2, 3]
        check.answered(prompt, hashes(prompt), ANSWER, 4)
    assert len(check._answers) == MAX_ANSWERS
    assert check.continued(hashes([0, 1, 2, 3, *ANSWER, 7])) is None
    assert check.continued(hashes([MAX_ANSWERS, 1, 2, 3, *ANSWER, 7])) is True


def counted(target: RunningGateway, answer: str) -> float:
    name = "headstart_continued_turns_total"
    return target.metrics.registry.get_sample_value(name, {"answer": answer}) or 0.0


async def test_continued_turns_are_counted(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> None:
    text = "An answer that is long enough to fill some blocks of sixteen tokens, whatever the tokenizer is."
    worker = ScriptedWorker(bundle, reply=raw_tokenizer.encode(text).ids)
    question = {"role": "user", "content": "A question that fills at least one block of tokens by itself, too."}
    async with gateway(worker) as target, aiohttp.ClientSession() as session:

        async def ask(*messages: dict[str, str]) -> str:
            body = {"model": "tiny", "messages": list(messages), "max_tokens": 500}
            async with session.post(target.url + "/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                return str((await response.json())["choices"][0]["message"]["content"])

        said = await ask(question)
        follow_up = {"role": "user", "content": "And now something long enough to come behind all of that answer."}
        await ask(question, {"role": "assistant", "content": said}, follow_up)
        assert (counted(target, "same"), counted(target, "other")) == (1.0, 0.0)
        changed = re.sub("long", "short", said)
        await ask(question, {"role": "assistant", "content": changed}, follow_up)
        assert (counted(target, "same"), counted(target, "other")) == (1.0, 1.0)
