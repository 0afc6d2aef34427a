"""The public app of a real gateway over scripted workers and a plain router, on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

from cache.records import WorkerMember
from cache.types import WorkerId
from server.api.endpoint import EndpointServices
from server.auth.limits import AuthThrottle
from server.config import GatewayConfig
from server.gateway import Gateway
from server.http.middleware import Application
from server.http.server import GatewayListener
from server.metrics import GatewayMetrics
from server.models.registry import Models
from server.rates import TokenBucket
from server.router.load_tracker import WorkerLoadEstimate
from server.router.placement import Placement
from server.router.queue import RequestQueue
from server.router.types import NoWorkerError, RouteRequest
from server.usage.day import DayHistory
from server.workers.fleet import Fleet
from tests.server.scripted_worker import QuietServer, ScriptedWorker, listening
from tests.waiting import until
from worker.common.sockets import listen
from worker.wire import BlockSource


@dataclass(eq=False)
class RecordedPlacement(Placement):
    """A placement, and what was recorded of it."""

    calls: list[str] = field(default_factory=list)


@dataclass(eq=False)
class PlainRouter:
    """Places each request at the first allowed worker of the list. Also the fleet that generations report to."""

    members: list[WorkerMember] = field(default_factory=list)
    placements: list[RecordedPlacement] = field(default_factory=list)
    promised_tokens: int = 0
    source: BlockSource | None = None
    failed: list[WorkerId] = field(default_factory=list)

    async def place(self, request: RouteRequest) -> Placement:
        for member in self.members:
            fits = request.num_context_tokens <= member.max_model_len and request.numerics in (None, member.numerics)
            if fits and (member.worker_id, member.epoch) not in request.excluded:
                estimate = WorkerLoadEstimate(member.epoch, 60.0)
                about = request, member, self.promised_tokens, self.source
                placement = RecordedPlacement(*about, 0.0, 0.0, 1.0, 0.0, estimate, estimate.add(0.0, 0, 0.0))
                self.placements.append(placement)
                return placement
        raise NoWorkerError("no worker is ready", retry_after_s=2.0)

    def started(self, placement: Placement, num_cached_tokens: int, queue_s: float | None = None) -> None:
        self._record(placement, f"started {num_cached_tokens}")

    def corrected(self, placement: Placement, num_cached_tokens: int) -> None:
        self._record(placement, f"corrected {num_cached_tokens}")

    def first_token(self, placement: Placement) -> None:
        self._record(placement, "first token")

    def closed(self, placement: Placement) -> None:
        self._record(placement, "close")

    def workers(self, model: str | None = None) -> list[WorkerMember]:
        return self.members

    def report_failure(self, worker_id: WorkerId) -> None:
        self.failed.append(worker_id)

    def report_wrong_epoch(self, member: WorkerMember) -> None:
        pass

    def _record(self, placement: Placement, call: str) -> None:
        assert isinstance(placement, RecordedPlacement)
        placement.calls.append(call)


class QuietListener(GatewayListener):
    """Ends at once when it is stopped, as the scripted workers' server."""

    main_loop = QuietServer.main_loop  # type: ignore[assignment]
    shutdown = QuietServer.shutdown  # type: ignore[assignment]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.stopped = asyncio.Event()


@dataclass(eq=False)
class RunningGateway:
    url: str
    router: PlainRouter
    workers: list[ScriptedWorker]
    metrics: GatewayMetrics
    models: Models
    queue: RequestQueue[Any]
    ops: ASGIApp
    """The app of the ops port."""
    fleet: Fleet
    public: Application
    endpoint: EndpointServices
    day: DayHistory


@asynccontextmanager
async def gateway(
    *workers: ScriptedWorker,
    silent_s: float = 5.0,
    no_successor_timeout_s: float = 60.0,
    max_body_bytes: int = 1024 * 1024,
    throttle: AuthThrottle | None = None,
    budget: TokenBucket | None = None,
    **options: Any,
) -> AsyncIterator[RunningGateway]:
    """Serve the public app of a real Gateway over a PlainRouter; `options` are those of its config."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            worker.url = await stack.enter_async_context(listening(worker.app()))
        router = PlainRouter([worker.member() for worker in workers])
        urls = tuple(worker.url for worker in workers) or ("http://127.0.0.1:9",)
        config = GatewayConfig(workers=urls, stall_s=silent_s, max_body_bytes=max_body_bytes, **options)
        built = Gateway(config, placer=router, reports=router)  # type: ignore[arg-type]
        built.watch._no_successor_timeout_s = no_successor_timeout_s
        if budget is not None:
            object.__setattr__(built.requests, "budget", budget)
        if throttle is not None:
            built.authenticator.throttle = throttle
        await built.fleet.poll()
        for member in router.members:
            await built.models.admit(member)
        await stack.enter_async_context(built.working())
        sock = listen("127.0.0.1", 0)
        server = QuietListener(built.public, sock, built.http_limits)
        serving = asyncio.create_task(server.run_until_stopped())
        await until(lambda: server.started)
        try:
            url = f"http://{server.address}"
            parts = built.metrics, built.models, built.requests.queue, built.ops, built.fleet, built.public
            yield RunningGateway(url, router, list(workers), *parts, built.endpoint, built.day)
            # However the requests have ended, nothing of them is left.
            await until(lambda: not (built.requests.queue.num_tokens or built.watch._streams))
            await until(lambda: not (built.metrics.num_in_flight or built.endpoint.open_responses))
        finally:
            server.stopped.set()
            await serving
