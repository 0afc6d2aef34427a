"""The public app over scripted workers and a plain router, on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from cache.records import WorkerMember
from cache.types import GatewayId, WorkerId
from server.api.endpoint import EndpointServices
from server.app import Admission, Lifecycle, PublicApi, PublicServices, public_app
from server.auth.authentication import Authenticator, SingleTenant
from server.auth.limits import RateLimits
from server.http.protocol import GatewayProtocol
from server.http.stream import KeepAlive
from server.metrics import GatewayMetrics
from server.models import ModelOptions, Models
from server.request.limits import PromptTokenLimiter
from server.request.request import RequestServices
from server.request.retry import RetryBudget, RetryPolicy
from server.router.placement import NoWorkerError, Placement, RouteRequest
from server.router.router import Router
from server.workers.client import WorkerClient
from server.workers.watch import StallWatch
from tests.server.scripted_worker import ScriptedWorker, listening
from tests.waiting import until


@dataclass(eq=False)
class RecordedPlacement(Placement):
    worker: WorkerMember
    request: RouteRequest
    promised_tokens: int = 0
    calls: list[str] = field(default_factory=list)

    def prefill_started(self, num_cached_tokens: int) -> None:
        self.calls.append(f"started {num_cached_tokens}")

    def first_token(self) -> None:
        self.calls.append("first token")

    def close(self) -> None:
        self.calls.append("close")


@dataclass(eq=False)
class PlainRouter(Router):
    """Places each request at the first allowed worker of the list."""

    members: list[WorkerMember] = field(default_factory=list)
    placements: list[RecordedPlacement] = field(default_factory=list)
    promised_tokens: int = 0
    failed: list[WorkerId] = field(default_factory=list)

    async def place(self, request: RouteRequest) -> RecordedPlacement:
        for member in self.members:
            if (member.worker_id, member.epoch) not in request.excluded and request.numerics in (None, member.numerics):
                placement = RecordedPlacement(member, request, self.promised_tokens)
                self.placements.append(placement)
                return placement
        raise NoWorkerError("no worker is ready", contended=False, retry_after_s=2.0)

    def workers(self, model: str | None = None) -> list[WorkerMember]:
        return self.members

    def report_failure(self, worker_id: WorkerId) -> None:
        self.failed.append(worker_id)

    def report_wrong_epoch(self, member: WorkerMember) -> None:
        pass


@dataclass(eq=False)
class Gateway:
    url: str
    router: PlainRouter
    workers: list[ScriptedWorker]
    metrics: GatewayMetrics
    models: Models
    limiter: PromptTokenLimiter


@asynccontextmanager
async def gateway(
    *workers: ScriptedWorker,
    keepalive_s: float = 15.0,
    silent_s: float = 5.0,
    alone_s: float = 60.0,
    request_timeout_s: float = 60.0,
    max_body_bytes: int = 1024 * 1024,
    aliases: dict[str, str] | None = None,
    authenticator: Authenticator | None = None,
    budget: RetryBudget | None = None,
) -> AsyncIterator[Gateway]:
    metrics = GatewayMetrics()
    router = PlainRouter()
    async with AsyncExitStack() as stack:
        executor = stack.enter_context(ThreadPoolExecutor(1))
        for worker in workers:
            worker.url = await stack.enter_async_context(listening(worker.app()))
            router.members.append(worker.member())
        client = WorkerClient.open()
        stack.push_async_callback(client.close)
        models = Models(client, executor, ModelOptions(aliases or {}))
        for member in router.members:
            await models.admit(member)
        watch = StallWatch(client, router.workers, silent_s=silent_s, interval_s=silent_s / 5, alone_s=alone_s)
        keep_alive = KeepAlive(keepalive_s)
        requests = RequestServices(
            gateway_id=GatewayId("g0"),
            router=router,
            client=client,
            watch=watch,
            metrics=metrics,
            retry=RetryPolicy(router, metrics, budget),
            limiter=PromptTokenLimiter(1 << 20),
        )
        endpoint = EndpointServices(models, requests, keep_alive, request_timeout_s)
        api = PublicApi(PublicServices(endpoint, Lifecycle(), router.workers))
        limits = RateLimits()
        app = public_app(api, metrics, Admission(authenticator or SingleTenant(b"secret"), limits, max_body_bytes))
        background = [asyncio.create_task(keep_alive.run()), asyncio.create_task(watch.run())]
        url = await stack.enter_async_context(listening(app, http=GatewayProtocol, timeout_keep_alive=75))
        try:
            yield Gateway(url, router, list(workers), metrics, models, requests.limiter)
            # Whatever the requests have ended with, nothing of them is left.
            await until(lambda: not (requests.limiter.num_tokens or watch._streams or keep_alive._writers))
            await until(lambda: not (metrics.num_in_flight or endpoint.open_responses._responses))
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
