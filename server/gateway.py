"""`headstart gateway`: the composition root of one process with two ports and no model files.

Stdout has one JSON object, for the process that started it: {"event": "listening", "port": ..., "ops_port": ..., ...}.

index ---+
fleet ---+--> router --> requests --> workers
models --+                  |
public app (OpenAI, health) +        ops app (metrics, workers, explain, drain, dashboard, chat page)
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvloop

from cache.redis_index import KeyUse, ReaderSettings, RedisIndex
from cache.types import GatewayId
from server.api.endpoint import EndpointServices
from server.api.engine.text import EngineTexts
from server.api.prompts.client_lines import CLIENT_LINES
from server.api.prompts.ignored_tools import IgnoredTools
from server.app import PublicApi, public_app
from server.auth.authentication import Authenticator
from server.auth.identity import DEFAULT_TENANT, KeyFile, tenant_identity
from server.config import GatewayConfig, parse
from server.event_loop import keep_running, sample_delay
from server.http.middleware import known_hosts
from server.http.protocol import HttpLimits
from server.http.server import GatewayListener, affordable_connections
from server.metrics import GatewayMetrics
from server.models.registry import Models
from server.ops.app import OpsApi, ops_app
from server.ops.feed import Feed
from server.ops.overview import Overview
from server.ops.workers_needed import WorkersNeeded
from server.request.services import RequestServices
from server.request_context import RequestContext, add_ids
from server.router.copies import Copies, CopyPlanner
from server.router.decisions import DecisionLog
from server.router.index_accuracy import IndexAccuracy
from server.router.placement import Placement
from server.router.queue import RequestQueue
from server.router.router import Router
from server.text.shapes import REPAIRS
from server.usage.day import DayHistory
from server.usage.log import UsageLog
from server.usage.totals import UsageTotals
from server.workers.client import StallWatch, WorkerClient
from server.workers.fleet import Fleet, NoIndex
from server.workers.networks import WorkerNetworks
from worker.common.logs import configure_logging
from worker.common.proof import gateway_token
from worker.common.sockets import HostNames, is_loopback, listen
from worker.common.tracing import open_tracing
from worker.common.watchdog import watched

log = logging.getLogger("server.gateway")  # also where it runs as __main__

FOLLOW_INTERVAL_S: Final = 0.1  # a new model serves at once for a reader
SHUTDOWN_NOTICE_S: Final = 1.0
"""The last part of the drain grace, in which open answers end with an error."""
NUM_THREADS: Final = 2
"""Threads that tokenise long texts: the library releases the GIL."""
GC_THRESHOLD: Final = 20_000  # requests leave no cycles, and make more objects than the default
BAD_USAGE: Final = 2  # argparse's, too


class Gateway:
    """The parts of one gateway process. Build it inside the event loop, then `run` it to its end."""

    def __init__(self, config: GatewayConfig, *, placer: Router | None = None, reports: Fleet | None = None) -> None:
        """`placer` and `reports` replace router and fleet for generations. Raises ValueError and OSError."""
        self._config = config
        gateway_id = GatewayId(f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")
        secret = config.cluster_secret()
        self.metrics = GatewayMetrics()
        self.metrics.repairs.start(*REPAIRS)
        self.metrics.removed_lines.start(*CLIENT_LINES)
        self._tracing = open_tracing("headstart-gateway", config.otlp_endpoint, gateway_id)
        self._certificate = config.certificate()
        self._worker_ca = config.workers_ca()
        self._index: RedisIndex | NoIndex = NoIndex()
        counter: KeyUse | None = None
        if config.redis is not None:
            settings = config.index_settings(ReaderSettings)
            self._index = RedisIndex(config.redis, settings, count=self.metrics.index_events.inc)
            counter = KeyUse(self._index, gateway_id)

        self._keys = _open_keys(config, counter, self.metrics)
        networks = WorkerNetworks(config.worker_networks, tls_only=self._worker_ca is not None)
        tls = None if self._worker_ca is None else self._worker_ca.context
        self._client = WorkerClient(gateway_token(secret), networks, tls)
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self.fleet = Fleet(
            self._index, self._client.state, targets=config.workers, cluster_secret=secret, networks=networks
        )
        self.models = Models(self._client, self._executor, config, self.fleet.may_have)

        queue = RequestQueue[asyncio.Future[Placement]](config.hold_s, config.max_queued_tokens)
        planner = CopyPlanner(time.monotonic, config.max_copies)
        decisions, accuracy, copies = DecisionLog(), IndexAccuracy(), Copies(planner, self._client.adopt, self.metrics)
        self.workers_needed = WorkersNeeded(config.scale_objective_s, time.monotonic)
        self.router = Router(
            self._index,
            self.fleet,
            gateway_id,
            self.metrics,
            policy=config.policy,
            queue=queue,
            listeners=(accuracy, decisions, copies),
        )
        self.watch = StallWatch(self._client, self.fleet.workers, config.stall_s)
        self.requests = RequestServices(
            gateway_id=gateway_id,
            router=placer or self.router,
            client=self._client,
            watch=self.watch,
            metrics=self.metrics,
            fleet=reports or self.fleet,
            queue=queue,
            models=self.models,
        )
        ignored_tools = IgnoredTools(strict_tools=config.strict_tools, strict_blocks=config.strict_blocks)
        texts = EngineTexts(self.models, self._client, self.fleet, ignored_tools, config)
        self.endpoint = EndpointServices(config, self.models, self.requests, ignored_tools, self._tracing, texts)
        self.api = PublicApi(self.endpoint, self.fleet.live_workers)

        self.authenticator = Authenticator(self._keys, tenant_identity(secret, DEFAULT_TENANT), config.tenant_header)
        self.usage = UsageTotals()
        self.day = DayHistory()
        self.metrics.registry.register(self.usage)
        self._usage_log: UsageLog | None = None
        if config.usage_log is not None:
            path, size = Path(config.usage_log), config.usage_log_size_bytes
            self._usage_log = UsageLog(path, size, config.usage_log_files, self.metrics)
        self.public = public_app(config, self.api, self.metrics, self.authenticator, self._count_usage)
        followers = decisions, accuracy, copies, self.workers_needed
        parts_shown = self.api, self.router, *followers, self._index, self.usage, self.day
        overview = Overview(*parts_shown, config.grafana_url)
        self.metrics.registry.register(overview)
        self.feed = Feed(overview)
        operations = OpsApi(overview, self.feed, partial(tenant_identity, secret), self.drain)
        local, has_tenants = is_loopback(config.ops_host), self._keys is not None
        self.ops = ops_app(operations, self.public, config.ops_key(), local=local, has_tenants=has_tenants)
        self.http_limits = HttpLimits(
            header_timeout_s=config.header_timeout_s,
            body_timeout_s=config.body_timeout_s,
            max_connections=config.max_connections,
            drain_grace_s=config.drain_grace_s,
            keep_alive_s=config.keep_alive_s,
        )
        self._listeners: tuple[GatewayListener, ...] = ()
        self._notice: asyncio.TimerHandle | None = None
        """Ends the notice of a drain."""
        self._has_signal = False

    async def run(self, public_socket: socket.socket, ops_socket: socket.socket) -> None:
        """Serve until drained. A listener that fails ends the process."""
        config = self._config
        tls = None if self._certificate is None else self._certificate.context
        public = GatewayListener(self.public, public_socket, self.http_limits, tls)
        known = HostNames(ops_socket.getsockname()[0], (config.ops_host, *config.ops_hosts))
        ops = GatewayListener(known_hosts(self.ops, known, "--ops-hosts"), ops_socket, self.http_limits, tls)
        self._listeners = (public, ops)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self.metrics.tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
        gc.collect()
        gc.freeze()  # what lives for long is not collected again
        gc.set_threshold(GC_THRESHOLD, 20, 20)
        scheme = "http" if tls is None else "https"
        log.info("gateway on %s://%s, ops on %s://%s", scheme, public.address, scheme, ops.address)
        async with self.working(), asyncio.TaskGroup() as group:
            group.create_task(ops.run_until_stopped())
            await public.run_until_stopped()
            self.feed.close()
            ops.should_exit = True

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Run the background tasks, which start again when they fail; close what is open at the end."""
        tasks = [
            asyncio.create_task(keep_running(name, work, self.metrics.task_failures.inc))
            for name, work in self._background()
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._client.close()
            self._executor.shutdown(wait=False, cancel_futures=True)
            if self._tracing is not None:
                self._tracing.close()

    def _background(self) -> Iterator[tuple[str, Callable[[], Coroutine[Any, Any, None]]]]:
        """Yield each background task with the name under which its failures are counted."""
        yield "fleet", self.fleet.run
        yield "feed", self.feed.run
        yield "workers needed", lambda: self.workers_needed.follow(self.router)
        yield "models", lambda: self.models.follow(self.fleet.known, FOLLOW_INTERVAL_S)
        yield "stall watch", self.watch.run
        yield "delay", lambda: sample_delay(self.metrics.delayed)
        if isinstance(self._index, RedisIndex):
            yield "index", self._index.run
        if self._usage_log is not None:
            yield "usage log", self._usage_log.run
        if self._keys is not None:
            yield "leases", self._keys.renew_leases
        for name, files in (("keys", self._keys), ("certificate", self._certificate), ("worker CA", self._worker_ca)):
            if files is not None:
                yield name, files.follow

    def _count_usage(self, context: RequestContext) -> None:
        self.day.add(context.status, context.error, context.account, context.sender, context.request_id)
        if context.account is not None:
            self.usage.add(context.account)
            if self._usage_log is not None:
                self._usage_log.add(context.account)

    def drain(self) -> None:
        """Be not ready for the notice, then take no new connections, end open requests within the grace, and stop."""
        if self._notice is not None:
            return
        config = self._config
        log.info("draining: %.0f s, then %.0f s for open requests", config.drain_notice_s, config.drain_grace_s)
        self.api.draining = True
        for listener in self._listeners[:1]:
            listener.announce_end()
        self._notice = asyncio.get_running_loop().call_later(config.drain_notice_s, self._close_port)

    def _close_port(self) -> None:
        grace_s = self._config.drain_grace_s
        shutdown_s = grace_s - min(SHUTDOWN_NOTICE_S, grace_s / 2)
        asyncio.get_running_loop().call_later(shutdown_s, self.endpoint.shutdown)
        for listener in self._listeners[:1]:
            listener.should_exit = True

    def _on_signal(self, number: int) -> None:
        """Drain at the first signal, without a notice at Ctrl-C, and stop at once at the second."""
        if self._has_signal:
            for listener in self._listeners:
                listener.should_exit = listener.force_exit = True
        self._has_signal = True
        self.drain()
        if number == signal.SIGINT and self._notice is not None:
            self._notice.cancel()
            self._close_port()


def _open_keys(config: GatewayConfig, counter: KeyUse | None, metrics: GatewayMetrics) -> KeyFile | None:
    """Raises ValueError."""
    if config.api_keys is not None:
        try:
            parts = Path(config.api_keys), config.cluster_secret(), counter, config.limits_gateways
            keys = KeyFile(*parts, on_reload=metrics.key_reloads.inc)
        except ValueError as error:
            raise ValueError(f"--api-keys {error}") from None
        log.info("%d API keys of %s", len(keys), config.api_keys)
        return keys
    ports = (config.host, config.port), (config.ops_host, config.ops_port)  # the ops port has the chat page's API
    if reachable := [f"{host}:{port}" for host, port in ports if not is_loopback(host)]:
        where = " or ".join(reachable)
        log.warning("NO API KEYS: anyone who reaches %s may use every model; give --api-keys FILE", where)
    return None


async def _serve(config: GatewayConfig, public: socket.socket, ops: socket.socket) -> None:
    gateway = Gateway(config)
    ports = {"port": public.getsockname()[1], "ops_port": ops.getsockname()[1]}
    with suppress(OSError):
        print(json.dumps({"event": "listening", **ports, "needs_key": config.api_keys is not None}), flush=True)
    await gateway.run(public, ops)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 when drained and stopped, 2 for options that cannot work."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: else glibc's heap keeps freed texts of up to 32 MB each
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        configure_logging(config.log_level, config.log_format, add_ids)
        config = replace(config, max_connections=affordable_connections(config.max_connections))
        with ExitStack() as stack:
            public = stack.enter_context(listen(config.host, config.port, share=config.share_port))
            ops = stack.enter_context(listen(config.ops_host, config.ops_port, option="--ops-port"))
            runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
            with watched(runner.get_loop(), "gateway"):
                runner.run(_serve(config, public, ops))
    except (ValueError, OSError) as error:
        print(f"headstart gateway: {error}", file=sys.stderr)
        return BAD_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
