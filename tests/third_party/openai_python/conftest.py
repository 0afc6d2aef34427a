"""Run openai-python's own tests against the gateway over a scripted worker, or against HEADSTART_TEST_BASE_URL."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, DefaultAioHttpClient, DefaultAsyncHttpx2Client, DefaultHttpx2Client, OpenAI
from pytest_asyncio import is_async_test
from tokenizers import Tokenizer

from tests.server.conftest import bundle, raw_tokenizer
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from worker.wire import TokenizerBundle

__all__ = ["bundle", "raw_tokenizer"]

MODELS = ("gpt-6-astra", "gpt-3.5-turbo-instruct")
API_KEY = "My API Key"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "openai_python" in item.nodeid and isinstance(item, pytest.Function) and is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session")
def base_url(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> Iterator[str]:
    """A gateway in a thread of its own: the sync client blocks this one."""
    if given := os.environ.get("HEADSTART_TEST_BASE_URL"):
        yield given
        return
    urls: list[str] = []
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        worker = ScriptedWorker(bundle, reply=raw_tokenizer.encode("The capital of France is Paris.").ids)
        async with gateway(worker, aliases=dict.fromkeys(MODELS, "tiny")) as target:
            urls.append(f"{target.url}/v1")
            started.set()
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            loop.close()
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    yield urls[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()


@pytest.fixture(scope="session")
def client(request: pytest.FixtureRequest, base_url: str) -> Iterator[OpenAI]:
    strict = bool(getattr(request, "param", True))
    with OpenAI(
        base_url=base_url, api_key=API_KEY, _strict_response_validation=strict, http_client=DefaultHttpx2Client()
    ) as opened:
        yield opened


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def async_client(request: pytest.FixtureRequest, base_url: str) -> AsyncIterator[AsyncOpenAI]:
    options = getattr(request, "param", True)
    options = options if isinstance(options, dict) else {"strict": options}
    http_client = DefaultAioHttpClient() if options.get("http_client") == "aiohttp" else DefaultAsyncHttpx2Client()
    async with AsyncOpenAI(
        base_url=base_url,
        api_key=API_KEY,
        _strict_response_validation=bool(options.get("strict", True)),
        http_client=http_client,
    ) as opened:
        yield opened
