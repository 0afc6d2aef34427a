"""The HTTP clients of languages and shells, with their defaults: some offer another protocol with each request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.running import PROGRAMS, converse, run
from tests.e2e.serving import Serve


def test_jdk(smollm2: Serve) -> None:
    """It offers HTTP/2, and expects an answer in HTTP/1.1 to the whole body."""
    answer = converse(smollm2, "java", str(PROGRAMS / "JdkChat.java"))
    assert answer["statuses"] == [200] * 8


def test_go(smollm2: Serve, tmp_path: Path) -> None:
    answer = converse(smollm2, "go", "run", str(PROGRAMS / "go_chat.go"), GOCACHE=str(tmp_path), GO111MODULE="off")
    assert answer["statuses"] == [200] * 4


def test_node(smollm2: Serve) -> None:
    answer = converse(smollm2, "node", str(PROGRAMS / "node_chat.cjs"))
    assert answer["statuses"] == [200] * 8


@pytest.mark.parametrize("option", ["--http2", "--http1.1", "--http1.0"])
@pytest.mark.parametrize("num_words", [1, 1500])
@pytest.mark.parametrize("framing", ["", "Transfer-Encoding: chunked", "Expect: 100-continue"])
def test_curl(option: str, num_words: int, framing: str, smollm2: Serve) -> None:
    if (option, framing) == ("--http1.0", "Transfer-Encoding: chunked"):
        pytest.skip("HTTP/1.0 has no chunks")
    messages = [{"role": "user", "content": "word " * num_words}]
    body = json.dumps({"model": smollm2.model(), "max_tokens": 4, "messages": messages})
    headers = ["-H", "content-type: application/json", *(["-H", framing] if framing else [])]
    command = ["curl", "-sS", option, *headers, "-d", body, "-w", "\n%{http_code}"]
    answer, _, status = run([*command, f"{smollm2.url}/v1/chat/completions"]).rpartition("\n")
    assert (status, json.loads(answer)["object"]) == ("200", "chat.completion")
