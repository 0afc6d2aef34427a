"""Embeddings over the real runner equal `transformers`, however a text is batched, chunked, preempted or cached."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.embedding_models import reference, write_qwen3, write_steps
from tests.worker.scheduler.engine import HandEngine
from worker.contracts.step import NonFinite
from worker.files.embedding import Pooling, find_pooling
from worker.files.errors import UnsupportedModel
from worker.model.load import LoadedModel, LoadOptions, load_model
from worker.runner.model_runner import ModelRunner
from worker.wire import ChoiceState, Embed, Embedding, GenerateRequest, SamplingParams

BLOCK_SIZE = 4
MODES: dict[str, Pooling] = {"lasttoken": Pooling("last"), "mean_tokens": Pooling("mean")}
TEXTS = [[7 * i % 199 + 1, *(i * k % 199 for k in range(1, 3 + 5 * (i % 12)))] for i in range(32)]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    folder = tmp_path_factory.mktemp("qwen3")
    return write_qwen3(folder, vocab_size=200), load_model(str(folder), LoadOptions())


def embed(token_ids: list[int], dimensions: int | None = None) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=0)
    return GenerateRequest("r", "g", "", b"r" * 16, token_ids, (ChoiceState(0, 0),), sampling, embed=Embed(dimensions))


class EmbeddingEngine(HandEngine):
    """Steps by hand, and keeps the embeddings."""

    def __init__(self, model: LoadedModel, pooling: Pooling, num_blocks: int = 800, **options: Any) -> None:
        runner = ModelRunner(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, eos_token_ids=())
        super().__init__(num_blocks, BLOCK_SIZE, runner=runner, pooling=pooling, **options)

    def embed(self, texts: list[list[int]], dimensions: int | None = None) -> list[torch.Tensor]:
        requests = [self.submit(embed(text, dimensions)) for text in texts]
        self.finish()
        answers = [self.answer(request) for request in requests]
        assert all(answer.tokens == {} and answer.finished[0].reason == "length" for answer in answers)
        return [vector_of(answer.embedding) for answer in answers]


def vector_of(frame: Embedding | None) -> torch.Tensor:
    assert frame is not None
    return torch.tensor(array("f", frame.vector).tolist())


def largest_error(got: list[torch.Tensor], model: Any, mode: str, dimensions: int | None = None) -> float:
    wanted = [reference(model, text, mode, dimensions) for text in TEXTS[: len(got)]]
    return max(float((one - other).abs().max()) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_32_equals_transformers_and_each_alone(written: tuple[Any, LoadedModel], mode: str) -> None:
    model, loaded = written
    together = EmbeddingEngine(loaded, MODES[mode], max_num_batched_tokens=4096).embed(TEXTS)
    alone = [EmbeddingEngine(loaded, MODES[mode]).embed([text])[0] for text in TEXTS[:8]]
    assert len(together[0]) == 64
    assert largest_error(together, model, mode) < TOLERANCE
    assert largest_error(alone, model, mode) < TOLERANCE


@pytest.mark.parametrize("prefix_cache", ["hash", "radix", "off"])
@pytest.mark.parametrize("mode", MODES)
def test_chunks_and_preemption_change_nothing(written: tuple[Any, LoadedModel], mode: str, prefix_cache: Any) -> None:
    """The pool holds the longest texts one at a time, and each takes several steps."""
    model, loaded = written
    options = {"max_num_batched_tokens": 11, "max_num_seqs": 9, "watermark": 0.0}
    engine = EmbeddingEngine(loaded, MODES[mode], 24, prefix_cache=prefix_cache, **options)
    requests = [engine.submit(embed(text)) for text in TEXTS]
    while engine.scheduler.has_work:
        if engine.now_s in (2, 5, 9, 14):
            engine.scheduler.preempt_all()
        engine.step()
    engine.finish()
    got = [vector_of(engine.answer(request).embedding) for request in requests]
    assert largest_error(got, model, mode) < TOLERANCE


@pytest.mark.parametrize(("mode", "reuses"), [("lasttoken", True), ("mean_tokens", False)])
def test_a_cached_prefix_serves_the_last_token_alone(written: tuple[Any, LoadedModel], mode: str, reuses: bool) -> None:
    model, loaded = written
    engine = EmbeddingEngine(loaded, MODES[mode])
    first = engine.embed(TEXTS)
    before = engine.allocator.stats().hit_tokens
    second = engine.embed(TEXTS)
    assert (engine.allocator.stats().hit_tokens > before + 500) == reuses
    assert largest_error(second, model, mode) < TOLERANCE
    assert max(float((one - other).abs().max()) for one, other in zip(first, second, strict=True)) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_step_counts_no_token_twice(
    written: tuple[Any, LoadedModel], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loaded = written
    engine = EmbeddingEngine(loaded, MODES[mode], max_num_batched_tokens=11, max_num_seqs=9)
    launch, calls = ModelRunner.launch, iter(range(1000))

    def fails_now_and_then(self: ModelRunner, step: Any) -> Any:
        if next(calls) % 5 == 3:
            raise RuntimeError("the device says no")
        return launch(self, step)

    monkeypatch.setattr(ModelRunner, "launch", fails_now_and_then)
    got = engine.embed([TEXTS[0], TEXTS[11], TEXTS[10]])
    wanted = [reference(model, text, mode) for text in (TEXTS[0], TEXTS[11], TEXTS[10])]
    assert next(calls) > 12
    assert all(torch.allclose(one, other, atol=TOLERANCE) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_dimensions_cut_and_normalise_again(written: tuple[Any, LoadedModel], mode: str) -> None:
    model, loaded = written
    got = EmbeddingEngine(loaded, MODES[mode]).embed(TEXTS, 24)
    assert {len(vector) for vector in got} == {24}
    assert largest_error(got, model, mode, 24) < TOLERANCE
    assert all(abs(float(vector.norm()) - 1.0) < TOLERANCE for vector in got)


def test_a_model_may_leave_its_embeddings_as_they_are(written: tuple[Any, LoadedModel]) -> None:
    model, loaded = written
    (got,) = EmbeddingEngine(loaded, Pooling("mean", normalise=False)).embed(TEXTS[1:2])
    with torch.inference_mode():
        want = model(torch.tensor([TEXTS[1]])).last_hidden_state[0].mean(0)
    assert abs(float(want.norm()) - 1.0) > 0.1
    assert torch.allclose(got, want, atol=TOLERANCE)


def test_an_embedding_that_is_not_finite_fails(written: tuple[Any, LoadedModel]) -> None:
    _, loaded = written
    norm = loaded.decoder._norm  # type: ignore[attr-defined]
    loaded.decoder._norm = lambda hidden: norm(hidden) * float("nan")  # type: ignore[attr-defined]
    try:
        engine = EmbeddingEngine(loaded, Pooling())
        request = engine.submit(embed(TEXTS[0]))
        plan = engine.scheduler.schedule(1.0)
        assert plan is not None
        with pytest.raises(NonFinite):
            engine.runner.run(plan.step())
        assert engine.answer(request).embedding is None
    finally:
        loaded.decoder._norm = norm  # type: ignore[attr-defined]


# --- a model's files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normalise", [True, False])
def test_the_files_choose_the_pooling(tmp_path: Path, mode: str, normalise: bool) -> None:
    write_steps(tmp_path, mode, normalise=normalise)
    wanted = Pooling(MODES[mode].kind, normalise)
    assert find_pooling("auto", tmp_path) == find_pooling("embed", tmp_path) == wanted
    (tmp_path / "model.gguf").touch()
    assert find_pooling("auto", tmp_path / "model.gguf") == wanted
    assert find_pooling("generate", tmp_path) is None


def test_without_files_the_option_decides(tmp_path: Path) -> None:
    assert find_pooling("auto", tmp_path) is None
    assert find_pooling("generate", tmp_path) is None
    assert find_pooling("embed", tmp_path) == Pooling("last", normalise=True)


def test_the_pooling_file_may_stand_alone_and_name_its_mode(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    assert find_pooling("auto", tmp_path) == Pooling("mean", normalise=True)


@pytest.mark.parametrize("mode", ["cls_token", "max_tokens"])
def test_other_modes_are_refused_by_name(tmp_path: Path, mode: str) -> None:
    write_steps(tmp_path, mode)
    with pytest.raises(UnsupportedModel, match=f"pooling by {mode}"):
        find_pooling("auto", tmp_path)


def test_other_steps_are_refused_by_name(tmp_path: Path) -> None:
    write_steps(tmp_path, "lasttoken")
    file = tmp_path / "modules.json"
    file.write_text(file.read_text().replace("models.Normalize", "models.Dense"))
    with pytest.raises(UnsupportedModel, match="the step Dense"):
        find_pooling("auto", tmp_path)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.e2e), "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_with_deterministic_no_chunk_changes_a_bit(mode: str, dtype: str, tmp_path: Path) -> None:
    """The layers' results have the same bits in every chunk, and so has their sum."""
    write_qwen3(tmp_path, vocab_size=200)
    loaded = load_model(str(tmp_path), LoadOptions(dtype=dtype, deterministic=True))
    text = [11 * i % 199 for i in range(211)]
    pooling = Pooling(MODES[mode].kind, normalise=False)
    sums = set()
    for most in (1024, 1, 2, 7, 33, 64, 100):
        (got,) = EmbeddingEngine(loaded, pooling, max_num_batched_tokens=most, max_num_seqs=1).embed([text])
        sums.add(tuple(got.tolist()))
    assert len(sums) == 1
