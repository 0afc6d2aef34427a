"""The main job on the real model: one command, then any OpenAI client."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import threading

import httpx
import pytest

from tests.e2e.serving import Serve, cached_tokens, chat
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.e2e
BLOCK_SIZE = 16
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def model(smollm2: Serve) -> str:
    ids = [model.id for model in smollm2.client().models.list()]
    assert len(ids) == 1
    return ids[0]


def test_openai_client(smollm2: Serve, model: str) -> None:
    answer = smollm2.client().chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_client_streaming(smollm2: Serve, model: str) -> None:
    stream = smollm2.client().chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, stream=True
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "Paris" in text
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len(chunks) > 3


def test_completions(smollm2: Serve, model: str) -> None:
    answer = smollm2.client().completions.create(
        model=model, prompt="The capital of France is", temperature=0, max_tokens=4
    )
    assert "Paris" in answer.choices[0].text


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_receives_chunks_one_by_one(smollm2: Serve, model: str) -> None:
    """They come while the answer is computed: who leaves after some of them cuts it short."""
    body = {"model": model, "messages": [{"role": "user", "content": "Count from 1 to 30."}], "stream": True}
    body |= {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}
    before = num_disconnects(smollm2)
    command = ["curl", "-sN", f"{smollm2.url}/v1/chat/completions", "-H", "content-type: application/json"]
    with subprocess.Popen([*command, "-d", json.dumps(body)], stdout=subprocess.PIPE, text=True) as curl:
        assert curl.stdout is not None
        lines = [line for line in itertools.islice(curl.stdout, 40) if line.strip()]
        curl.kill()
    assert len(lines) == 20
    assert all(line.startswith("data: {") for line in lines)
    wait_until(lambda: num_disconnects(smollm2) == before + 1)


def num_disconnects(serve: Serve) -> float:
    text = httpx.get(f"{serve.ops_url}/metrics", timeout=HANG_S).text
    (line,) = [line for line in text.splitlines() if line.startswith("headstart_client_disconnects_total ")]
    return float(line.split()[-1])


def test_conversation_stays_where_its_prefix_is(smollm2: Serve, model: str, prefix_cache: str) -> None:
    messages = [{"role": "system", "content": "You are a terse travel guide. " * 12}]
    worker, previous_prompt = None, 0
    for turn, city in enumerate(["Rome", "Oslo", "Lima", "Kyoto", "Cairo"]):
        messages.append({"role": "user", "content": f"Tell me one thing about {city}."})
        answer = chat(smollm2, messages, model=model, max_tokens=12)
        usage = answer.json()["usage"]
        if turn == 0:
            worker = answer.headers["x-headstart-worker"]
        elif prefix_cache == "off":
            assert cached_tokens(answer) == 0
        else:
            assert answer.headers["x-headstart-worker"] == worker
            assert cached_tokens(answer) >= previous_prompt // BLOCK_SIZE * BLOCK_SIZE
            assert int(answer.headers["x-headstart-cached-tokens"]) > 0
        previous_prompt = usage["prompt_tokens"]
        messages.append(answer.json()["choices"][0]["message"])


def test_conversations_that_start_at_once_use_both_workers(smollm2: Serve, model: str) -> None:
    """On a busy machine one worker may measure twice the speed of the other, and gets more of them."""
    topics = ("whales", "bridges", "violins", "glaciers", "markets")
    barrier = threading.Barrier(len(topics))
    workers: list[str] = []

    def converse(topic: str) -> None:
        """Ask with a prompt whose prefill takes seconds: it still runs when the other requests come."""
        messages = [{"role": "user", "content": f"Write about {topic}. " * 400}]
        barrier.wait()
        workers.append(chat(smollm2, messages, model=model, max_tokens=1).headers["x-headstart-worker"])

    threads = [threading.Thread(target=converse, args=(topic,)) for topic in topics]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(workers) == {"worker-0", "worker-1"}


def test_gateway_has_no_torch(smollm2: Serve) -> None:
    gateway = smollm2.child("server.gateway")
    assert not [mapped.path for mapped in gateway.memory_maps() if "torch" in mapped.path]
    worker = smollm2.child("worker")
    assert [mapped.path for mapped in worker.memory_maps() if "torch" in mapped.path], "the test looks at nothing"
