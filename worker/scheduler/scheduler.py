"""The scheduler: one rule for everything. Each step gives every sequence some of its pending tokens.

A decode has one pending token, a prefill many; both are chunks of one batch under one token budget (see `budget`).
Blocks are allocated chunk by chunk. When none are left, the last sequence in order is preempted. Its blocks stay
cached, it returns to its position in the queue, and it computes evicted blocks again.

The first sequence in order is never preempted, and the pool can hold it: larger requests are refused on arrival. So
every request ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence

from cache.allocators.base import Allocator
from worker.common.logs import about
from worker.contracts.engine import EngineOutput, RequestKey
from worker.contracts.step import SampledToken, SequenceResult
from worker.scheduler.admission import BatchAdmission
from worker.scheduler.budget import BatchLimits, PrefillBudget
from worker.scheduler.fairness import FairShare
from worker.scheduler.plan import PlannedChunk, StepPlan, plan_next_decode
from worker.scheduler.prefix_wait import PrefixFetcher, PrefixWait
from worker.scheduler.request import (
    OrderedSequences,
    Request,
    RequestChoice,
    TokenSequence,
    failed_by,
    split_into_sequences,
)
from worker.scheduler.speculation import Speculation
from worker.wire import Failed, FinishReason, Started, TokenLogprobs, Tokens

logger = logging.getLogger(__name__)


class Scheduler:
    """The owner of every request and, through the allocator, of every block. Used by one thread.

    Call `schedule`, run the plan's step, then `update`. When the step raises, run the parts of `retries` one by one,
    and `fail` the requests whose part raises. `submit`, `abort` and `fail` may be called at any time.

    `schedule_async` may plan a second step, to launch while the first runs. Drop it when the first raises.
    """

    def __init__(
        self,
        allocator: Allocator,
        limits: BatchLimits,
        eos_token_ids: Iterable[int],
        speculation: Speculation | None = None,
        fetcher: PrefixFetcher | None = None,
    ) -> None:
        """Sequences wait while `fetcher` brings blocks of their prefix. `schedule` may then find nothing to plan."""
        self.allocator = allocator
        self.limits = limits
        self.speculation = speculation
        self.requests: dict[RequestKey, Request] = {}
        self.waiting = OrderedSequences()
        self.running = OrderedSequences()
        self._fetcher = fetcher
        self._prefix_wait = PrefixWait(allocator, limits.await_prefixes, fetcher)
        self._admission = BatchAdmission(allocator, limits, self.waiting, self.running, self._prefix_wait)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._in_flight: list[StepPlan] = []
        """Steps between `schedule` and `update` or `retries`. The second is async."""
        self._finished_in_flight: set[TokenSequence] = set()
        """Finished sequences that hold their blocks until their last step has returned."""
        self._fair_share = FairShare()
        self._next_expiry_s = math.inf
        self._may_replan = True
        """A token was sampled since all sequences were last preempted."""

    @property
    def has_work(self) -> bool:
        return len(self.waiting) > 0 or len(self.running) > 0

    def submit(self, request: Request) -> list[EngineOutput]:
        """Queue a request that `refusal` accepts. Choices that are resumed after their last token end here."""
        outputs = []
        for choice in request.choices:
            if choice.output_ids and (end := request.finish_reason(choice, self._eos_token_ids)) is not None:
                outputs.append(EngineOutput(request.key, choice.finish(*end)))
        if outputs:
            outputs.insert(0, EngineOutput(request.key, Started(0)))
            request.started_s = request.first_token_s = request.arrival_s
        request.sequences = split_into_sequences(request, self.limits.max_num_seqs)
        request.num_uncached_tokens = self._prefix_wait.count_uncached(request, reversed(self.requests.values()))
        for sequence in request.sequences:
            self.waiting.add(sequence)
        self.requests[request.key] = request
        self._fair_share.enter(request.wire.tenant, request.wire.weight)
        self._next_expiry_s = min(self._next_expiry_s, request.deadline_s)
        return outputs + self._end_if_finished(request, request.arrival_s)

    def abort(self, request: Request, choice_index: int | None = None, *, now_s: float) -> list[EngineOutput]:
        """End one choice, or all of them. A finished choice stays as it is."""
        if request.key not in self.requests:
            return []
        outputs = [
            self._finish_choice(request, choice, "abort")
            for choice in request.choices
            if choice.finished is None and choice_index in (None, choice.index)
        ]
        return outputs + self._end_if_finished(request, now_s)

    def fail(self, request: Request, failed: Failed) -> list[EngineOutput]:
        """End the whole request with an error."""
        if not self._forget(request):
            return []
        for sequence in request.sequences.copy():
            self._remove(sequence)
        return [EngineOutput(request.key, failed)]

    def expire(self, now_s: float) -> list[EngineOutput]:
        """Fail the requests that have waited past their deadline."""
        if now_s < self._next_expiry_s:
            return []
        waiting = [request for request in self.requests.values() if request.started_s is None]
        self._next_expiry_s = min((r.deadline_s for r in waiting if r.deadline_s > now_s), default=math.inf)
        failed = Failed("deadline", "it waited too long", retryable=False)
        return [output for r in waiting if r.deadline_s <= now_s for output in self.fail(r, failed)]

    def preempt_all(self) -> None:
        """Free every block, for a reset of the cache. No step may be running."""
        assert not self._in_flight, "a step runs"
        for sequence in self.running:
            self._admission.preempt(sequence)

    def schedule(self, now_s: float) -> StepPlan | None:
        """Plan the next step. None: there is nothing to do, or nothing fits into an empty pool."""
        plan = self._plan_step(now_s)
        if not plan.chunks and plan.num_preempted and self._may_replan:
            # All were preempted: they fit again one by one. To plan twice without a new token would never end.
            self._may_replan = False
            first, plan = plan, self._plan_step(now_s)
            plan.num_preempted += first.num_preempted
        if self.speculation is not None:
            self.speculation.add_drafts(plan, self.limits.max_num_seqs, self._eos_token_ids)
        plan.copies = self.allocator.take_copies()
        self._in_flight = [plan] if plan.chunks else []
        return plan if plan.chunks else None

    def _plan_step(self, now_s: float) -> StepPlan:
        """Plan the tokens of a step. The plan is empty when the only running sequence preempts itself."""
        plan = StepPlan()
        prefills = []
        for sequence in self.running:
            if sequence.allocation is None:  # preempted for an earlier one
                continue
            if sequence.is_prefilling:
                prefills.append(sequence)
            elif self._make_room(sequence, (start := sequence.num_computed) + 1, plan):
                plan.chunks[sequence] = PlannedChunk(sequence, start, start + 1, False)
        counts = {"num_decodes": len(plan.chunks), "num_prefills": len(prefills) + len(self.waiting)}
        budget = PrefillBudget.for_step(self.limits, **counts)
        admitted = self._schedule_prefills(plan, budget, prefills)
        self._admission.end_step(admitted=len(admitted) > 0, decoded=plan.num_decodes > 0)
        for sequence in admitted:
            if sequence.request.started_s is None:
                sequence.start_request(now_s, self.allocator.block_size)
                plan.started.append(sequence.request)
            sequence.fetch = None  # a long chain of links
        return plan

    def schedule_async(self) -> StepPlan | None:
        """Plan the step after the running one, before its tokens are known.

        None: it depends on them (see `plan_next_decode`), a waiting sequence could join it, or blocks ran out.
        """
        if len(self._in_flight) != 1:
            return None
        (running,) = self._in_flight
        if any(sequence not in running.chunks for sequence in self.running):
            return None
        if self.speculation is not None and self.speculation.would_draft(running):
            return None
        if (plan := plan_next_decode(running, self._finished_in_flight)) is None:
            return None
        if len(self.waiting) > 0 and (len(plan.chunks) < self.limits.max_num_seqs or self._admission.must_yield()):
            return None
        for sequence, chunk in plan.chunks.items():
            if not sequence.blocks.extend(chunk.stop):
                return None  # earlier sequences keep their new blocks, and need them soon
        plan.copies = self.allocator.take_copies()
        self._admission.end_step(admitted=False, decoded=True)
        self._in_flight.append(plan)
        return plan

    def retries(self, plan: StepPlan) -> Iterable[StepPlan]:
        """Split the work of a step that raised into one plan per request.

        Update a part that returns before taking the next. When all have run, fail the requests whose part raised.
        A sequence that needed a block copy is preempted: the copy's source may be overwritten by the failed step.
        """
        copies = [copy for step in self._in_flight for copy in step.copies] + self.allocator.take_copies()
        self._in_flight.clear()
        while self._finished_in_flight:
            self._finished_in_flight.pop().release()
        destinations = {copy.destination for copy in copies}
        for sequence in self.running if destinations else ():
            if not destinations.isdisjoint(sequence.blocks.block_table):
                self._admission.preempt(sequence)
        yield from plan.by_request()

    def update(self, plan: StepPlan, results: Sequence[SequenceResult], now_s: float) -> list[EngineOutput]:
        """Take the results of the plan's step: commit blocks, append tokens, end what is finished."""
        if plan in self._in_flight:
            self._in_flight.remove(plan)
        outputs: list[EngineOutput] = []
        left = iter(results)
        for chunk in plan.chunks.values():
            result, drafted = next(left), [next(left) for _ in chunk.draft_ids]
            outputs += self._update_chunk(chunk, result, drafted, now_s)
        return outputs

    # --- scheduling ---------------------------------------------------------------------------------------------

    def _schedule_prefills(
        self, plan: StepPlan, budget: PrefillBudget, prefills: list[TokenSequence]
    ) -> list[TokenSequence]:
        """Share out the budget (see `budget`), and the rest in order. Return the admitted sequences."""
        others = sorted(prefills[1:], key=lambda sequence: sequence.num_pending)
        for sequence in prefills[:1]:
            self._prefill(plan, budget, sequence, budget.oldest_share if others or len(self.waiting) > 0 else None)
        reserve = budget.admission_share if len(self.waiting) > 0 else 0
        for sequence in others:
            self._prefill(plan, budget, sequence, max(0, budget.left - reserve))
        admitted = []
        if len(self.waiting) > 0 and plan.num_preempted == 0:
            admitted = self._admission.admit(self._fair_share.order(self.waiting), plan, budget)
        for sequence in (*prefills, *admitted):
            self._prefill(plan, budget, sequence, None, preempts=False)
        return admitted

    def _prefill(
        self, plan: StepPlan, budget: PrefillBudget, sequence: TokenSequence, cap: int | None, *, preempts: bool = True
    ) -> None:
        """Plan further prefill tokens of a sequence, at most `cap`."""
        if sequence.allocation is None:  # preempted for an earlier one in this step
            return
        chunk = plan.chunks.get(sequence)
        start = sequence.num_computed if chunk is None else chunk.stop
        granted = budget.take(len(sequence.token_ids) - start, cap)
        if granted == 0:
            return
        stop = start + granted
        if self._make_room(sequence, stop, plan) if preempts else sequence.allocation.extend(stop):
            plan.add_tokens(sequence, granted)
        else:
            budget.give_back(granted)

    def _make_room(self, sequence: TokenSequence, num_tokens: int, plan: StepPlan) -> bool:
        """Allocate blocks for `num_tokens`, and preempt the last sequences for them. False: it was preempted itself."""
        while not sequence.blocks.extend(num_tokens):
            if self._fetcher is not None and self._fetcher.give_up_latest():
                continue
            victim = self.running.last
            self._admission.preempt(victim)
            plan.chunks.pop(victim, None)
            plan.num_preempted += 1
            if victim is sequence:
                return False
        return True

    # --- after the step -----------------------------------------------------------------------------------------

    def _update_chunk(
        self, chunk: PlannedChunk, result: SequenceResult, drafted: Sequence[SequenceResult], now_s: float
    ) -> list[EngineOutput]:
        """Take the result of the chunk, and those after each of its draft tokens."""
        sequence, request = chunk.sequence, chunk.sequence.request
        if sequence.allocation is None:  # failed while an earlier sequence of the request was updated
            return []
        stop, num_sampled, num_known = chunk.stop, len(chunk.sampled_choices), len(sequence.token_ids)
        self._fair_share.charge(sequence.tenant, stop - chunk.start, num_sampled)
        # In an async plan, a chunk reaches beyond the end of a sequence that has stopped.
        sequence.num_computed = stop if stop < num_known else num_known
        sequence.allocation.commit(sequence.token_ids, sequence.num_computed)
        if sequence in self._finished_in_flight:
            if not self._is_in_flight(sequence):
                self._finished_in_flight.remove(sequence)
                sequence.release()
            return []
        outputs: list[EngineOutput] = []
        if request.prompt_logprobs is not None:
            frames = request.add_prompt_logprobs(result.prompt_logprobs)
            outputs += [EngineOutput(request.key, frame) for frame in frames]
        if result.hidden is not None:
            sequence.add_hidden(result.hidden)
        if stop == num_known:
            if request.first_token_s is None:
                request.first_token_s = now_s
            if chunk.draft_ids:
                outputs += self._append_accepted(chunk, [*result.sampled, *(r.sampled[0] for r in drafted)])
            elif num_sampled == 1:
                outputs += self._append(sequence, result.sampled)
            elif num_sampled:
                outputs += self._append_tokens(sequence, chunk.sampled_choices, result.sampled)
            else:  # max_tokens is 0
                if (embedding := sequence.embedding()) is not None:
                    outputs.append(EngineOutput(request.key, embedding))
                outputs += [self._finish_choice(request, choice, "length") for choice in sequence.choices.copy()]
        return outputs + self._end_if_finished(request, now_s)

    def _append_tokens(
        self, sequence: TokenSequence, choices: Sequence[RequestChoice], tokens: Sequence[SampledToken]
    ) -> list[EngineOutput]:
        """Give each choice its token. Some of `choices` may have finished while the step ran."""
        token_of = dict(zip(choices, tokens, strict=True))
        outputs: list[EngineOutput] = []
        branches = sequence.fork()
        for branch in branches[1:]:
            self.running.add(branch)
        for branch in branches:
            outputs += self._append(branch, [token_of[branch.choices[0]]])
            if sequence.request.key not in self.requests:  # the grammar has failed
                break
        return outputs

    def _append_accepted(self, chunk: PlannedChunk, tokens: Sequence[SampledToken]) -> list[EngineOutput]:
        """Give a sequence the tokens up to the first that differs from its draft."""
        sequence = chunk.sequence
        num_before = len(sequence.token_ids)
        outputs = self._append(sequence, tokens[: chunk.count_right(tokens) + 1])
        chunk.num_accepted = max(0, len(sequence.token_ids) - num_before - 1)
        self._fair_share.charge(sequence.tenant, chunk.num_accepted, chunk.num_accepted)
        return outputs

    def _append(self, sequence: TokenSequence, tokens: Sequence[SampledToken]) -> list[EngineOutput]:
        """Give a sequence tokens for its only choice, until it ends. The KV of all but the last is written."""
        request, choice = sequence.request, sequence.choices[0]
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        end = None
        for token in tokens:
            try:
                choice.append(token)
            except Exception as error:
                request_id = request.wire.request_id
                extra = about(request_id, request.wire.traceparent)
                logger.warning("request %s: the grammar failed: %s", request_id, error, extra=extra)
                return self.fail(request, failed_by(error))
            sequence.token_ids.append(token.token_id)
            self._may_replan = True
            token_ids.append(token.token_id)
            if token.logprobs is not None:
                logprobs.append(token.logprobs)
            if (end := request.finish_reason(choice, self._eos_token_ids)) is not None:
                break
        if len(token_ids) > 1:
            sequence.num_computed += len(token_ids) - 1
            sequence.blocks.commit(sequence.token_ids, sequence.num_computed)
        outputs = [EngineOutput(request.key, Tokens(choice.index, tuple(token_ids), tuple(logprobs) or None))]
        if end is not None:
            outputs.append(self._finish_choice(request, choice, *end))
        return outputs

    def _finish_choice(
        self, request: Request, choice: RequestChoice, reason: FinishReason, stop_token_id: int | None = None
    ) -> EngineOutput:
        """End a choice, and the sequence that no other choice shares."""
        output = EngineOutput(request.key, choice.finish(reason, stop_token_id))
        for sequence in request.sequences.copy():
            if choice in sequence.choices:
                sequence.choices.remove(choice)
                if not sequence.choices:
                    self._remove(sequence)
        return output

    def _remove(self, sequence: TokenSequence) -> None:
        """Take a sequence off its queue and its request. Free its blocks when no step uses them."""
        queue = self.waiting if sequence.allocation is None else self.running
        queue.remove(sequence)
        sequence.request.sequences.remove(sequence)
        if self._is_in_flight(sequence):
            self._finished_in_flight.add(sequence)
        else:
            sequence.release()

    def _is_in_flight(self, sequence: TokenSequence) -> bool:
        return any(sequence in plan.chunks for plan in self._in_flight)

    def _forget(self, request: Request) -> bool:
        """Remove the request. Return False if it has ended before."""
        if self.requests.pop(request.key, None) is None:
            return False
        self._fair_share.leave(request.wire.tenant)
        return True

    def _end_if_finished(self, request: Request, now_s: float) -> list[EngineOutput]:
        if request.sequences or not self._forget(request):
            return []
        return [EngineOutput(request.key, request.end(now_s))]
