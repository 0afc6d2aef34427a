"""Ten times more requests than fit, from clients that retry: row 16 of the matrix in docs/reliability.md."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from server.auth.identity import digest_text
from tests.faults.client import Outcome, ask, completion, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.worker_process import Additions

STEP_S = 0.08
NUM_SLOTS = 8
"""A worker's."""
NUM_TOKENS = 20
"""An answer's, at the mean; from half to one and a half times as many."""
SERVICE_S = STEP_S * (NUM_TOKENS + 1)
MAX_QUEUE_S = 2.0
GOOD_S = 1.5 * SERVICE_S + MAX_QUEUE_S + 1.5
"""A later answer is none that counts."""
PEAK_S = 15.0
OVERLOAD_S = 60.0
FACTOR = 10
WEAK_SHARE = 0.25
"""Share of the peak that the weak tenant asks for: less than its half."""
NUM_RETRIES = 2
BUSY_SHARE = 0.05
"""A gateway that waits this share for a core competes with other processes: figures in seconds then measure those."""
WORDS = ("spring", "summer", "autumn", "winter")


@pytest.fixture
def cluster(tmp_path: Path, model: Path) -> Iterator[Cluster]:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "".join(
            f'[[keys]]\ndigest = "{digest_text(tenant.encode())}"\ntenant = "{tenant}"\n'
            for tenant in ("flood", "weak")
        )
    )
    topology = Topology(
        worker_args=["--max-num-seqs", str(NUM_SLOTS), "--max-queue-s", str(MAX_QUEUE_S)],
        gateway_args=["--api-keys", str(keys)],
        additions=Additions(step_s=STEP_S),
    )
    with Cluster(tmp_path / "fleet", model, topology) as running:
        yield running


