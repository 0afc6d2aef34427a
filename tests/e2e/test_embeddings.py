"""/v1/embeddings through gateways, Redis and workers equals `transformers`, singly, in a batch and from the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer

from tests.e2e.serving import SMALL_POOL, Serve
from tests.embedding_models import reference, write_qwen3

pytestmark = pytest.mark.e2e
TOLERANCE = 1e-5
SENTENCE = "the capital of France is Paris and that of Japan is Tokyo where many people live"
WORDS = SENTENCE.split()
TEXTS = [" ".join([f"Text {i}:", *(WORDS[(i * 5 + j) % len(WORDS)] for j in range(3 + 9 * i % 70))]) for i in range(32)]
"""Beyond one step of 512 tokens on a CPU, with many blocks to find in the cache."""


class Embedder:
    """A running server of one embedding model, and the model's reference."""

    def __init__(self, serve: Serve, model: Any, tokenizer: Tokenizer, mode: str) -> None:
        self.serve, self.mode = serve, mode
        self.name = serve.model()
        self._model, self._tokenizer = model, tokenizer

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def want(self, token_ids: Sequence[int], dimensions: int | None = None) -> torch.Tensor:
        return reference(self._model, token_ids, self.mode, dimensions)

    def ask(self, value: Any, **fields: Any) -> httpx.Response:
        return self.serve.post("/v1/embeddings", {"model": self.name, "input": value, **fields})

    def embed(self, value: Any, **fields: Any) -> list[torch.Tensor]:
        answer = self.ask(value, **fields)
        assert answer.status_code == 200, (answer.text, self.serve.lines[-20:])
        return [torch.tensor(item["embedding"]) for item in answer.json()["data"]]


def serving(folder: Path, worker_args: str, num_workers: int = 1) -> Serve:
    options = ["--num-workers", str(num_workers), "--threads", "1", "--worker-args", worker_args]
    return Serve("--model", str(folder), *options)


@pytest.fixture(scope="module", params=["lasttoken", "mean_tokens"])
def qwen3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedder]:
    folder = tmp_path_factory.mktemp("embedder") / "qwen3"
    model = write_qwen3(folder, request.param)
    with serving(folder, SMALL_POOL, num_workers=2) as serve:
        yield Embedder(serve, model, Tokenizer.from_file(str(folder / "tokenizer.json")), request.param)


def largest_error(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(got, wanted, strict=True))


def check_batch_and_alone(embedder: Embedder, texts: list[str], num_alone: int) -> None:
    wanted = [embedder.want(embedder.ids(text)) for text in texts]
    assert largest_error(embedder.embed(texts), wanted) < TOLERANCE
    alone = [embedder.embed(text)[0] for text in texts[:num_alone]]
    assert largest_error(alone, wanted[:num_alone]) < TOLERANCE
    assert largest_error(wanted[:1], wanted[1:2]) > 100 * TOLERANCE, "the texts are told apart"


def test_a_batch_and_each_alone_equal_transformers(qwen3: Embedder) -> None:
    check_batch_and_alone(qwen3, TEXTS, 6)
