"""`helm test` (files/smoke.py) before gateways whose models answer chats, give embeddings, or neither."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.k8s.tools import CHART

CHAT: dict[str, Any] = {"usage": {"completion_tokens": 4}, "choices": [{"message": {"content": "Hi"}}]}
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"chat": CHAT, "silent": CHAT | {"usage": {"completion_tokens": 0}}},
    "/v1/embeddings": {"embed": {"data": [{"embedding": [0.5, 0.5]}]}},
}
REFUSALS = {  # of a chat, as the gateway's `check_generates` has them
    "embed": "The model 'embed' generates no text: use /v1/embeddings, or ask for another model.",
    "rank": "The model 'rank' generates no text: use /rerank, /score, or ask for another model.",
    "embed_broken": "The model 'embed_broken' generates no text: use /v1/embeddings, or ask for another model.",
}


@contextmanager
def gateway(*models: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say({"data": [{"id": model} for model in models]})

        def do_POST(self) -> None:
            model = json.loads(self.rfile.read(int(self.headers["content-length"])))["model"]
            self._say(ANSWERS[self.path].get(model), REFUSALS.get(model, "no"))

        def _say(self, body: object, refusal: str = "") -> None:
            self.send_response(400 if body is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(body or {"error": {"message": refusal}}).encode())

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def smoke(*models: str) -> subprocess.CompletedProcess[str]:
    with gateway(*models) as url:
        command = [sys.executable, "-I", str(CHART / "files" / "smoke.py"), url]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("models", "passes"),
    [
        (["embed", "chat"], True),
        (["chat", "broken"], False),
        (["chat", "silent"], False),
        (["chat", "embed_broken"], False),
        ([], False),
    ],
)
def test_every_model_answers(models: list[str], passes: bool) -> None:
    done = smoke(*models)
    assert (done.returncode == 0) == passes, done.stderr
    assert not passes or done.stdout == "embed gives an embedding of 2 numbers\nchat answers: Hi\n"


def test_a_reranker_is_not_tried() -> None:
    done = smoke("rank", "chat")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank is not tried: it gives neither text nor embeddings\nchat answers: Hi\n"
