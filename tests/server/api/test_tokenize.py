"""POST /tokenize and /detokenize over a real gateway: the ids that the worker gets, and the text of ids."""

from __future__ import annotations

import json

import aiohttp
from tokenizers import Tokenizer

from tests.server.conftest import ANSWER
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import MESSAGES, chat, post


async def test_tokenize_and_back(worker: ScriptedWorker, raw_tokenizer: Tokenizer) -> None:
    async with gateway(worker) as target:
        _, _, raw = await post(target.url, {"prompt": ANSWER, "return_token_strs": True}, "/tokenize")
        answer = json.loads(raw)
        assert answer["tokens"] == raw_tokenizer.encode(ANSWER).ids
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        _, _, raw = await post(target.url, {"tokens": answer["tokens"]}, "/detokenize")
        assert json.loads(raw) == {"prompt": ANSWER}
        await post(target.url, chat())
        for model in ("tiny", "", None):
            _, _, raw = await post(target.url, {"messages": MESSAGES, "model": model}, "/tokenize")
            assert json.loads(raw)["tokens"] == list(worker.received[0].prompt_ids)
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "x", "model": "y"}, "model"),
            ("/detokenize", {"tokens": [10**6]}, "tokens"),
            ("/detokenize", {"tokens": "x"}, "tokens"),
        ):
            status, _, raw = await post(target.url, body, path)
            assert status in (400, 404)
            assert json.loads(raw)["error"]["param"] == param
        async with aiohttp.ClientSession() as session, session.get(target.url + "/version") as response:
            assert set(await response.json()) == {"version"}
