"""Which workers of a large fleet are scored."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from msgspec.structs import replace

from cache.records import Candidate, WorkerLoad
from cache.types import BlockHash, GatewayId, WorkerId
from server.router.placement import Placement, Scorer
from server.router.policies import make_policy, rendezvous_worker
from server.router.short_list import SCORE_ALL, ShortList
from tests.server.router.fleets import BLOCK, RATE, Clock, chain, make_request, member

LOAD = WorkerLoad(prefill_tokens_per_s=RATE, num_free_blocks=10_000, num_blocks=10_000)


def make_scorer(policy: str = "headstart") -> Scorer:
    return Scorer(GatewayId("g"), make_policy(policy), Clock(), random.Random(0))


def fleet(size: int, **matched_blocks: int) -> list[Candidate]:
    names = [f"w{number:03}" for number in range(size)]
    return [Candidate(member(name), LOAD, matched_blocks.get(name, 0)) for name in names]


def place(scorer: Scorer, candidates: list[Candidate], hashes: list[BlockHash], **changes: object) -> Placement:
    return scorer.place(scorer.decide(make_request(hashes, **changes), candidates))


@pytest.mark.parametrize("size", [1, SCORE_ALL])
def test_a_small_fleet_is_scored_whole(size: int) -> None:
    assert len(make_scorer().decide(make_request(chain(4)), fleet(size)).workers) == size


def test_a_large_fleet_is_scored_in_part() -> None:
    decision = make_scorer().decide(make_request(chain(4)), fleet(1000))
    assert len(decision.workers) < SCORE_ALL
    assert decision.num_candidates == 1000


def test_other_policies_and_dry_runs_score_all() -> None:
    assert len(make_scorer("round_robin").decide(make_request(chain(4)), fleet(100)).workers) == 100
    assert len(make_scorer().decide(make_request(chain(4)), fleet(100), dry_run=True).workers) == 100


def test_the_longest_match_of_a_large_fleet_wins() -> None:
    matched = {f"w{number:03}": 20 + number % 10 for number in range(0, 600, 7)}
    placement = place(make_scorer(), fleet(1000, **matched, w777=39), chain(40))
    assert placement.worker.worker_id == "w777"


def test_a_pending_prefix_counts_in_a_large_fleet() -> None:
    scorer, hashes = make_scorer(), chain(40)
    for _ in range(50):
        place(scorer, fleet(1000), chain(40))
    first = place(scorer, fleet(1000), hashes)
    scorer.started(first, 0)
    scorer.first_token(first)
    assert place(scorer, fleet(1000), hashes).worker == first.worker


def test_new_prompts_spread_over_a_large_fleet() -> None:
    scorer = make_scorer()
    counts = Counter(place(scorer, fleet(200), chain(40)).worker.worker_id for _ in range(400))
    assert set(counts.values()) == {2}


def test_a_session_has_its_own_worker_in_a_large_fleet() -> None:
    scorer, candidates = make_scorer(), fleet(500)
    for key in map(str, range(20)):
        own = rendezvous_worker(key, candidates).member
        request = {"affinity_key": key, "hard_affinity": True}
        assert place(scorer, candidates, chain(4), **request).worker is own
        without = [
            replace(each, load=replace(LOAD, draining=True)) if each.member is own else each for each in candidates
        ]
        next_own = rendezvous_worker(key, [each for each in candidates if each.member is not own]).member
        assert place(scorer, without, chain(4), **request).worker is next_own


def test_all_are_scored_if_the_listed_cannot_take_it() -> None:
    scorer, candidates = make_scorer(), fleet(500)
    last = candidates[-1].member.worker_id
    broken = {each.member.worker_id for each in candidates} - {last}
    (best,) = scorer.decide(make_request(chain(4)), candidates, broken).best
    assert best.member.worker_id == last


def test_workers_that_leave_and_join_are_in_the_order() -> None:
    scorer = make_scorer()
    for _ in range(100):
        place(scorer, fleet(100), chain(40))
    joined = [each for each in fleet(110) if each.member.worker_id >= "w020"]
    placed = {place(scorer, joined, chain(40)).worker.worker_id for _ in range(10)}
    assert placed == {WorkerId(f"w{number}") for number in range(100, 110)}
    assert len(scorer._short_lists["m"]._load_s) == len(joined), "nothing is kept of those that left"


def test_the_load_of_a_large_fleet_counts_what_was_placed() -> None:
    """The delay of later requests, beta, depends on it."""
    short_list, candidates = ShortList(0.03, lambda worker_id: 0.0), fleet(1000)
    short_list.choose(make_request(chain(4)), candidates, (), index_answered=True)
    for number in range(300):
        short_list.placed(candidates[number].member.worker_id, 0.5)
    assert short_list.assigned_s == pytest.approx(150.0)


@pytest.mark.parametrize("size", [SCORE_ALL, 200])
def test_blocks_below_the_pools_are_not_in_use(size: int) -> None:
    """A holder takes room for its blocks, although half of the fleet has them on its disks."""
    hashes = chain(40)
    below = [
        replace(each, member=dataclasses.replace(each.member, tiers=("disk",)), tier_blocks=(40,))
        for each in fleet(size, w005=30)
    ]
    decision = make_scorer().decide(make_request(hashes), below)
    holder = next(view for view in decision.workers if view.member.worker_id == "w005")
    assert holder.matched_tokens >= 30 * BLOCK
    assert holder.kv_usage == pytest.approx(41 / LOAD.num_blocks)


def test_the_least_loaded_are_found_by_their_reports() -> None:
    """Other gateways' work counts, although this gateway has never looked at the workers."""
    waiting = replace(LOAD, queued_prefill_s={GatewayId("other"): 5.0})
    candidates = [replace(each, load=waiting) for each in fleet(1000)]
    candidates[777] = replace(candidates[777], load=LOAD)
    assert place(make_scorer(), candidates, chain(40)).worker.worker_id == "w777"


def test_a_guarded_worker_makes_no_session_scan_the_fleet() -> None:
    scorer, candidates = make_scorer(), fleet(1000)
    own = rendezvous_worker("key", candidates).member
    draining = [replace(each, load=replace(LOAD, draining=True)) if each.member is own else each for each in candidates]
    assert len(scorer.decide(make_request(chain(4), affinity_key="key"), draining).workers) < SCORE_ALL
