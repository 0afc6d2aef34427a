"""`headstart gateway`: one process, two ports, no model files.

index reader ---+
fleet ----------+--> router --> generations --> workers
models ---------+                   |
public app (OpenAI, health) --------+        ops app (metrics, workers, explain, drain, dashboard, chat page)
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvloop
from starlette.types import ASGIApp

from cache.redis_index import ReaderSettings, RedisIndex
from cache.types import GatewayId
from server.api.endpoint import EndpointServices
from server.app import Admission, Lifecycle, PublicApi, PublicServices, public_app
from server.auth.api_keys import KeyFile
from server.auth.authentication import Authenticator, KeyAuthenticator, SingleTenant
from server.auth.identity import tenant_identity
from server.auth.limits import AuthThrottle, RateLimits
from server.background import keep_running
from server.config import GatewayConfig, parse
from server.http.middleware import KnownHostsMiddleware
from server.http.server import HttpLimits, Listener, affordable_connections
from server.http.stream import KeepAlive
from server.metrics import FleetMetrics, GatewayMetrics
from server.models import ModelOptions, Models
from server.ops.app import OpsServices, ops_app
from server.ops.decisions import DecisionLog
from server.ops.feed import Feed
from server.ops.overview import Overview
from server.ops.prefix_tree import PrefixTree
from server.pace import sample_delay
from server.request.limits import PromptTokenLimiter
from server.request.request import RequestServices
from server.request.retry import RetryPolicy
from server.request_context import add_ids
from server.router.router import Router
from server.tracing import SERVICE
from server.workers.client import WorkerClient
from server.workers.fleet import Fleet, NoIndex
from server.workers.networks import WorkerNetworks
from server.workers.watch import StallWatch
from worker.common.logs import configure_logging
from worker.common.sockets import HostNames, is_loopback, listen
from worker.common.tracing import open_tracing
from worker.wire import gateway_token

log = logging.getLogger(__name__)

FOLLOW_INTERVAL_S: Final = 0.1
LAST_WORDS_S: Final = 1.0
"""Of the grace: for telling clients that their answers end here."""
NUM_THREADS: Final = 2
"""For long texts: tokenising releases the GIL."""
GC_THRESHOLD: Final = 20_000
REFUSED: Final = 2


class Gateway:
    """Everything of one gateway process. Build it inside the event loop, then `run` it to its end."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._max_connections = affordable_connections(config.max_connections)
        gateway_id = GatewayId(f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")
        self._tracing = open_tracing(SERVICE, config.otlp_endpoint, gateway_id)
        secret = config.cluster_secret()
        self.metrics = GatewayMetrics()
        self.metrics.follow_tasks(asyncio.get_running_loop())
        self.lifecycle = Lifecycle()
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self._certificate = config.certificate()
        self._worker_ca = config.workers_ca()
        networks = WorkerNetworks(config.worker_networks, tls_only=self._worker_ca is not None)
        tls = None if self._worker_ca is None else self._worker_ca.context
        self._client = WorkerClient.open(gateway_token(secret), networks, tls)
        options = ModelOptions(config.aliases, config.tool_parser, config.reasoning, config.control_tokens_in_content)
        self.models = Models(self._client, self._executor, options)
        self._index = self._open_index()
        self.fleet = Fleet(
            self._index,
            self._client.state,
            targets=config.workers,
            cluster_secret=secret,
            networks=networks,
            namespaces=self.models.namespaces,
        )
        prefix_tree, decisions = PrefixTree(time.monotonic), DecisionLog()
        self.router = Router(
            self._index,
            self.fleet,
            gateway_id,
            policy=config.policy,
            on_stage=self.metrics.routed,
            on_match=prefix_tree.add,
            observer=decisions,
        )
        self._watch = StallWatch(self._client, self.fleet.workers, silent_s=config.stall_s)
        self._keep_alive = KeepAlive(config.keepalive_s)
        self._keys = self._open_keys()
        authenticator: Authenticator = SingleTenant(secret)
        if self._keys is not None:
            authenticator = KeyAuthenticator(secret, self._keys, AuthThrottle())
        requests = RequestServices(
            gateway_id=gateway_id,
            router=self.router,
            client=self._client,
            watch=self._watch,
            metrics=self.metrics,
            retry=RetryPolicy(self.router, self.metrics),
            limiter=PromptTokenLimiter(config.max_queued_tokens),
        )
        timeout_s = config.request_timeout_s
        self._endpoint = EndpointServices(self.models, requests, self._keep_alive, timeout_s, self._tracing)
        overview = Overview(
            gateway_id=gateway_id,
            policy=config.policy,
            fleet=self.fleet,
            router=self.router,
            index=self._index,
            metrics=self.metrics,
            lifecycle=self.lifecycle,
            num_streamed_tokens=lambda: self._endpoint.open_responses.num_output_tokens,
            prefix_tree=prefix_tree,
        )
        self.metrics.registry.register(
            FleetMetrics(
                lambda: {worker.model for worker in self.fleet.workers()},
                overview.candidates,
                self.fleet.broken,
                lambda: self.router.index_state()["blind"],
                self.router.num_outstanding,
            )
        )
        self.feed = Feed(overview, decisions)
        services = PublicServices(self._endpoint, self.lifecycle, self.fleet.live_workers)
        self._api = PublicApi(services)
        admission = Admission(authenticator, RateLimits(), config.max_body_bytes)
        self.public = public_app(self._api, self.metrics, admission, access_log=config.access_log)
        self.ops = ops_app(
            OpsServices(
                api=self._api,
                of_tenant=partial(tenant_identity, secret),
                overview=overview,
                feed=self.feed,
                client=self._client,
                drain=self.drain,
                public=self.public,
                key=config.ops_key(),
                local=is_loopback(config.ops_host),
                has_tenants=self._keys is not None,
            )
        )
        self._listeners: tuple[Listener, ...] = ()

    async def run(self, public_socket: socket.socket, ops_socket: socket.socket) -> None:
        """Serve until drained. A background task that fails starts again; a listener that fails ends the process."""
        public = self._listener(self.public, public_socket)
        ops = self._listener(self._known_hosts_only(self.ops, ops_socket), ops_socket)
        self._listeners = (public, ops)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(keep_running(name, part, self.metrics.task_failed))
                    for name, part in self._background()
                ]
                _spare_the_collector()
                scheme = "http" if self._certificate is None else "https"
                log.info("gateway on %s://%s, ops on %s://%s", scheme, public.address, scheme, ops.address)
                ops_served = group.create_task(ops.run_until_stopped())
                await public.run_until_stopped()
                self.feed.close()
                ops.stop()
                await ops_served
                for task in tasks:
                    task.cancel()
        finally:
            await self._client.close()
            self._executor.shutdown(wait=False, cancel_futures=True)
            if self._tracing is not None:
                self._tracing.close()

    def _background(self) -> Iterator[tuple[str, Callable[[], Coroutine[Any, Any, None]]]]:
        """What runs beside the requests, by the name under which its failures are counted."""
        yield "fleet", self.fleet.run
        yield "models", lambda: self.models.follow(self.fleet.workers, FOLLOW_INTERVAL_S)
        yield "stall watch", self._watch.run
        yield "keep-alive", self._keep_alive.run
        yield "delay", lambda: sample_delay(self.metrics.delayed)
        if isinstance(self._index, RedisIndex):
            yield "index", self._index.run
        for name, files in (("keys", self._keys), ("certificate", self._certificate), ("worker CA", self._worker_ca)):
            if files is not None:
                yield name, files.follow

    def _known_hosts_only(self, app: ASGIApp, listener: socket.socket) -> ASGIApp:
        """The ops port answers to names that it was bound to or told."""
        names = (self._config.ops_host, *self._config.ops_hosts)
        return KnownHostsMiddleware(app, HostNames(listener.getsockname()[0], names), "--ops-hosts")

    def drain(self) -> None:
        """Take no new connections, end open requests within the grace, then stop."""
        if not self.lifecycle.draining:
            log.info("draining: open requests have %.0f s", self._config.drain_grace_s)
            self.lifecycle.draining = True
            last_words_s = min(LAST_WORDS_S, self._config.drain_grace_s / 2)
            shutdown_s = self._config.drain_grace_s - last_words_s
            asyncio.get_running_loop().call_later(shutdown_s, self._endpoint.open_responses.shutdown)
        if self._listeners:
            self._listeners[0].stop()

    def _signalled(self) -> None:
        if self.lifecycle.draining:
            for listener in self._listeners:
                listener.force()
        self.drain()

    def _open_index(self) -> RedisIndex | NoIndex:
        config = self._config
        if config.redis is None:
            return NoIndex()
        settings = ReaderSettings(
            prefix=config.redis_prefix,
            num_shards=config.redis_shards,
            deadline_s=config.lookup_deadline_s,
            username=config.redis_username,
            password=config.redis_password(),
            cluster_secret=config.cluster_secret(),
        )
        return RedisIndex(config.redis, settings, count=self.metrics.index_event)

    def _open_keys(self) -> KeyFile | None:
        """Raises KeyFileError."""
        config = self._config
        if config.api_keys is None:
            if not is_loopback(config.host):
                log.warning(
                    "NO API KEYS: everybody who reaches %s:%d may use every model; give --api-keys FILE",
                    config.host,
                    config.port,
                )
            return None
        keys = KeyFile(Path(config.api_keys), on_reload=self.metrics.keys_reloaded)
        log.info("%d API keys of %s", len(keys), config.api_keys)
        return keys

    def _listener(self, app: ASGIApp, sock: socket.socket) -> Listener:
        config = self._config
        limits = HttpLimits(
            max_header_bytes=config.max_header_bytes,
            header_timeout_s=config.header_timeout_s,
            body_timeout_s=config.body_timeout_s,
            max_connections=self._max_connections,
            drain_grace_s=config.drain_grace_s,
        )
        tls = None if self._certificate is None else self._certificate.context
        return Listener(app, sock, limits, tls)


def _spare_the_collector() -> None:
    """What lives as long as the process is not looked at again, and a thousand open streams not at every turn."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 20)


async def _serve(config: GatewayConfig, public: socket.socket, ops: socket.socket) -> None:
    await Gateway(config).run(public, ops)


def main(argv: Sequence[str] | None = None) -> int:
    """0: drained and stopped. 2: cannot work as asked."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        configure_logging(config.log_level, config.log_format, add_ids)
        with contextlib.ExitStack() as stack:
            public = stack.enter_context(listen(config.host, config.port, share=config.share_port))
            ops = stack.enter_context(listen(config.ops_host, config.ops_port))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(config, public, ops))
    except (ValueError, OSError) as error:
        print(f"headstart gateway: {error}", file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
