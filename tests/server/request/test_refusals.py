"""Refusals by workers, and by the gateway: floods, requests that kill workers, workers with a false bundle."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest

from cache.types import WorkerId
from server.rates import TokenBucket
from server.request import request as generations
from server.request.services import MAX_RETRIES
from server.router import queue
from server.router.placement import Placement
from server.router.types import NoWorkerError, RouteRequest
from tests.server.conftest import ANSWER
from tests.server.gateway_app import gateway
from tests.server.request.failing_workers import MakeWorker, dies_after
from tests.server.scripted_worker import Refuse, Script, script_of
from tests.server.test_app import chat, post
from tests.waiting import until
from worker.wire import Failed, Started


def refuses(status: int, code: str, *, retryable: bool = True, retry_after_s: float | None = None) -> Script:
    return script_of(then=Refuse(status, code, retryable=retryable, retry_after_s=retry_after_s))


@pytest.mark.parametrize(("status", "code"), [(429, "queue_full"), (503, "draining"), (409, "wrong_epoch")])
async def test_refusals_go_elsewhere_at_once(make: MakeWorker, status: int, code: str) -> None:
    refusing, healthy = make(), make()
    refusing.behave = refuses(status, code)
    async with gateway(refusing, healthy) as target:
        got, _, raw = await post(target.url, chat())
        assert got == 200
        assert json.loads(raw)["choices"][0]["message"]["content"] == ANSWER
        assert all(placement.calls[-1] == "close" for placement in target.router.placements[:-1])
        assert len(refusing.received) == (2 if status == 409 else 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (429, "queue_full", (429, "queue_full", "1")),
        (503, "draining", (503, "service_unavailable", "1")),
        (400, "invalid_request", (400, None, None)),
        (500, "internal_error", (500, "internal_error", None)),
    ],
)
async def test_refused_by_all_is_a_status(
    make: MakeWorker, stream: bool, status: int, code: str, expected: tuple[int, str | None, str | None]
) -> None:
    workers = make(), make()
    for worker in workers:
        worker.behave = refuses(status, code, retryable=status in (429, 503))
    async with gateway(*workers) as target:
        got, headers, raw = await post(target.url, chat(stream=stream))
        error = json.loads(raw)["error"]
        assert (got, error["code"], headers.get("retry-after")) == expected
        assert headers.get("x-should-retry") == {429: "true", 500: "false"}.get(got)


async def test_retries_are_a_part_of_the_requests(make: MakeWorker) -> None:
    """With an empty budget a tenth of the requests may be retried, so that retries do not multiply a failure."""
    budget = TokenBucket(1e-9, MAX_RETRIES)
    budget.set(time.monotonic(), 0.0)
    refusing, healthy = make(), make()
    refusing.behave = refuses(503, "draining")
    async with gateway(refusing, healthy, budget=budget) as target:
        statuses = [(await post(target.url, chat()))[0] for _ in range(13)]
    assert statuses.count(200) == len(healthy.received) == 1
    assert statuses[9:12].count(200) == 1


async def test_a_flood_does_not_reach_full_workers(make: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    pause_s = 2.0  # long enough for a slow machine to send the whole flood
    monkeypatch.setattr(queue, "FULL_S", pause_s)
    workers = make(), make()
    for worker, retry_after_s in zip(workers, (2.0, 5.0), strict=True):
        worker.behave = refuses(429, "queue_full", retry_after_s=retry_after_s)
    async with gateway(*workers) as target:
        answers = [await post(target.url, chat())]
        answers += await asyncio.gather(*(post(target.url, chat()) for _ in range(40)))
        assert {(status, json.loads(raw)["error"]["code"]) for status, _, raw in answers} == {(429, "queue_full")}
        assert {headers["retry-after"] for _, headers, _ in answers} == {"2"}, "when the first of them has room"
        assert sum(len(worker.received) for worker in workers) < 40
        for worker in workers:
            worker.behave = worker.answer
        await asyncio.sleep(pause_s)
        assert (await post(target.url, chat()))[0] == 200


async def test_a_full_worker_is_asked_again_while_another_is_silent(
    make: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost machine is silent for minutes, and the full worker has room long before."""
    monkeypatch.setattr(generations, "PAUSE_S", 0.01)
    worker = make()
    worker.behave = refuses(429, "queue_full")
    async with gateway(worker, request_timeout_s=10.0) as target:
        router, place = target.router, target.router.place

        async def place_or_wait(request: RouteRequest) -> Placement:
            try:
                return await place(request)
            except NoWorkerError as error:
                worker.behave = None
                raise NoWorkerError(str(error), is_silent=True) from None

        silent = replace(router.members[0], worker_id=WorkerId("silent"))
        monkeypatch.setattr(router, "workers", lambda model=None: [*router.members, silent])
        monkeypatch.setattr(router, "place", place_or_wait)
        assert (await post(target.url, chat()))[0] == 200
    assert len(worker.received) == 2


