"""The scheduler: one rule for everything. Each step gives every sequence some of the tokens that it has pending.

A decode has one pending token, a prefill many; both are chunks of one batch under one token budget (see `budget`).
Blocks are taken chunk by chunk. When none are left, the last in order is preempted: it gives up its blocks, which stay
findable, goes back to its place in the queue, and computes again what is no longer cached. The first in order is never
preempted and alone always fits (a larger request is refused at the door), so every request ends.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from cache.allocators.base import Allocator
from cache.types import BlockId
from worker.common.logs import about
from worker.engine.step import SampledToken, SequenceResult
from worker.scheduler.admission import Admission
from worker.scheduler.budget import BatchLimits, PrefillBudget
from worker.scheduler.fairness import FairShare
from worker.scheduler.plan import EngineOutput, PlannedChunk, StepPlan, plan_next_decode
from worker.scheduler.request import (
    OrderedSequences,
    Request,
    RequestChoice,
    RequestKey,
    TokenSequence,
    append,
    end_of,
    failed_by,
    finish,
    split_into_sequences,
    take_prompt_logprobs,
)
from worker.wire import End, Failed, Finished, Started

logger = logging.getLogger(__name__)


class Scheduler:
    """Owner of every request and, through the allocator, of every block. Used by one thread.

    Call in turn: `schedule`, run the plan's step, then `update`. When the step raises, nothing has happened: run the
    parts of `retries` one by one, and `fail` the requests whose part raises. `submit`, `abort` and `fail` come at any
    time, also while a step runs: what it reads and writes is given back when it has ended.

    `schedule_ahead` may give a second step while the first runs; it is launched behind it, and updated after it. When
    the first raises, the second has never been.
    """

    def __init__(self, allocator: Allocator, limits: BatchLimits, eos_token_ids: Iterable[int]) -> None:
        self.allocator = allocator
        self.limits = limits
        self.requests: dict[RequestKey, Request] = {}
        self.waiting = OrderedSequences()
        self.running = OrderedSequences()
        self._admission = Admission(allocator, limits)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._in_flight: list[StepPlan] = []
        """What runs now: between `schedule` and `update` or `retries`. The second was planned ahead."""
        self._finished_in_flight: set[TokenSequence] = set()
        """Sequences in flight that have ended; they hold their blocks until the last step has that they are in."""
        self._shares = FairShare()
        self._next_expiry_s = math.inf

    @property
    def has_work(self) -> bool:
        return len(self.waiting) > 0 or len(self.running) > 0

    def submit(self, request: Request) -> list[EngineOutput]:
        """Take a request that `refusal` has let pass. What is resumed after its last token ends here."""
        emissions = []
        for choice in request.choices:
            if choice.output_ids and (end := end_of(choice, request, self._eos_token_ids)) is not None:
                emissions.append(EngineOutput(request.key, finish(choice, *end)))
        if emissions:
            emissions.insert(0, EngineOutput(request.key, Started(0)))
            request.started_s = request.first_token_s = request.arrival_s
        request.sequences = split_into_sequences(request, self.limits.max_num_seqs)
        request.num_uncached_tokens = self._admission.count_uncached(request, reversed(self.requests.values()))
        for sequence in request.sequences:
            self.waiting.add(sequence)
        self.requests[request.key] = request
        self._shares.enter(request.wire.tenant)
        self._next_expiry_s = min(self._next_expiry_s, request.deadline_s)
        return emissions + self._end_if_finished(request, request.arrival_s)

    def abort(self, request: Request, choice_index: int | None = None, *, now_s: float) -> list[EngineOutput]:
        """End the choice, or all of them, now. Nothing happens to what has ended already."""
        emissions: list[EngineOutput] = []
        if request.key not in self.requests:
            return emissions
        for choice in request.choices:
            if choice.finished is None and choice_index in (None, choice.index):
                emissions.append(EngineOutput(request.key, self._end_choice(request, choice, finish(choice, "abort"))))
        return emissions + self._end_if_finished(request, now_s)

    def fail(self, request: Request, failed: Failed) -> list[EngineOutput]:
        """End the whole request without an answer."""
        if not self._forget(request):
            return []
        for sequence in request.sequences.copy():
            self._drop(sequence)
        return [EngineOutput(request.key, failed)]

    def expire(self, now_s: float) -> list[EngineOutput]:
        """End the requests that have waited past their deadline."""
        if now_s < self._next_expiry_s:
            return []
        late = [r for r in self.requests.values() if r.started_s is None and r.deadline_s <= now_s]
        emissions = [e for r in late for e in self.fail(r, Failed("deadline", "it waited too long", retryable=False))]
        waiting = (r.deadline_s for r in self.requests.values() if r.started_s is None)
        self._next_expiry_s = min(waiting, default=math.inf)
        return emissions

    def preempt_all(self) -> None:
        """Give back every block, as for a reset of the cache; everything is computed again afterwards. Not while a step
        runs."""
        assert not self._in_flight, "a step runs"
        for sequence in self.running:
            self._preempt(sequence)

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step; None when there is nothing to do."""
        plan = StepPlan()
        prefills = []
        for sequence in self.running:
            if sequence.allocation is None:  # preempted by an earlier one
                continue
            if sequence.is_prefilling:
                prefills.append(sequence)
            elif self._make_room(sequence, sequence.num_computed + 1, plan):
                plan.grow(sequence, 1)
        num_prefills = len(prefills) + len(self.waiting)
        budget = PrefillBudget.of_step(self.limits, num_decodes=len(plan.chunks), num_prefills=num_prefills)
        newcomers = self._schedule_prefills(plan, budget, prefills)
        self._note_newcomers(plan, newcomers, now_s)
        plan.copies = self.allocator.take_copies()
        self._in_flight = [plan] if plan.chunks else []
        return plan if plan.chunks else None

    def schedule_ahead(self) -> StepPlan | None:
        """The step after the one that runs, before its tokens are known. None when it cannot be foreseen (see
        `foresight`), when somebody waits who could join it, or blocks are short."""
        if len(self._in_flight) != 1:
            return None
        (running,) = self._in_flight
        if any(sequence not in running.chunks for sequence in self.running):
            return None
        if (plan := plan_next_decode(running, self._finished_in_flight)) is None:
            return None
        if len(self.waiting) > 0 and (len(plan.chunks) < self.limits.max_num_seqs or self._slots_are_due()):
            return None
        for sequence, chunk in plan.chunks.items():
            assert sequence.allocation is not None
            if not sequence.allocation.extend(chunk.stop):
                return None  # what the others have got by now they will need
        plan.copies = self.allocator.take_copies()
        self._admission.gate.end_step(admitted=False, decoded=True)
        self._in_flight.append(plan)
        return plan

    def retries(self, plan: StepPlan) -> Iterable[StepPlan]:
        """After the plan's step has raised: the same work, request by request. A part that returns is to be updated
        before the next is taken; requests whose part raises are to be failed when all have been run.

        A sequence for which a block was to be copied is not among them, but computed anew: the source may have had
        another owner by then, who wrote to it after the copy and before the step raised.
        """
        copies = [copy for step in self._in_flight for copy in step.copies] + self.allocator.take_copies()
        self._in_flight.clear()
        while self._finished_in_flight:
            self._finished_in_flight.pop().release()
        self._preempt_holders({copy.destination for copy in copies})
        yield from plan.by_request()

    def update(self, plan: StepPlan, results: Sequence[SequenceResult], now_s: float) -> list[EngineOutput]:
        """The plan's step has returned: commit its blocks, append what was drawn, end what has ended."""
        if plan in self._in_flight:
            self._in_flight.remove(plan)
        emissions: list[EngineOutput] = []
        for chunk, result in zip(plan.chunks.values(), results, strict=True):
            emissions += self._update_chunk(chunk, result, now_s)
        return emissions

    # --- scheduling ---------------------------------------------------------------------------------------------

    def _schedule_prefills(
        self, plan: StepPlan, budget: PrefillBudget, prefills: list[TokenSequence]
    ) -> list[TokenSequence]:
        """Half to the oldest prefill, the rest to the others (shortest first) and to newcomers, leftovers in order."""
        others = sorted(prefills[1:], key=lambda sequence: sequence.num_pending)
        rivals = len(others) > 0 or len(self.waiting) > 0
        for sequence in prefills[:1]:
            self._prefill(plan, budget, sequence, budget.head_share if rivals else None)
        reserve = budget.newcomer_share if len(self.waiting) > 0 else 0
        for sequence in others:
            self._prefill(plan, budget, sequence, max(0, budget.left - reserve))
        newcomers = self._admit(plan, budget) if len(self.waiting) > 0 and plan.num_preempted == 0 else []
        for sequence in (*prefills, *newcomers):
            self._prefill_more(plan, budget, sequence)
        return newcomers

    def _prefill(self, plan: StepPlan, budget: PrefillBudget, sequence: TokenSequence, cap: int | None) -> None:
        if sequence.allocation is None:  # preempted by an earlier one in this step
            return
        granted = budget.take(sequence.num_pending, cap)
        if granted and self._make_room(sequence, sequence.num_computed + granted, plan):
            plan.grow(sequence, granted)
        else:
            budget.give_back(granted)

    def _prefill_more(self, plan: StepPlan, budget: PrefillBudget, sequence: TokenSequence) -> None:
        """What the others left. Nobody is preempted for it."""
        if budget.left == 0 or sequence.allocation is None:
            return
        planned = plan.chunks.get(sequence)
        start = sequence.num_computed if planned is None else planned.stop
        granted = budget.take(len(sequence.token_ids) - start)
        if granted and sequence.allocation.extend(start + granted):
            plan.grow(sequence, granted)
        else:
            budget.give_back(granted)

    def _admit(self, plan: StepPlan, budget: PrefillBudget) -> list[TokenSequence]:
        """Move from waiting to running what fits, in order, and plan its first chunk."""
        waiting = self._shares.order(self.waiting)
        slots = _Slots(self, plan, budget)
        admitted = self._admission.admit(waiting, len(self.waiting), self.running, budget, slots)
        if admitted:
            plan.batch_growth_reason = self._admission.gate.reason(len(self.running))
        for sequence, num_tokens, rest in admitted:
            self.waiting.remove(sequence)
            self.running.add(sequence)
            if rest is not None:
                self.waiting.add(rest)
            plan.grow(sequence, num_tokens)
        return [sequence for sequence, _, _ in admitted]

    def _note_newcomers(self, plan: StepPlan, newcomers: list[TokenSequence], now_s: float) -> None:
        self._admission.gate.end_step(admitted=len(newcomers) > 0, decoded=plan.num_decodes > 0)
        for sequence in newcomers:
            request = sequence.request
            if request.started_s is None:
                request.started_s = now_s
                request.num_cached_tokens = min(sequence.num_computed, len(request.prompt_ids))
                plan.started.append(request)

    def _slots_are_due(self) -> bool:
        """Whether a request holds more than half of the slots while another tenant waits."""
        num_held: Counter[Request] = Counter()
        for sequence in self.running:
            num_held[sequence.request] += len(sequence.choices)
        ((holder, num_slots),) = num_held.most_common(1)
        tenant = holder.wire.tenant
        return num_slots > self.limits.max_contested_slots and any(
            sequence.request.wire.tenant != tenant for sequence in self.waiting
        )

    def give_up(self, sequence: TokenSequence, num_choices: int, plan: StepPlan, budget: PrefillBudget) -> None:
        """Let the last choices of a running sequence wait. Those without output share its blocks, which it keeps."""
        plan.num_yielded += num_choices
        if num_choices < len(sequence.choices):
            self.waiting.add(sequence.split(len(sequence.choices) - num_choices))
            return
        self._preempt(sequence)
        if (chunk := plan.chunks.pop(sequence, None)) is not None:
            if chunk.is_prefill:
                budget.give_back(chunk.num_tokens)
            else:
                budget.add_decodes(1)

    def _make_room(self, sequence: TokenSequence, num_tokens: int, plan: StepPlan) -> bool:
        """Blocks for `num_tokens`, preempting from the end. False: it was the last itself, and is preempted."""
        assert sequence.allocation is not None
        while not sequence.allocation.extend(num_tokens):
            victim = self.running.last
            self._preempt(victim)
            plan.chunks.pop(victim, None)
            plan.num_preempted += 1
            if victim is sequence:
                return False
        return True

    def _preempt_holders(self, block_ids: Set[BlockId]) -> None:
        """Give up the sequences with one of these blocks."""
        for sequence in self.running if block_ids else ():
            assert sequence.allocation is not None
            if not block_ids.isdisjoint(sequence.allocation.block_table):
                self._preempt(sequence)

    def _preempt(self, sequence: TokenSequence) -> None:
        sequence.release()
        self.running.remove(sequence)
        self.waiting.add(sequence)

    # --- after the step -----------------------------------------------------------------------------------------

    def _update_chunk(self, chunk: PlannedChunk, result: SequenceResult, now_s: float) -> list[EngineOutput]:
        sequence = chunk.sequence
        request = sequence.request
        if sequence.allocation is None:  # failed while an earlier sequence of the request was updated
            return []
        self._shares.charge(request.wire.tenant, chunk.num_tokens, len(chunk.drawing))
        # Less for one planned ahead whose token was not taken up, as it had ended meanwhile.
        sequence.num_computed = min(chunk.stop, len(sequence.token_ids))
        sequence.allocation.commit(sequence.token_ids, sequence.num_computed)
        if sequence in self._finished_in_flight:
            if not self._runs(sequence):
                self._finished_in_flight.remove(sequence)
                sequence.release()
            return []
        emissions = []
        if request.prompt_logprobs is not None:
            request.prompt_logprobs += result.prompt_logprobs
            if (frame := take_prompt_logprobs(request)) is not None:
                emissions.append(EngineOutput(request.key, frame))
        if chunk.stop == len(sequence.token_ids):
            if request.first_token_s is None:
                request.first_token_s = now_s
            if chunk.drawing:
                emissions += self._append_drawn(sequence, dict(zip(chunk.drawing, result.sampled, strict=True)))
            else:  # max_tokens 0: the prompt was all
                for choice in sequence.choices.copy():
                    emissions.append(
                        EngineOutput(request.key, self._end_choice(request, choice, finish(choice, "length")))
                    )
        return emissions + self._end_if_finished(request, now_s)

    def _append_drawn(self, sequence: TokenSequence, drawn: Mapping[RequestChoice, SampledToken]) -> list[EngineOutput]:
        request = sequence.request
        emissions: list[EngineOutput] = []
        branches = sequence.fork()
        for branch in branches[1:]:
            self.running.add(branch)
        for branch in branches:
            choice = branch.choices[0]
            token = drawn[choice]
            try:
                emissions.append(EngineOutput(request.key, append(choice, token)))
            except Exception as error:
                logger.warning(
                    "request %s: the grammar failed: %s",
                    request.wire.request_id,
                    error,
                    extra=about(request.wire.request_id, request.wire.traceparent),
                )
                return emissions + self.fail(request, failed_by(error))
            branch.token_ids.append(token.token_id)
            if (end := end_of(choice, request, self._eos_token_ids)) is not None:
                emissions.append(EngineOutput(request.key, self._end_choice(request, choice, finish(choice, *end))))
        return emissions

    def _end_choice(self, request: Request, choice: RequestChoice, frame: Finished) -> Finished:
        """Free what only this choice held."""
        for sequence in request.sequences.copy():
            if choice in sequence.choices:
                sequence.choices.remove(choice)
                if not sequence.choices:
                    self._drop(sequence)
        return frame

    def _drop(self, sequence: TokenSequence) -> None:
        """Forget a sequence, wherever it is."""
        if self._runs(sequence):
            self._finished_in_flight.add(sequence)
        else:
            sequence.release()
        sequence.request.sequences.remove(sequence)
        holder = self.running if sequence in self.running else self.waiting
        holder.remove(sequence)

    def _runs(self, sequence: TokenSequence) -> bool:
        return any(sequence in plan.chunks for plan in self._in_flight)

    def _forget(self, request: Request) -> bool:
        """False: it was forgotten before."""
        if self.requests.pop(request.key, None) is None:
            return False
        self._shares.leave(request.wire.tenant)
        return True

    def _end_if_finished(self, request: Request, now_s: float) -> list[EngineOutput]:
        if any(choice.finished is None for choice in request.choices):
            return []
        if not self._forget(request):
            return []
        started_s = now_s if request.started_s is None else request.started_s
        first_token_s = now_s if request.first_token_s is None else request.first_token_s
        end = End(started_s - request.arrival_s, first_token_s - started_s, now_s - first_token_s)
        return [EngineOutput(request.key, end)]


@dataclass(slots=True, eq=False)
class _Slots:
    """`worker.scheduler.admission.Slots` for one step."""

    scheduler: Scheduler
    plan: StepPlan
    budget: PrefillBudget
    num_waiting: Counter[str] = field(init=False)
    """Sequences of each tenant that has any."""

    def __post_init__(self) -> None:
        self.num_waiting = Counter(sequence.request.wire.tenant for sequence in self.scheduler.waiting)

    def is_contested(self, sequence: TokenSequence) -> bool:
        return len(self.num_waiting) > 1

    def note(self, sequence: TokenSequence, *, is_whole: bool) -> None:
        tenant = sequence.request.wire.tenant
        self.num_waiting[tenant] -= is_whole
        if not self.num_waiting[tenant]:
            del self.num_waiting[tenant]

    def give_up(self, sequence: TokenSequence, num_choices: int) -> None:
        self.scheduler.give_up(sequence, num_choices, self.plan, self.budget)
        self.num_waiting[sequence.request.wire.tenant] += 1
