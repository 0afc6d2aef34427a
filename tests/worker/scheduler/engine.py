"""The engine over an allocator and the arithmetic runner, stepped by hand: its thread never starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cache.allocators import PrefixCache, make_allocator
from cache.allocators.base import Allocator
from tests.members import make_member
from tests.worker.scheduler.arithmetic_runner import VOCAB, ArithmeticRunner
from worker.contracts.engine import EngineOutput, EngineSinks, RequestKey
from worker.contracts.metrics import WorkerMetrics
from worker.contracts.rates import PrefillRate
from worker.contracts.step import Runner, Step
from worker.engine.engine import EngineCore
from worker.files.embedding import Pooling
from worker.kernels.device import DeviceStream
from worker.kv_transfer.transfers import KVTransfers
from worker.scheduler.budget import BatchLimits
from worker.scheduler.plan import StepPlan
from worker.scheduler.request import Constraint, Request, failed_by
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.speculation import Speculation
from worker.wire import (
    ChoiceState,
    Embedding,
    End,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    PromptLogprobs,
    SamplingParams,
    TokenizerBundle,
    TokenLogprobs,
    Tokens,
)

ROOT = b"r" * 16
MEMBER = make_member(epoch="first", block_size=4, max_model_len=512)
BUNDLE = TokenizerBundle("f", "m", "r", b"{}", None, None, None, (), False, VOCAB, 512, 4)
FAILED = failed_by(RuntimeError())
METRICS = WorkerMetrics()  # of all engines: it takes long to make


def generate(
    prompt_ids: Sequence[int], max_tokens: int = 4, n: int = 1, *, resumed: dict[int, list[int]] | None = None, **params
) -> GenerateRequest:
    """A request on the wire; the seed of choice i is 100 + i."""
    outputs = resumed or {}
    return GenerateRequest(
        request_id="r",
        gateway_id=params.pop("gateway_id", "g"),
        epoch="",
        root=params.pop("root", ROOT),
        prompt_ids=list(prompt_ids),
        choices=tuple(ChoiceState(i, 100 + i, tuple(outputs.get(i, ()))) for i in range(n)),
        priority=params.pop("priority", 0),
        tenant=params.pop("tenant", ""),
        weight=params.pop("weight", 1.0),
        deadline_s=params.pop("deadline_s", None),
        is_suspect=params.pop("is_suspect", False),
        source=params.pop("source", None),
        sampling=SamplingParams(max_tokens=max_tokens, **params),
    )


@dataclass
class Answer:
    """The frames that the client of one request has received."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: dict[int, Finished] = field(default_factory=dict)
    last: Frame | None = None
    prompt_logprobs: PromptLogprobs | None = None
    embedding: Embedding | None = None

    def add(self, frame: Frame) -> None:
        assert self.last is None, f"{frame} after {self.last}"
        match frame:
            case Tokens(choice, token_ids, logprobs):
                assert choice not in self.finished
                self.tokens.setdefault(choice, []).extend(token_ids)
                assert logprobs is None or len(logprobs) == len(token_ids)
                self.logprobs.extend(logprobs or ())
            case Finished(choice):
                assert choice not in self.finished
                self.finished[choice] = frame
            case PromptLogprobs():
                before = () if self.prompt_logprobs is None else self.prompt_logprobs.positions
                assert (frame.positions[0] is None) is (not before), "only the first begins with None"
                self.prompt_logprobs = PromptLogprobs((*before, *frame.positions))
            case Embedding():
                assert self.embedding is None
                self.embedding = frame
            case End() | Failed():
                self.last = frame


def _num_failed_steps() -> float:
    (family,) = METRICS.step_failures.collect()
    return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))


