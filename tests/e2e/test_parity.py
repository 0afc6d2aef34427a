"""Greedy tokens through the whole product equal `transformers` generate, and do not depend on the cache."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests import smollm2 as reference_source
from tests.e2e.serving import Serve, trace_path
from tests.embedding_models import reference as embedding_of
from tests.embedding_models import write_smollm2

pytestmark = pytest.mark.e2e
SIZES = ((6, 800), (50, 1500))
"""Prompts, and the tokens of the longest: in the suite, and in the deep run."""
MAX_TOKENS = 12
OTHERS = 0.4
"""The share of the prompts, the shorter ones, that is answered again by a server with another prefix cache."""
TIE = 1e-4
"""Two logits this close may be ordered either way by the rounding of another summation order."""

SENTENCE = "the capital of France is Paris and that of Japan is Tokyo where many people live"
WORDS = SENTENCE.split(" ")
TEXTS = [f"Text {i}: {' '.join(WORDS[(i * 5 + j) % len(WORDS)] for j in range(3 + 9 * i % 70))}" for i in range(9)]
EMBEDDING_TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=[SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.deep)], ids=str)
def prompts(request: pytest.FixtureRequest) -> list[list[int]]:
    """Real text of n conversations, the i-th cut to i/n of the longest length."""
    num_prompts, max_tokens = request.param
    tokenizer: Tokenizer = reference_source.tokenizer()
    with gzip.open(trace_path("taubench_airline_text_dev.jsonl.gz"), "rt") as lines:
        conversations = [json.loads(line)["messages"] for line in lines]
    cut: list[list[int]] = []
    for index in range(num_prompts):
        # Without the shared system prompt every other time, so that both long and short prefixes are shared.
        messages = conversations[2 * index][index % 2 :]
        text = "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)
        cut.append(tokenizer.encode(text).ids[: max_tokens * (index + 1) // num_prompts])
    assert max(map(len, cut)) == max_tokens
    return cut


def answer_ids(serve: Serve, model: str, prompt_ids: Sequence[int]) -> list[int]:
    body = {"model": model, "prompt": list(prompt_ids), "max_tokens": MAX_TOKENS, "temperature": 0}
    answer = serve.post("/v1/completions", body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


@pytest.fixture(scope="module")
def answers(smollm2: Serve, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts twice, four at a time: batched, chunked, on either worker, and the second time from the cache."""
    model = next(iter(smollm2.client().models.list())).id
    with ThreadPoolExecutor(4) as pool:
        first, second = (list(pool.map(lambda ids: answer_ids(smollm2, model, ids), prompts)) for _ in range(2))
    assert first == second
    return first


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    """On one thread: threads that wait for each other are slow on a machine that does something else as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield reference_source.reference_model()
    torch.set_num_threads(threads)


def test_equals_transformers_generate(prompts: list[list[int]], answers: list[list[int]], reference: Any) -> None:
    ties = 0
    for prompt_ids, got in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            output = reference.generate(
                torch.tensor([prompt_ids]),
                attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        want = output.sequences[0, len(prompt_ids) :].tolist()
        for position, (ours, theirs) in enumerate(zip(got, want, strict=True)):
            if ours != theirs:
                best, second = output.logits[position][0].float().topk(2).values.tolist()
                assert best - second < TIE, (len(prompt_ids), position, got, want)
                ties += 1
                break  # after a tie the two go different ways, both right
    assert ties <= 1 + len(prompts) // 25, "ties are rare: more than one is a bug that hides behind the tolerance"


def test_embeddings_equal_transformers(reference: Any, tmp_path: Path) -> None:
    """Singly, in a batch, and from the cache."""
    folder = write_smollm2(tmp_path / "embedder", "mean_tokens")
    ids = [reference_source.tokenizer().encode(text).ids for text in TEXTS]
    wanted = torch.stack([embedding_of(reference.model, each, "mean_tokens") for each in ids])
    options = ["--num-workers", "2", "--threads", "1", "--worker-args", "--kv-cache-memory 256M"]
    with Serve("--model", str(folder), *options) as serve:
        model = serve.model()
        for batches in ([TEXTS], [[text] for text in TEXTS]):
            answers = [serve.post("/v1/embeddings", {"model": model, "input": batch}) for batch in batches]
            got = [torch.tensor(item["embedding"]) for answer in answers for item in answer.json()["data"]]
            assert (torch.stack(got) - wanted).abs().max() < EMBEDDING_TOLERANCE
    assert (wanted[0] - wanted[1]).abs().max() > 100 * EMBEDDING_TOLERANCE, "the texts are told apart"


# In the suite, tests/worker/test_exactness.py holds all three caches to each other, on a tiny model.
@pytest.mark.parametrize("other_cache", [pytest.param("off", marks=pytest.mark.deep), "radix"])
def test_does_not_depend_on_the_prefix_cache(
    prompts: list[list[int]], answers: list[list[int]], other_cache: str
) -> None:
    options = ["--num-workers", "1", "--threads", "1", "--worker-args", "--kv-cache-memory 1G"]
    with Serve("--prefix-cache", other_cache, *options) as serve:
        model = serve.model()
        with ThreadPoolExecutor(4) as pool:
            shorter = prompts[: round(OTHERS * len(prompts))]
            others = list(pool.map(lambda ids: answer_ids(serve, model, ids), shorter))
    assert others == answers[: len(others)]