async def test_a_full_model_is_no_reason_to_refuse_another(make: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "FULL_S", 60.0)
    monkeypatch.setattr(generations, "PAUSE_S", 0.01)
    full, other = make(), make()
    full.behave = refuses(429, "queue_full", retry_after_s=60.0)
    other.bundle = replace(other.bundle, model="other")
    other.behave = refuses(503, "draining")
    async with gateway(full, other) as target:
        statuses = [(await post(target.url, chat(model=model)))[0] for model in ("tiny", "tiny", "other")]
    assert statuses == [429, 429, 503]


async def test_prompts_at_a_worker_count_in_the_bound(make: MakeWorker) -> None:
    """Until their first token, also where no request is held."""
    worker, may_answer = make(), asyncio.Event()
    worker.behave = worker.holds(may_answer, 1)
    async with gateway(worker, hold_s=0.0, max_queued_tokens=1) as target:
        first = asyncio.create_task(post(target.url, chat()))
        await until(lambda: worker.num_running)
        status, _, raw = await post(target.url, chat())
        may_answer.set()
        assert (await first)[0] == 200
        assert (status, json.loads(raw)["error"]["code"]) == (429, "queue_full")
        assert (await post(target.url, chat()))[0] == 200


async def test_a_request_that_kills_workers_is_poison(make: MakeWorker) -> None:
    """It is stopped, and refused when it is repeated."""
    workers = [make() for _ in range(5)]
    for worker in workers:
        worker.behave = dies_after(worker, 0)
    async with gateway(*workers) as target:
        for _ in range(2):
            status, headers, _ = await post(target.url, chat(seed=1))
            assert (status, headers["x-should-retry"]) == (500, "false")
        assert [len(worker.received) for worker in workers] == [1, 1, 0, 0, 0]
        assert target.metrics.registry.get_sample_value("headstart_quarantined_total") == 1
        assert [worker.received[0].is_suspect for worker in workers[:2]] == [False, True]
        for worker in workers:
            worker.behave = None
        status, _, _ = await post(target.url, chat(seed=1, temperature=0.5))
        assert status == 200, "another request is not in the poison cache"


async def test_a_worker_that_calls_a_request_poisonous_is_believed(make: MakeWorker) -> None:
    blaming, other = make(), make()
    blaming.behave = script_of(Started(0), Failed("poisonous", "the request has broken the device", retryable=False))
    async with gateway(blaming, other) as target:
        for _ in range(2):
            status, headers, _ = await post(target.url, chat(seed=1))
            assert (status, headers["x-should-retry"]) == (500, "false")
        assert (len(blaming.received), len(other.received)) == (1, 0)


async def test_a_bundle_of_another_namespace_is_refused(make: MakeWorker) -> None:
    liar = make(namespace="0" * 32)
    async with gateway(liar) as target:
        assert target.models.names() == []
        status, _, _ = await post(target.url, chat())
        assert status == 503