class HandEngine:
    """Owns an engine and its parts. Time is the number of steps."""

    def __init__(
        self,
        num_blocks: int = 65,
        block_size: int = 4,
        *,
        prefix_cache: PrefixCache = "hash",
        fails: Callable[[Step], bool] = lambda step: False,
        stream: DeviceStream | None = None,
        async_scheduling: bool = False,
        eos: Sequence[int] = (),
        runner: Runner | None = None,
        window_size: int | None = None,
        pooling: Pooling | None = None,
        max_drafts: int = 0,
        make_transfers: Callable[[Allocator, Runner], KVTransfers | None] = lambda allocator, runner: None,
        **limits,
    ) -> None:
        """Draft `max_drafts` tokens wherever a lookup finds any."""
        self.pooling = pooling
        self.runner = runner or ArithmeticRunner(num_blocks, block_size, fails, stream)
        self.allocator = make_allocator(prefix_cache, num_blocks, block_size, window_size)
        batch_limits = BatchLimits(await_prefixes=prefix_cache != "off", **limits)
        speculation = Speculation(max_drafts) if max_drafts else None
        transfers = make_transfers(self.allocator, self.runner)
        fetcher = None if transfers is None else transfers.fetches
        self.scheduler = Scheduler(self.allocator, batch_limits, eos, speculation, fetcher)
        self.core = EngineCore(
            self.scheduler,
            self.runner,
            PrefillRate(1000, 1.0),
            BUNDLE,
            MEMBER,
            METRICS,
            transfers=transfers,
            sinks=EngineSinks(self._deliver),
        )
        self.in_flight = self.core._in_flight
        self.answers: dict[RequestKey, Answer] = {}
        self.now_s = 0.0
        self.num_preempted = 0
        self.num_yielded = 0
        self.async_scheduling = async_scheduling
        """Launch steps before the tokens of the step before are known, where possible."""
        self.num_async = 0
        self._num_failed_before = _num_failed_steps()
        self.num_drafted = 0
        self.num_accepted = 0

    @property
    def num_failed_steps(self) -> float:
        return _num_failed_steps() - self._num_failed_before

    def submit(self, wire: GenerateRequest, constraints: Mapping[int, Constraint] | None = None) -> Request:
        key = RequestKey(len(self.answers))
        aging_s = self.scheduler.limits.aging_s
        request = Request(key, wire, self.now_s, aging_s, constraints or {}, self.pooling)
        self.answers[key] = Answer()
        self._deliver(self.scheduler.submit(request))
        return request

    def abort(self, request: Request, choice: int | None = None) -> None:
        self.core.abort(request.key, choice)
        self.core.mailbox.run()
        self.core._outputs.flush()

    def step(self, while_running: Callable[[], None] = lambda: None) -> StepPlan | None:
        """Run one step, and retry it request by request when it raises. Call `while_running` while it runs."""
        self.now_s += 1
        if not self.in_flight:
            plan = self.scheduler.schedule(self.now_s)
            self.allocator.check_integrity()
            if plan is None:
                while_running()
                return None
            self.num_preempted += plan.num_preempted
            self.num_yielded += plan.num_yielded
            self.in_flight.launch(plan, self.now_s)
        is_late = self.now_s % 2 == 0
        if not is_late:
            while_running()
        if self.async_scheduling:
            self.in_flight.launch_async()
            self.num_async += len(self.in_flight) - 1
        if is_late:
            while_running()
        self.allocator.check_integrity()
        plan = self.in_flight._launched[0].plan
        self.in_flight.process_result()
        self._flush()
        self.num_drafted += sum(len(chunk.draft_ids) for chunk in plan.chunks.values())
        self.num_accepted += sum(chunk.num_accepted for chunk in plan.chunks.values())
        return plan

    def settle(self) -> None:
        """Collect the steps in flight."""
        self.in_flight.process_all()
        self._flush()

    def finish(self, max_steps: int = 5000) -> None:
        """Step until nothing is left, then assert that no block is allocated."""
        while self.scheduler.has_work or self.in_flight:
            assert self.step() is not None, "work is left but nothing was scheduled"
            max_steps -= 1
            assert max_steps > 0, "no end in sight"
        assert not self.scheduler.requests
        assert not self.scheduler._finished_in_flight
        assert self.allocator.num_free_blocks == self.allocator.num_blocks - 1

    def answer(self, request: Request) -> Answer:
        return self.answers[request.key]

    def _flush(self) -> None:
        self.core._outputs.flush()
        self.allocator.check_integrity()

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self.answers[output.key].add(output.frame)
