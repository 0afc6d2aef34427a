"""Worker processes for fault tests: the product's own `worker.main`, in a forked process.

The parent has torch loaded already, so that a fleet starts in a second. `Additions` lists what a test may add to the
runner or to the disk.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

import worker.loading.engine
import worker.main
from worker.contracts.step import Launch, Runner, SequenceResult, Step, StepResult
from worker.engine.engine import EngineCore
from worker.scheduler.scheduler import Scheduler
from worker.wire import SamplingParams

_PR_SET_PDEATHSIG: Final = 1


class InjectedError(RuntimeError):
    """Raised by a step that a test wants to fail."""


@dataclass(frozen=True, slots=True)
class Additions:
    """Faults that a test adds to a worker's runner."""

    step_s: float = 0.0
    """Shortest duration of a step, as on a device other than this machine's cores."""
    poison_token: int | None = None
    """A step with this token in it fails, in the way of `poison`."""
    poison: str = "raise"
    """raise: the step raises. break: so do all later steps, as after an illegal access on a GPU. kill: the process dies
    by SIGKILL."""


class AddingRunner:
    """The real runner and what was added to it."""

    overlaps = False

    def __init__(self, runner: Runner, additions: Additions) -> None:
        self._runner = runner
        self._additions = additions
        self._broken = False
        self.numerics = runner.numerics  # type: ignore[attr-defined]

    def prepare(self, params: SamplingParams, prompt_ids: Sequence[int]) -> object:
        return self._runner.prepare(params, prompt_ids)

    def launch(self, step: Step) -> Launch[StepResult]:
        begun_s = time.monotonic()
        self._poison(step)
        result = self._runner.launch(step).collect()
        if (left_s := begun_s + self._additions.step_s - time.monotonic()) > 0:
            time.sleep(left_s)
        return Launch(lambda: result)

    def run(self, step: Step) -> list[SequenceResult]:
        return self.launch(step).collect().sequences

    def _poison(self, step: Step) -> None:
        additions = self._additions
        if any(additions.poison_token in sequence.token_ids for sequence in step.sequences):
            if additions.poison == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            self._broken = additions.poison == "break"
            raise InjectedError("poison")
        if self._broken:
            raise InjectedError("the device is broken")


def run_worker(argv: Sequence[str], log_path: str, additions: Additions | None) -> None:
    """The target of a forked process. Never returns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    if additions is not None:

        def with_additions(scheduler: Scheduler, runner: Runner, *args: Any, **options: Any) -> EngineCore:
            return EngineCore(scheduler, AddingRunner(runner, additions), *args, **options)

        worker.loading.engine.EngineCore = with_additions  # type: ignore[assignment, misc]
    code = worker.main.main(list(argv))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
