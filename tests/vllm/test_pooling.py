"""Real engines that embed or rank: every answer is the engine's own, for each of 200 random requests."""

from __future__ import annotations

import base64
import random
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests import smollm2
from tests.e2e.serving import Serve
from tests.tiny_model import write_tiny_model
from tests.vllm.comparable import comparable, same
from tests.vllm.engines import MODEL, Engine, Options
from tests.waiting import HANG_S

_HIDDEN_SIZE = 128
"""For heads of 32: vLLM has none of 16 where the processor has AMX."""
NUM_REQUESTS: Final = 200
WORDS: Final = ("cat", "dog", "moon", "Größe", "日本語", "🙂", "\n", "  ", "<|im_end|>", "The", "of", "2,048")


def write_reranker(folder: Path) -> Path:
    """A tiny Llama that scores a pair of texts by one number."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    write_tiny_model(folder, hidden_size=_HIDDEN_SIZE)
    config = LlamaConfig.from_pretrained(folder)
    config.num_labels, config.pad_token_id, config.architectures = 1, 0, ["LlamaForSequenceClassification"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 60))) or "a"


def embedding(rng: random.Random) -> tuple[str, dict[str, Any]]:
    texts: Any = [text(rng) for _ in range(rng.randint(1, 4))]
    ids = [rng.choices(range(3, smollm2.tokenizer().get_vocab_size()), k=9)]
    body = {"input": rng.choice([texts, texts[0], ids]), "encoding_format": rng.choice(["float", "base64"])}
    return rng.choice(["/v1/embeddings", "/pooling"]), body


def rank(rng: random.Random) -> tuple[str, dict[str, Any]]:
    documents = [text(rng) for _ in range(rng.randint(1, 4))]
    return rng.choice(
        [
            ("/rerank", {"query": text(rng), "documents": documents, "top_n": rng.randint(1, 4)}),
            ("/v1/rerank", {"query": text(rng), "documents": documents}),
            ("/score", {"text_1": text(rng), "text_2": documents}),
            ("/classify", {"input": documents}),
        ]
    )


def decoded(value: Any) -> Any:
    """Return an answer with the numbers of embeddings in base64, the only long texts."""
    if isinstance(value, dict):
        return {name: decoded(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [decoded(item) for item in value]
    is_base64 = isinstance(value, str) and len(value) > 4 * _HIDDEN_SIZE
    return memoryview(base64.b64decode(value)).cast("f").tolist() if is_base64 else value


@pytest.mark.parametrize("kind", ["embeds", "ranks"])
def test_answers_are_the_engines_own(kind: str, tmp_path: Path) -> None:
    model = (
        write_tiny_model(tmp_path / kind, hidden_size=_HIDDEN_SIZE)
        if kind == "embeds"
        else write_reranker(tmp_path / kind)
    )
    options = Options(model=model, args=("--runner", "pooling"), max_model_len=2048)
    rng = random.Random(kind)
    with Engine(tmp_path, options) as engine, Serve("--engine-url", engine.url) as serve:
        for number in range(NUM_REQUESTS):
            path, body = (embedding if kind == "embeds" else rank)(rng)
            body |= {"model": MODEL, "cache_salt": f"tenant {number % 2}"}
            theirs = httpx.post(engine.url + path, json=body, timeout=HANG_S)
            ours = serve.post(path, body)
            assert ours.status_code == 200, ours.text
            assert same(decoded(comparable(ours)), decoded(comparable(theirs))), (path, body, ours.text)
            assert ours.headers["x-headstart-worker"] == "engine-0"
        chat = serve.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]})
        assert (chat.status_code, "generates no text" in chat.text) == (400, True)