@dataclass(slots=True)
class Tenant:
    """Sends requests with its key, and keeps what became of every attempt and when."""

    name: str
    url: str
    http: aiohttp.ClientSession
    rng: random.Random
    attempts: list[tuple[float, Outcome]] = field(default_factory=list)
    """The time at which each ended, on the monotonic clock."""
    num_requests: int = 0
    leaving: bool = False
    """No client tries again any more."""

    async def request(self, num_tokens: int = 0) -> Outcome:
        """As the openai package does: tried again twice, after Retry-After or a back-off of its own."""
        self.num_requests += 1
        prompt = " ".join(self.rng.choices(WORDS, k=self.rng.randint(5, 30)))
        body = completion(prompt, max_tokens=num_tokens or self.rng.randint(NUM_TOKENS // 2, 3 * NUM_TOKENS // 2))
        for number in range(NUM_RETRIES + 1):
            outcome = await ask(self.http, self.url, body, headers={"authorization": f"Bearer {self.name}"})
            self.attempts.append((time.monotonic(), outcome))
            if outcome.status not in (429, 503) or number == NUM_RETRIES or self.leaving:
                break
            said_s = float(outcome.headers.get("retry-after", 0))
            await asyncio.sleep(said_s or min(8.0, 0.5 * 2**number) * (1 - 0.25 * self.rng.random()))
            if self.leaving:
                break
        return outcome

    async def arrive(self, per_s: float, for_s: float) -> None:
        """Requests at random times, whatever becomes of them."""
        next_s = time.monotonic()
        end_s = next_s + for_s
        tasks = set()
        while (next_s := next_s + self.rng.expovariate(per_s)) < end_s:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            task = asyncio.create_task(self.request())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        self.leaving = True
        await asyncio.gather(*tasks)

    async def repeat(self, for_s: float) -> None:
        """One request after another."""
        end_s = time.monotonic() + for_s
        while time.monotonic() < end_s:
            await self.request()

    @property
    def num_answered(self) -> int:
        return sum(outcome.ok for _, outcome in self.attempts)

    @property
    def share_answered(self) -> float:
        return self.num_answered / self.num_requests

    def tokens_per_s(self, begin_s: float, end_s: float) -> float:
        """Tokens/s of answers that were whole and in time, and ended within these seconds."""
        good = [o for at_s, o in self.attempts if begin_s <= at_s < end_s and o.ok and o.took_s <= GOOD_S]
        return sum(outcome.num_tokens for outcome in good) / (end_s - begin_s)


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def test_row_16_ten_times_overload(cluster: Cluster, rng: random.Random) -> None:
    """Goodput stays at the peak, and rejections are quick and name the time to retry.

    A tenant within its share does not notice the other. Latency is normal again within five seconds. Other processes on
    the machine change rates and latencies: then only the order of the tenants is judged.
    """
    url = cluster.gateway.url
    gc.freeze()  # this process has torch: a full collection takes longer than a rejection may
    async with session(keep_alive=True) as http:
        flood, weak, probe = (
            Tenant(name, url, http, random.Random(rng.random())) for name in ("flood", "weak", "weak")
        )
        normal_s = statistics.median([(await probe.request(NUM_TOKENS)).took_s for _ in range(3)])
        begun_s = time.monotonic()
        await asyncio.gather(*(flood.repeat(PEAK_S) for _ in range(3 * NUM_SLOTS)))
        peak = flood.tokens_per_s(begun_s + SERVICE_S, begun_s + PEAK_S)
        peak_per_s = peak / NUM_TOKENS
        flood.attempts.clear()

        begun_s = time.monotonic()
        waited_s = -run_queue_s(cluster.gateway.pid)
        loads = [
            asyncio.create_task(tenant.arrive(share * peak_per_s, OVERLOAD_S))
            for tenant, share in ((flood, FACTOR), (weak, WEAK_SHARE))
        ]
        await asyncio.sleep(OVERLOAD_S)
        waited_s += run_queue_s(cluster.gateway.pid)
        recovered_s = await until_normal(probe, normal_s, time.monotonic())
        await asyncio.gather(*loads)
    window = begun_s + SERVICE_S, begun_s + OVERLOAD_S
    goodput = flood.tokens_per_s(*window) + weak.tokens_per_s(*window)
    outcomes = [outcome for _, outcome in flood.attempts]
    rejected = [outcome for outcome in outcomes if outcome.status == 429]
    rejected_s = [outcome.took_s for outcome in rejected]
    inside_s = [int(outcome.headers["openai-processing-ms"]) / 1e3 for outcome in rejected]
    weak_s = [outcome.took_s for _, outcome in weak.attempts]
    print(
        f"peak {peak:.1f} tokens/s, goodput {goodput / peak:.3f} of it, {flood.num_requests / OVERLOAD_S:.0f} asked/s"
        f" ({len(outcomes)} attempts, {len(rejected)} rejected: p50 {quantile(rejected_s, 0.5) * 1e3:.1f},"
        f" p99 {quantile(rejected_s, 0.99) * 1e3:.1f}, max {max(rejected_s) * 1e3:.1f} ms;"
        f" by the gateway's clock p99 {quantile(inside_s, 0.99) * 1e3:.0f}, max {max(inside_s) * 1e3:.0f} ms);"
        f" weak tenant: {weak.num_requests} requests, {weak.num_answered} answered in {len(weak.attempts)} attempts,"
        f" p50 {quantile(weak_s, 0.5):.2f}, p95 {quantile(weak_s, 0.95):.2f} s against {normal_s:.2f} s alone;"
        f" normal again after {recovered_s:.1f} s; waiting for a core {waited_s / OVERLOAD_S:.1%} of the time"
    )
    assert all(outcome.ok or outcome.explicit for outcome in outcomes)
    retry_s = {int(outcome.headers["retry-after"]) for outcome in rejected}
    assert min(retry_s) >= 1
    assert recovered_s < math.inf
    assert weak.share_answered > flood.share_answered, "a tenant within its share goes before the other"
    cluster.assert_quiet()
    if waited_s > BUSY_SHARE * OVERLOAD_S:
        return
    assert max(retry_s) <= 3
    assert {outcome.error or outcome.status for outcome in outcomes} <= {200, "queue_full"}
    assert len(outcomes) > FACTOR * peak_per_s * OVERLOAD_S * 0.9
    assert goodput > 0.9 * peak
    assert quantile(rejected_s, 0.99) < 0.05
    assert weak.num_answered >= 0.98 * weak.num_requests, "a tenant within its share is served"
    assert len(weak.attempts) - weak.num_answered < 0.05 * len(weak.attempts), "and hardly ever rejected"
    assert quantile(weak_s, 0.95) < 1.5 * normal_s + MAX_QUEUE_S
    assert max(outcome.took_s for outcome in outcomes if outcome.ok) < 2 * GOOD_S, "nobody is starved"
    assert recovered_s < 5


def run_queue_s(pid: int) -> float:
    """How long the process' main thread was ready and had no core. Source: Documentation/scheduler/sched-stats."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


async def until_normal(probe: Tenant, normal_s: float, since_s: float) -> float:
    """Seconds from then until an answer takes as long as on an idle fleet, or a quarter more."""
    while True:
        outcome = await probe.request(NUM_TOKENS)
        ended_s = time.monotonic() - outcome.took_s - since_s
        if outcome.ok and outcome.took_s < 1.25 * normal_s:
            return ended_s
        if ended_s > 30:
            return ended_s if outcome.ok else math.inf
