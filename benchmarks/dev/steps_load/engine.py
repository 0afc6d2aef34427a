"""The worker's own scheduler and runner: decodes that never end, and long prompts next to them, one after another."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Final

import torch

from benchmarks.dev.engine import Engine
from worker.loading.warm_up import warm_up
from worker.model.config import LoadOptions
from worker.model.load import LoadedModel, load_model
from worker.runner.model_runner import ModelRunner
from worker.scheduler.plan import StepPlan
from worker.scheduler.step_objective import StepObjective

BLOCK_SIZE: Final = 16
_STEP_TOKENS: Final = 512
_DECODE_PROMPT_TOKENS: Final = 32
_DECODE_STEPS: Final = 10
"""Steps of the decodes before a prompt comes."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Steps with decodes and prefill."""

    cpu_s: list[float]
    """Processor time of each: on a shared machine, what it takes by itself."""
    num_prefill_tokens: int
    prompt_cpu_s: list[float]
    """Processor time from each prompt's arrival to its first token."""


class StepBench:
    """One model on one thread, so that processor time is the time of a step on an idle machine."""

    def __init__(self, model: str, dtype: str, num_decodes: int, prompt_tokens: int) -> None:
        torch.set_num_threads(1)
        self._model: LoadedModel = load_model(model, LoadOptions(dtype=dtype))
        self._num_decodes, self._prompt_tokens = num_decodes, prompt_tokens
        self._random = random.Random(0)

    def decode_s(self, num_steps: int) -> float:
        """Return the median processor time of a step of decodes only."""
        engine = self._decoding(None, num_steps)
        times = sorted(_timed_step(engine, None)[1] for _ in range(num_steps))
        return times[len(times) // 2]

    def mixed(self, max_step_s: float | None, num_prompts: int) -> StepSeconds:
        """Prefill prompts, each next to new decodes, bounded by the objective. The first prompt is left out."""
        objective = None if max_step_s is None else self._objective(max_step_s)
        times, prompt_cpu_s, num_tokens = [], [], 0
        for number in range(1 + num_prompts):
            engine = self._decoding(objective, self._prompt_tokens)
            prompt = engine.submit(self._prompt(self._prompt_tokens), 1)
            steps = []
            while prompt.first_token_s is None:
                steps.append(_timed_step(engine, objective))
            if number:
                times += [cpu_s for _, cpu_s in steps]
                num_tokens += sum(plan.num_prefill_tokens for plan, _ in steps)
                prompt_cpu_s.append(sum(cpu_s for _, cpu_s in steps))
        return StepSeconds(times, num_tokens, prompt_cpu_s)

    def _objective(self, max_step_s: float) -> StepObjective:
        """Begin with the rates that a worker measures when it starts."""
        num_tokens = 256
        runner = ModelRunner(
            self._model, num_blocks=2 + num_tokens // BLOCK_SIZE, block_size=BLOCK_SIZE, eos_token_ids=()
        )
        rate = warm_up(runner, num_tokens, BLOCK_SIZE)
        return StepObjective(max_step_s, BLOCK_SIZE, rate.seconds(1), rate.step_tokens)

    def _prompt(self, num_tokens: int) -> list[int]:
        return self._random.choices(range(self._model.config.vocab_size), k=num_tokens)

    def _decoding(self, objective: StepObjective | None, num_steps: int) -> Engine:
        """Return an engine that decodes."""
        max_tokens = min(num_steps + 64, self._model.config.max_model_len - _DECODE_PROMPT_TOKENS)
        per_decode = -(-(_DECODE_PROMPT_TOKENS + max_tokens) // BLOCK_SIZE)
        num_blocks = 2 + self._num_decodes * per_decode + 2 * -(-self._prompt_tokens // BLOCK_SIZE)
        engine = Engine(self._model, num_blocks, BLOCK_SIZE, _STEP_TOKENS, objective=objective)
        decoding = [engine.submit(self._prompt(_DECODE_PROMPT_TOKENS), max_tokens) for _ in range(self._num_decodes)]
        while any(request.first_token_s is None for request in decoding):
            _timed_step(engine, objective)
        for _ in range(_DECODE_STEPS):
            _timed_step(engine, objective)
        return engine


def _timed_step(engine: Engine, objective: StepObjective | None) -> tuple[StepPlan, float]:
    """Return a step and its processor time, which the objective measures."""
    begun_s = time.process_time()
    done = engine.step()
    cpu_s = time.process_time() - begun_s
    assert done is not None, "there is nothing to do"
    plan, _ = done
    if objective is not None:
        objective.measure(plan.num_decode_rows, plan.prefills, cpu_s)
    return plan, cpu_s
