"""Fair share between tenants; deadlines and suspects in the queue."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.scheduler.engine import HandEngine, generate
from worker.scheduler.fairness import FairShare
from worker.scheduler.request import Request
from worker.wire import Failed


def finish_order(engine: HandEngine, requests: dict[str, list[Request]]) -> list[str]:
    """Return the tenants in the order in which their requests end."""
    order: list[str] = []
    left = [(tenant, request) for tenant, each in requests.items() for request in each]
    while left:
        engine.step()
        done = [pair for pair in left if engine.answer(pair[1]).last is not None]
        order += [tenant for tenant, _ in done]
        left = [pair for pair in left if pair not in done]
    return order


def test_a_late_tenant_does_not_wait_for_a_flood() -> None:
    engine = HandEngine(max_num_seqs=2)
    heavy = [engine.submit(generate([1, 2, 3], tenant="heavy")) for _ in range(40)]
    for _ in range(6):
        engine.step()
    weak = [engine.submit(generate([4, 5, 6], tenant="weak")) for _ in range(4)]
    order = finish_order(engine, {"heavy": heavy, "weak": weak})
    last = max(index for index, tenant in enumerate(order) if tenant == "weak")
    assert last < 16, order


@pytest.mark.parametrize(("fetching", "started"), [(None, "a0 a1 b0 b1"), (0, "a1 a2 b0 b1")])
def test_the_slots_of_one_step_are_shared(fetching: int | None, started: str) -> None:
    """A sequence that waits for a fetch takes none."""
    engine = HandEngine(max_num_seqs=4)
    engine.scheduler._prefix_wait.starts_fetch = lambda sequence: sequence.request.key == fetching  # type: ignore[method-assign]
    requests = [engine.submit(generate([i], 8, tenant=tenant)) for i, tenant in enumerate("aaaabbbb")]
    engine.step()
    names = [f"{tenant}{n}" for tenant in "ab" for n in range(4)]
    assert [name for name, each in zip(names, requests, strict=True) if each.started_s is not None] == started.split()


def test_equal_service_not_equal_requests() -> None:
    """One tenant's requests are three times as long: both get the same tokens while both have work."""
    engine = HandEngine(max_num_seqs=1, num_blocks=129)
    requests = {
        "long": [engine.submit(generate([1], 12, tenant="long")) for _ in range(30)],
        "short": [engine.submit(generate([2], 4, tenant="short")) for _ in range(30)],
    }
    shares = Counter(finish_order(engine, requests)[:24])
    assert shares["short"] == pytest.approx(3 * shares["long"], abs=3)


def test_a_sampled_token_counts_as_two_computed_ones() -> None:
    engine = HandEngine(max_num_seqs=1, num_blocks=129, prefix_cache="off")
    requests = {
        "reads": [engine.submit(generate([i % 50] * 13, 1, tenant="reads")) for i in range(20)],  # 13 and 2 * 1
        "writes": [engine.submit(generate([i % 50], 5, tenant="writes")) for i in range(20)],  # 5 and 2 * 5
    }
    shares = Counter(finish_order(engine, requests)[:20])
    assert shares["reads"] == pytest.approx(shares["writes"], abs=2)


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_weights_divide_the_service(max_num_seqs: int) -> None:
    """A light tenant with a heavy one of weight 1:4 gets a fifth, within 5 %."""
    engine = HandEngine(max_num_seqs=max_num_seqs, num_blocks=513)
    requests = {
        "light": [engine.submit(generate([1], 4, tenant="light")) for _ in range(50)],
        "heavy": [engine.submit(generate([2], 4, tenant="heavy", weight=4.0)) for _ in range(100)],
    }
    shares = Counter(finish_order(engine, requests)[:100])
    assert shares["light"] == pytest.approx(20, rel=0.05)


def test_an_idle_tenant_earns_no_credit() -> None:
    engine = HandEngine(max_num_seqs=1)
    a = [engine.submit(generate([1], tenant="a")) for _ in range(10)]
    b = [engine.submit(generate([2], tenant="b"))]
    while engine.answer(a[5]).last is None:
        engine.step()
    b += [engine.submit(generate([3], tenant="b")) for _ in range(10)]
    order = finish_order(engine, {"a": a, "b": b})
    rest = order[-12:]
    assert max(len(run) for run in "".join("a" if t == "a" else "b" for t in rest[:6]).split("a")) <= 2, order


def test_one_tenant_is_served_in_order() -> None:
    engine = HandEngine(max_num_seqs=1)
    requests = {str(number): [engine.submit(generate([number], tenant="t"))] for number in range(1, 9)}
    assert finish_order(engine, requests) == [str(number) for number in range(1, 9)]


def test_a_request_that_waits_past_its_deadline_is_ended() -> None:
    engine = HandEngine(max_num_seqs=1)
    engine.now_s = 100.0
    first = engine.submit(generate([1], 8, deadline_s=2.0))  # it starts in time
    late, later = (engine.submit(generate([2], 8, deadline_s=deadline_s)) for deadline_s in (3.0, 5.0))
    patient = engine.submit(generate([3], 8, deadline_s=300.0))
    for steps, ended in ((2, []), (2, [late]), (2, [late, later])):
        for _ in range(steps):
            engine.step()
        engine._deliver(engine.scheduler.expire(engine.now_s))
        assert [request for request in (late, later, patient) if engine.answer(request).last is not None] == ended
    assert engine.answer(late).last == Failed("deadline", "it waited too long", retryable=False)
    engine.finish()
    assert len(engine.answer(first).tokens[0]) == len(engine.answer(patient).tokens[0]) == 8


def test_suspects_are_computed_one_at_a_time() -> None:
    engine = HandEngine(max_num_batched_tokens=64, max_num_seqs=8)
    suspects = [engine.submit(generate([n, 1, 2, 3] * 5, is_suspect=True)) for n in range(1, 4)]
    others = [engine.submit(generate([n], 2)) for n in range(5, 8)]
    while any(engine.answer(request).last is None for request in suspects):
        plan = engine.scheduler.schedule(engine.now_s)
        assert plan is not None
        assert sum(c.is_prefill and c.sequence.request in suspects for c in plan.chunks.values()) <= 1
        engine.in_flight.launch(plan, engine.now_s)
        engine.settle()
    engine.finish()
    assert all(engine.answer(request).tokens for request in others)


@settings(max_examples=8)
@given(events=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), min_size=200, max_size=400))
def test_absent_tenants_are_forgotten_when_that_changes_nothing(events: list[tuple[int, int]]) -> None:
    """Compare with counts that forget no tenant. One tenant is always present."""
    shares, open_now = FairShare(), ["always"]
    shares.enter("always")
    served = {"always": 0.0}
    for number, num_tokens in events:
        tenant = f"t{number}"
        if tenant in open_now:
            shares.leave(tenant)
            open_now.remove(tenant)
        else:
            shares.enter(tenant)
            served[tenant] = max(served.get(tenant, 0.0), min(served[other] for other in open_now))
            open_now.append(tenant)
        for other in open_now:
            if len(served) > 1:
                shares.charge(other, num_tokens, 1)
                served[other] += num_tokens + 2.0
        assert {other: shares._served[other] for other in open_now} == {other: served[other] for other in open_now}


def test_a_busy_worker_does_not_remember_every_tenant() -> None:
    shares = FairShare()
    shares.enter("always")
    for number in range(5000):
        shares.enter(f"t{number}")
        shares.charge(f"t{number}", 10, 1)
        shares.charge("always", 30, 1)
        shares.leave(f"t{number}")
    assert len(shares._served) < 200
