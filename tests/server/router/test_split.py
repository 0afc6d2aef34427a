"""When a request is split, where its prompt is computed, and that a worker of role "prefill" gets nothing else."""

from __future__ import annotations

import asyncio
import random

import pytest

from cache.records import Candidate, WorkerLoad
from cache.types import GatewayId, WorkerId
from server.router.placement import Decision, Scorer
from server.router.policies import POLICIES, make_policy
from server.router.short_list import SCORE_ALL
from server.router.split import PREFILL_ONLY
from server.router.types import NoWorkerError, RouteRequest
from tests.server.router.fleets import BLOCK, RATE, Clock, Fleets, chain, incarnations, make_request, member

LAYOUT = "records-1"
BUSY = WorkerLoad({"other": 3.0}, prefill_tokens_per_s=RATE, num_running=9, fetch_tokens_per_s=20 * RATE)
IDLE = WorkerLoad(prefill_tokens_per_s=RATE, fetch_tokens_per_s=20 * RATE)


def worker(name: str, load: WorkerLoad = IDLE, matched_blocks: int = 0, **changes: object) -> Candidate:
    return Candidate(member(name, **{"layout": LAYOUT, **changes}), load, matched_blocks)


def prefill(name: str = "p", load: WorkerLoad = IDLE, **changes: object) -> Candidate:
    return worker(name, load, role="prefill", **changes)


def make_scorer(policy: str = "headstart") -> Scorer:
    return Scorer(GatewayId("g"), make_policy(policy), Clock(), random.Random(0))


def long_request(**changes: object) -> RouteRequest:
    return make_request(chain(100), **{"may_split": True, **changes})


def decide(*candidates: Candidate, **changes: object) -> Decision:
    return make_scorer().decide(long_request(**changes), candidates)


def names(decision: Decision) -> list[str]:
    return [each.member.worker_id for each in decision.chosen]


def test_a_request_is_split_where_it_would_wait() -> None:
    assert names(decide(worker("d", BUSY), prefill())) == ["p"]
    decision = decide(worker("d"), prefill())
    assert names(decision) == ["d"]
    assert decision.split is not None
    assert decision.split.handover_s == pytest.approx(100 * BLOCK / (20 * RATE) + 0.01 + 1 / RATE)
    assert decision.split.split_s > decision.split.stay_s


def test_what_a_prefill_costs_decodes_counts() -> None:
    """No prefill waits there, but decodes run: many of them are worth the way."""
    few, many = (WorkerLoad(prefill_tokens_per_s=RATE, num_running=n, fetch_tokens_per_s=20 * RATE) for n in (1, 9))
    assert names(decide(worker("d", few), prefill())) == ["d"]
    assert names(decide(worker("d", many), prefill())) == ["p"]


def test_the_least_loaded_prefill_worker_is_taken() -> None:
    decision = decide(worker("d", BUSY), prefill("busy", BUSY), prefill("idle"))
    assert names(decision) == ["idle"]


@pytest.mark.parametrize(
    "changes",
    [
        {"may_split": False},
        {"numerics": "n"},
        {"ttft_budget_s": 0.5},
        {"excluded": incarnations("p")},
        {"affinity_key": "s", "hard_affinity": True},
    ],
)
def test_some_requests_are_never_split(changes: dict[str, object]) -> None:
    free = WorkerLoad(prefill_tokens_per_s=10 * RATE, num_running=99, fetch_tokens_per_s=20 * RATE)
    decision = decide(worker("d", free, numerics="n"), prefill(numerics="n"), **changes)
    assert decision.split is None
    assert names(decision) == ["d"]


@pytest.mark.parametrize(
    "pair",
    [
        (worker("d", BUSY), prefill(layout="another")),
        (worker("d", BUSY, layout=""), prefill(layout="")),
        (worker("d", BUSY), prefill(numerics="another")),
        (worker("d", WorkerLoad({"other": 3.0}, prefill_tokens_per_s=RATE)), prefill()),
        (worker("d", BUSY), prefill(load=WorkerLoad(prefill_tokens_per_s=RATE, draining=True))),
        (worker("d", BUSY), worker("p", BUSY, role="another")),
    ],
)
def test_without_a_pair_that_fits_nothing_is_split(pair: tuple[Candidate, Candidate]) -> None:
    decision = decide(*pair)
    assert decision.split is None
    assert pair[0].member.worker_id in names(decision)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefill_worker_gets_no_whole_request(policy: str) -> None:
    """Unless no other worker can take it. Other policies' scores are no seconds, so they never split."""
    scorer, request = make_scorer(policy), long_request()
    decision = scorer.decide(request, [worker("d", BUSY), prefill(matched_blocks=90)])
    assert [each.member.worker_id for each in decision.best] == ["d"]
    assert [each.guard for each in decision.workers] == [None, PREFILL_ONLY]
    assert (decision.split is not None) == (policy == "headstart")
    gone = worker("d", WorkerLoad(draining=True))
    decision = scorer.decide(request, [gone, prefill()])
    assert names(decision) == ["p"]
    assert not scorer.place(decision).is_split


def test_the_blocks_are_fetched_from_where_they_were_computed() -> None:
    """Before the index has them; and the prompt does not count as coming back."""
    scorer, request = make_scorer(), long_request()
    first = scorer.place(scorer.decide(request, [worker("d", BUSY), prefill()]))
    assert (first.worker.worker_id, first.is_split, first.source) == ("p", True, None)
    scorer.first_token(first)
    scorer.closed(first)
    rest = make_request(
        request.hashes, numerics=first.worker.numerics, prefilled_at=(WorkerId("p"), first.worker.epoch)
    )
    second = scorer.place(scorer.decide(rest, [worker("d", BUSY, matched_blocks=10), prefill()]))
    assert (second.worker.worker_id, second.is_split) == ("d", False)
    assert second.source is not None
    assert (second.source.url, second.source.num_blocks) == (first.worker.url, 100)
    assert second.promised_tokens == 100 * BLOCK


def test_a_prefill_worker_fetches_from_others() -> None:
    decision = decide(worker("d", BUSY), worker("holder", WorkerLoad(draining=True), 60), prefill())
    assert decision.split is not None
    assert decision.split.prefill.cached_tokens == 60 * BLOCK
    assert make_scorer().place(decision).source is not None


def test_a_large_fleet_is_split_too() -> None:
    scorer = make_scorer()
    candidates = [worker(f"d{number:03}", BUSY) for number in range(SCORE_ALL)]
    candidates += [prefill(f"p{number}", BUSY) for number in range(9)]
    chosen = set()
    for _ in range(9):
        decision = scorer.decide(long_request(), candidates)
        assert len(decision.workers) < len(candidates)
        assert decision.num_candidates == len(candidates)
        chosen |= set(names(decision))
        scorer.place(decision)
    assert chosen == {f"p{number}" for number in range(9)}


def test_explain_shows_the_split() -> None:
    fleets = Fleets()
    for each in (worker("d", BUSY), prefill()):
        fleets.index.register(each.member, load=each.load)
    found = asyncio.run(fleets.router.explain(long_request()))
    assert found["choice"] == ["p"]
    assert (found["split"]["prefill"], found["split"]["decode"], found["split"]["pays"]) == ("p", "d", True)
    assert found["split"]["split_s"] < found["split"]["stay_s"]
    fleets.index.register(prefill("d").member)
    assert asyncio.run(fleets.router.explain(long_request()))["split"] is None
    with pytest.raises(NoWorkerError):
        asyncio.run(fleets.place(chain(3), may_split=True, excluded=incarnations("p", "d")))
