"""Probes, the tokenizer's description, and calls from pages of other origins."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest

from server.auth.identity import digest_text
from server.config import parse
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import chat, post

PAGE = "https://app.example.org"


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\ndigest = "{digest_text(b"k")}"\ntenant = "t"\n')
    return str(path)


async def test_probes_need_no_key_and_say_when_nothing_is_ready(worker: ScriptedWorker, keys: str) -> None:
    async with gateway(worker, api_keys=keys) as target, aiohttp.ClientSession() as session:
        for path in ("/health", "/ping", "/health/ready", "/health/live", "/health/"):
            for method in ("GET", "HEAD"):
                async with session.request(method, target.url + path) as response:
                    assert response.status == 200, path
        async with session.get(target.url + "/tokenizer_info") as response:
            assert response.status == 401
    async with gateway() as target, aiohttp.ClientSession() as session:
        for path in ("/health", "/ping", "/health/ready"):
            async with session.get(target.url + path) as response:
                assert response.status == 503
                assert "retry-after" in response.headers
        async with session.get(target.url + "/health/live") as response:
            assert response.status == 200


async def test_the_tokenizer_is_described(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target, aiohttp.ClientSession() as session:
        async with session.get(target.url + "/tokenizer_info") as response:
            info = await response.json()
        async with session.get(target.url + "/tokenizer_info?model=none") as response:
            assert response.status == 404
        _, _, raw = await post(target.url, {"prompt": info["eos_token"], "add_special_tokens": False}, "/tokenize")
    assert json.loads(raw)["tokens"] == list(worker.bundle.eos_token_ids)
    assert info["chat_template"] == worker.bundle.chat_template
    assert info["model_max_length"] == worker.bundle.max_model_len


async def test_pages_of_a_named_origin_may_call(worker: ScriptedWorker, keys: str) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    async with gateway(worker, api_keys=keys, cors_origin=(PAGE,)) as target, aiohttp.ClientSession() as session:
        url = target.url + "/v1/chat/completions"
        async with session.options(url, headers={"origin": PAGE, **asked}) as response:
            assert response.status == 200
            assert response.headers["access-control-allow-origin"] == PAGE
            assert "authorization" in response.headers["access-control-allow-headers"].lower()
        async with session.options(url, headers={"origin": "https://evil.example", **asked}) as response:
            assert "access-control-allow-origin" not in response.headers
        for key, status in (("k", 200), ("wrong", 401)):
            got, headers, _ = await post(target.url, chat(), origin=PAGE, authorization=f"Bearer {key}")
            assert got == status
            assert headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in headers["access-control-expose-headers"]
        _, headers, raw = await post(target.url, chat(stream=True), origin=PAGE, authorization="Bearer k")
        assert headers["access-control-allow-origin"] == PAGE
        assert raw.endswith(b"[DONE]\n\n")


async def test_without_the_option_no_page_may_call(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target, aiohttp.ClientSession() as session:
        headers = {"origin": PAGE, "access-control-request-method": "POST"}
        async with session.options(target.url + "/v1/chat/completions", headers=headers) as response:
            assert response.status == 405
            assert "access-control-allow-origin" not in response.headers


def test_an_origin_is_no_name() -> None:
    assert parse(["--redis", "redis://r", "--cors-origin", f"{PAGE},http://localhost:3000"]).cors_origin[0] == PAGE
    assert parse(["--redis", "redis://r", "--cors-origin", "*"]).cors_origin == ("*",)
    for wrong in ("app.example.org", f"{PAGE}/path", "https://"):
        with pytest.raises(ValueError, match="--cors-origin"):
            parse(["--redis", "redis://r", "--cors-origin", wrong])
