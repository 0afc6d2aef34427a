"""The worker's own scheduler and runner: decodes that never end, and long prompts next to them, one after another."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from cache.allocators import make_allocator
from worker.contracts.engine import RequestKey
from worker.loader import warm_up
from worker.model.config import LoadOptions
from worker.model.load import LoadedModel, load_model
from worker.runner.model_runner import ModelRunner
from worker.scheduler.budget import BatchLimits
from worker.scheduler.plan import StepPlan
from worker.scheduler.request import Request
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.step_objective import StepObjective
from worker.wire import ChoiceState, GenerateRequest, SamplingParams

BLOCK_SIZE: Final = 16
_DECODE_PROMPT_TOKENS: Final = 32
_DECODE_STEPS: Final = 10
"""Steps of the decodes before a prompt comes."""
_ROOT: Final = b"benchmark-steps!"


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
        stepper = self._stepper(None, num_steps)
        times = sorted(cpu_s for _, cpu_s in (next(stepper.steps) for _ in range(num_steps)))
        return times[len(times) // 2]

    def mixed(self, max_step_s: float | None, num_prompts: int) -> StepSeconds:
        """Prefill prompts, each next to new decodes, bounded by the objective. The first prompt is left out."""
        objective = None if max_step_s is None else self._objective(max_step_s)
        times, prompt_cpu_s, num_tokens = [], [], 0
        for number in range(1 + num_prompts):
            stepper = self._stepper(objective, self._prompt_tokens)
            prompt = stepper.submit(self._prompt(self._prompt_tokens), 1)
            steps = []
            while prompt.first_token_s is None:
                steps.append(next(stepper.steps))
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

    def _stepper(self, objective: StepObjective | None, num_steps: int) -> _Stepper:
        """Return an engine that decodes."""
        max_tokens = min(num_steps + 64, self._model.config.max_model_len - _DECODE_PROMPT_TOKENS)
        per_decode = -(-(_DECODE_PROMPT_TOKENS + max_tokens) // BLOCK_SIZE)
        num_blocks = 2 + self._num_decodes * per_decode + 2 * -(-self._prompt_tokens // BLOCK_SIZE)
        stepper = _Stepper(self._model, num_blocks, objective)
        decoding = [stepper.submit(self._prompt(_DECODE_PROMPT_TOKENS), max_tokens) for _ in range(self._num_decodes)]
        while any(request.first_token_s is None for request in decoding):
            next(stepper.steps)
        for _ in range(_DECODE_STEPS):
            next(stepper.steps)
        return stepper


class _Stepper:
    def __init__(self, model: LoadedModel, num_blocks: int, objective: StepObjective | None) -> None:
        limits = BatchLimits(max_num_batched_tokens=512, max_model_len=model.config.max_model_len)
        allocator = make_allocator("hash", num_blocks, BLOCK_SIZE)
        self._runner = ModelRunner(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, eos_token_ids=())
        self._scheduler = Scheduler(allocator, limits, (), objective=objective)
        self._num_requests = 0
        self.steps: Iterator[tuple[StepPlan, float]] = self._run()
        """Each step, and its processor time."""

    def submit(self, prompt_ids: list[int], max_tokens: int) -> Request:
        self._num_requests += 1
        wire = GenerateRequest(
            request_id=str(self._num_requests),
            gateway_id="bench",
            epoch="",
            root=_ROOT,
            prompt_ids=prompt_ids,
            choices=(ChoiceState(0, self._num_requests),),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        request = Request(RequestKey(self._num_requests), wire, 0.0, 30.0, {})
        self._scheduler.submit(request)
        return request

    def _run(self) -> Iterator[tuple[StepPlan, float]]:
        while (plan := self._scheduler.schedule(time.monotonic())) is not None:
            begun_s = time.process_time()
            results = self._runner.run(plan.step())
            self._scheduler.update(plan, results, time.monotonic())
            cpu_s = time.process_time() - begun_s
            if (objective := self._scheduler.objective) is not None:
                objective.measure(plan.num_decodes, plan.prefills, cpu_s)
            yield plan, cpu_s
