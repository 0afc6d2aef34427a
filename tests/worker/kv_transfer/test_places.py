"""A real engine gives the same answer wherever the blocks of its prompt are."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_model
from tests.worker.scheduler.engine import generate
from worker.config import parse
from worker.contracts.engine import EngineOutput, EngineSinks, RequestKey
from worker.contracts.metrics import WorkerMetrics
from worker.engine.engine import EngineCore, PreparedParts
from worker.loading.engine import build_engine
from worker.wire import End, Failed, Started, Tokens

PROMPT = [100 + 7 * n % 9000 for n in range(150)]
NUM_CACHED = 144
MAX_BLOCKS = 24
_keys = count()


@dataclass
class Answered:
    num_cached: int = 0
    loaded: dict[str, int] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Engine:
    """One engine over the tiny model, asked from outside."""

    def __init__(self, model: Path, options: Sequence[str]) -> None:
        self._outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        sinks = EngineSinks(lambda outputs: [self._outputs.put(each) for each in outputs])
        config = parse(["--model", str(model), "--num-blocks", str(MAX_BLOCKS), *options])
        self.core: EngineCore = build_engine(config, "http://w", "w", WorkerMetrics(), lambda text: None, sinks=sinks)
        self.core.start()
        self.core._reporter.rate.add(1, 1e3, time.monotonic())  # computing seems slow: what can be loaded is

    def ask(self, prompt_ids: Sequence[int], max_tokens: int = 12) -> Answered:
        wire = generate(prompt_ids, max_tokens, temperature=0.0, logprobs=0, ignore_eos=True)
        answered = Answered()
        self.core.submit(RequestKey(next(_keys)), wire, PreparedParts())
        while True:
            match self._outputs.get(timeout=60).frame:
                case Started(num_cached, loaded):
                    answered.num_cached, answered.loaded = num_cached, loaded or {}
                case Tokens(_, token_ids, logprobs):
                    answered.token_ids += token_ids
                    answered.logprobs += [each.logprob for each in logprobs or ()]
                case End():
                    return answered
                case Failed() as failed:
                    raise AssertionError(failed)

    def evict(self) -> None:
        """Fill the pool with other prompts."""
        for first in (1, 2, 3):
            self.ask([first + 3 * n % 9000 for n in range(300)], max_tokens=1)


@contextmanager
def running(model: Path, *options: str) -> Iterator[Engine]:
    engine = Engine(model, options)
    try:
        yield engine
    finally:
        engine.core.stop()
        engine.core.grammars.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


NUMERICS = [("float32", "--deterministic"), ("bfloat16", "--deterministic"), ("bfloat16", "")]


@pytest.mark.parametrize(("dtype", "deterministic"), NUMERICS)
@pytest.mark.parametrize("place", ["host", pytest.param("disk", marks=pytest.mark.e2e), "restart"])
def test_an_answer_does_not_depend_on_the_place(
    place: str, dtype: str, deterministic: str, model: Path, tmp_path: Path
) -> None:
    tier = ["--kv-host-memory", "16M"] if place == "host" else ["--kv-disk", str(tmp_path), "--kv-disk-size", "16M"]
    options = ["--dtype", dtype, *filter(None, [deterministic]), *tier]
    with running(model, *options) as engine:
        cold = engine.ask(PROMPT)
        pool = engine.ask(PROMPT)
        if place != "restart":
            engine.evict()
            moved = engine.ask(PROMPT)
    if place == "restart":
        with running(model, *options) as engine:
            moved = engine.ask(PROMPT)
    assert (cold.num_cached, pool.num_cached, pool.loaded) == (0, NUM_CACHED, {})
    assert moved.num_cached == NUM_CACHED
    assert moved.loaded == {"host" if place == "host" else "disk": NUM_CACHED}
    assert moved.token_ids == pool.token_ids
    assert moved.logprobs == pytest.approx(pool.logprobs, abs=1e-4)
    if deterministic:
        assert moved.token_ids == cold.token_ids
        assert moved.logprobs == pytest.approx(cold.logprobs, abs=1e-4)
