"""`--speculate` over HTTP: the answers of a server without it, in fewer steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import SMALL_POOL, Serve
from tests.waiting import HANG_S

pytestmark = pytest.mark.e2e
ACCEPTED = re.compile(r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} (\S+)$", re.MULTILINE)
SKIPPED = re.compile(r"^headstart_worker_skipped_tokens_total (\S+)$", re.MULTILINE)
COLOURS = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 8, "maxItems": 12}
BODIES: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 60, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1, "seed": 3, "max_tokens": 60, "n": 3},
    {"temperature": 1, "seed": 4, "max_tokens": 120, "logit_bias": {"50": 90, "51": 90, "52": 91}},
    {"temperature": 1, "seed": 5, "max_tokens": 60, "logit_bias": {"50": 90, "51": 90}, "frequency_penalty": 0.2},
    {"temperature": 0, "max_tokens": 200, "logit_bias": {"50": 90, "51": 90}, "stop": ["QRRQ"]},
    {
        "temperature": 0,
        "max_tokens": 150,
        "response_format": {"type": "json_schema", "json_schema": {"name": "colours", "schema": COLOURS}},
    },
]


@pytest.fixture(scope="module")
def servers(tiny_model: Path) -> Iterator[tuple[Serve, Serve]]:
    options = ("--model", str(tiny_model), "--num-workers", "1", "--threads", "1")
    worker_args = f"--worker-args={SMALL_POOL} --dtype float32 --deterministic"
    with Serve(*options, worker_args) as plain, Serve(*options, f"{worker_args} --speculate 6") as drafting:
        yield plain, drafting


def num_accepted(serve: Serve) -> float:
    """The drafts that were right: each is a token beyond the first of its step."""
    [worker] = httpx.get(f"{serve.ops_url}/workers", timeout=HANG_S).json()["workers"]
    text = httpx.get(f"{worker['url']}/metrics", timeout=HANG_S).text
    [value], [skipped] = ACCEPTED.findall(text), SKIPPED.findall(text)
    assert value == skipped
    return float(value)


@pytest.mark.parametrize("body", BODIES)
def test_answers_are_the_same(servers: tuple[Serve, Serve], body: dict[str, Any]) -> None:
    message = {"role": "user", "content": "red green red green red green"}
    request = {"messages": [message], "return_token_ids": True, **body}
    plain, drafting = (serve.post("/v1/chat/completions", {"model": serve.model(), **request}) for serve in servers)
    assert plain.status_code == drafting.status_code == 200, drafting.text
    assert drafting.json()["choices"] == plain.json()["choices"]
    assert drafting.json()["usage"] == plain.json()["usage"]


def test_a_stream_that_repeats_itself_takes_fewer_steps(servers: tuple[Serve, Serve]) -> None:
    before = num_accepted(servers[1])
    body = {"prompt": "a b a b", "max_tokens": 300, "temperature": 0, "logit_bias": {"50": 90, "51": 90}}
    texts = []
    for serve in servers:
        stream = serve.client().completions.create(model=serve.model(), stream=True, **body)
        texts.append("".join(event.choices[0].text for event in stream if event.choices))
    assert texts[0] == texts[1]
    assert num_accepted(servers[1]) > before + 100
