"""The worker process: listens at once, loads the model, serves, and drains on SIGTERM.

Progress goes to stderr, one line a step. Stdout has one JSON object a line, for the process that started the worker:
{"event": "listening", "url": ...} and {"event": "ready", "url": ..., "worker_id": ..., "epoch": ..., "model": ...,
"route": the route of its requests, "slower": why it runs without compiled kernels, or ""}.
Exit status: 0 after a drain, 1 when the engine died, 2 when the worker cannot serve with these options.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

import uvicorn

from cache.records import WorkerMember
from cache.redis_index import WriterSettings, check_key_part
from worker.common.capabilities import CHAT, GENERATING
from worker.common.checks import missing_extra
from worker.common.connection_limit import ConnectionLimit
from worker.common.cores import bound_spinning
from worker.common.http_protocol import StrictProtocol
from worker.common.listener import Listener
from worker.common.logs import configure_logging
from worker.common.proof import gateway_token
from worker.common.sockets import allow_files, is_loopback, listen, reachable
from worker.common.tls import TlsFiles
from worker.common.tracing import Tracing, open_tracing
from worker.common.watchdog import watched
from worker.config import WorkerConfig, parse
from worker.contracts.engine import Engine, EngineDeadError
from worker.contracts.metrics import WorkerMetrics
from worker.http.app import make_app
from worker.http.service import WorkerService
from worker.http.streams import QueueLimits
from worker.kv_transfer.mover import HANDOVER_S, hand_over, has_purged, warm_start
from worker.publishing.inbox import PublisherInbox
from worker.publishing.publisher import Publisher
from worker.wire import POOLING_PATHS

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HANDSHAKE_S: Final = 10.0
_MIN_CONNECTIONS: Final = 16
_SPARE_FILES: Final = 256
"""Files that are no connections of a gateway or to an engine."""
_SHUTDOWN_S: Final = 2  # for uvicorn's connections, whose requests have ended before
_RETIRE_S: Final = 1.0  # without Redis the lease ends by itself
_CONNECT_S: Final = 1.0
"""Time for Redis to answer a worker that joins. Without it the worker starts cold."""
_REFUSED: Final = 2  # the exit status of wrong usage
_MAX_FILES: Final = 1 << 14  # each request has a connection to its gateway, and an adapter's has one to the engine


def main(argv: Sequence[str]) -> int:
    """Run a worker with these options. Return the exit status."""
    try:
        config = parse(argv)
        certificate, ca = config.certificate(), config.workers_ca()
        tracing = open_tracing("headstart-worker", config.otlp_endpoint, config.worker_id or socket.gethostname())
    except ValueError as error:
        print(f"headstart worker: {error}", file=sys.stderr)
        return _REFUSED
    configure_logging(config.log_level, config.log_format)
    bound_spinning()
    allow_files(_MAX_FILES)
    try:
        with asyncio.Runner(loop_factory=_loop_factory(config)) as runner, watched(runner.get_loop(), "worker"):
            status = runner.run(Worker(config, tracing, certificate, ca).run())
    finally:
        if tracing is not None:
            tracing.close()
    if any(thread.daemon for thread in threading.enumerate()):
        _exit_at_once(status)
    return status


def _exit_at_once(status: int) -> None:
    """End the process without the interpreter's end, which would abort under the C++ frames of a daemon thread."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def _loop_factory(config: WorkerConfig) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's for an adapter, which works in the event loop. The built-in engine has a thread."""
    if config.engine == "headstart":
        return None
    import uvloop

    return uvloop.new_event_loop


class Worker:
    """Owns the parts of the process, from the socket to the engine."""

    def __init__(
        self,
        config: WorkerConfig,
        tracing: Tracing | None = None,
        certificate: TlsFiles | None = None,
        ca: TlsFiles | None = None,
    ) -> None:
        self._config = config
        self._certificate = certificate
        self._ca = ca
        self._metrics = WorkerMetrics()
        limits = QueueLimits(config.max_waiting_requests, config.max_queued_tokens, config.max_queue_s)
        self._service = WorkerService(self._metrics, tracing, limits, self._index_problem)
        self._stop = asyncio.Event()
        self._status = 0
        """The exit status: 0 until something fails."""
        self._engine: Engine | None = None
        self._publisher: Publisher | None = None

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, or until the engine dies. Return the exit status."""
        try:
            sock = listen(self._config.host, self._config.port, probe_s=(5, 2))
            port, scheme = sock.getsockname()[1], "http" if self._certificate is None else "https"
            if not (url := self._config.advertise_url):
                host = reachable(self._config.host)
                url = f"{scheme}://{host}:{port}"
                if is_loopback(host) and not is_loopback(self._config.host):
                    _say(f"only gateways on this machine can reach {url}: give --advertise-url to be reached by others")
            num_files = allow_files(_MAX_FILES)
            limit = ConnectionLimit(max(_MIN_CONNECTIONS, (num_files - _SPARE_FILES) // 2))  # an engine's need as many
            server = Listener(self._uvicorn_config(url), limit, _HANDSHAKE_S)
        except (OSError, ValueError) as error:
            _say(str(error))
            return _REFUSED
        loop = asyncio.get_running_loop()
        self._metrics.tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        serving = asyncio.create_task(server.serve(sockets=[sock]), name="http")
        worker_id = self._config.worker_id or f"{socket.gethostname()}-{port}"
        life = asyncio.create_task(self._live(url, worker_id), name="worker")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        await asyncio.wait((serving, life, stop), return_when=asyncio.FIRST_COMPLETED)
        await _cancelled(stop)
        if life.done():
            self._status = _status_of(life)
        await self._shut_down()
        await _cancelled(life)
        server.should_exit = True
        await serving
        if self._engine is not None:
            await self._engine.close()
        return self._status

    def _uvicorn_config(self, url: str) -> uvicorn.Config:
        token = gateway_token(self._config.cluster_secret())
        config = uvicorn.Config(
            make_app(self._service, token, self._config.host, self._config.advertise_url, url),
            http=StrictProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=120,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        config.load()
        config.ssl = None if self._certificate is None else self._certificate.context
        return config

    async def _live(self, url: str, worker_id: str) -> int:
        """Load, then publish and watch the engine until cancelled. Return _REFUSED if the model cannot be served."""
        _announce(event="listening", url=url)
        try:
            engine = self._engine = await self._load(url, worker_id)
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            logger.debug("loading failed", exc_info=error)
            reason = missing_extra(error) if isinstance(error, ImportError) else error
            _say(f"cannot serve {self._config.engine_url or self._config.model or 'the default model'}: {reason}")
            return _REFUSED
        # The collector leaves out what is loaded: a pass over its 750,000 objects stalls the streams for 0.35 s.
        gc.collect()
        gc.freeze()
        self._service.start(engine)
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.supervise())
            if self._publisher is None:
                self._say_ready(engine.member)
            else:
                group.create_task(self._publisher.run(partial(self._join, engine, self._publisher)))
            for files in (self._certificate, self._ca):
                if files is not None:
                    group.create_task(files.follow())
        return 0

    async def _join(self, engine: Engine, publisher: Publisher) -> None:
        """Get what peers used last, before the registry names this worker. Without them it starts cold."""
        time_s, exchange = self._config.warm_start_s, engine.exchange
        if time_s and exchange is not None and await publisher.wait_connected(_CONNECT_S):
            try:
                fetched = await warm_start(engine.member, exchange, await publisher.upkeep.workers(), time_s)
                if has_purged(fetched, await publisher.upkeep.workers()):
                    await asyncio.wrap_future(engine.purge())
            except EngineDeadError as error:
                logger.warning("no warm start: %s", error)
        self._say_ready(engine.member)

    def _say_ready(self, member: WorkerMember) -> None:
        _say(f"ready: {member.model} on {member.url}, {member.numerics}")
        facts = {"worker_id": member.worker_id, "epoch": member.epoch, "model": member.model, "route": _route(member)}
        _announce(event="ready", url=member.url, **facts, slower=_slower(self._config))

    async def _load(self, url: str, worker_id: str) -> Engine:
        """Build the engine and its publisher. Raises ValueError, OSError, RuntimeError or ImportError."""

        config, inbox = self._config, None
        if config.redis is not None:
            check_key_part("--worker-id", worker_id)
            inbox = PublisherInbox()
        settings = config.index_settings(WriterSettings)
        sinks = self._service.sinks(self._on_engine_death, inbox)
        tls = None if self._ca is None else self._ca.context

        def build() -> Engine:
            from worker.loading.engine import (
                build_engine,  # torch takes seconds to import: the port answers in that time
            )

            return build_engine(config, url, worker_id, self._metrics, self._report, tls, sinks)

        if config.engine == "headstart":
            engine = await in_daemon_thread(build)
        else:
            from worker.adapter.connect import connect  # the built-in engine needs none of its libraries

            engine = await connect(config, url, worker_id, self._metrics, self._report, sinks)
        if config.redis is not None and inbox is not None:
            self._publisher = self._make_publisher(config.redis, engine.member, inbox, settings)
        return engine

    def _make_publisher(
        self, redis: str, member: WorkerMember, inbox: PublisherInbox, settings: WriterSettings
    ) -> Publisher:
        def count(event: str) -> None:
            self._metrics.index_events.labels(event).inc()

        publisher = Publisher(redis, member, inbox, writer_settings=settings, count=count)
        self._metrics.index_connected.set_function(lambda: publisher.connected)
        self._metrics.index_entries.set_function(lambda: publisher.num_held)
        return publisher

    def _index_problem(self) -> str | None:
        if self._publisher is None or self._engine is None:
            return None
        return self._publisher.problem or self._engine.index_problem

    async def _shut_down(self) -> None:
        """Drain within the grace, hand blocks over, and leave the registry. A second signal ends the wait."""
        self._stop.clear()
        self._service.drain()
        drained = asyncio.create_task(self._service.finish_drain(self._config.drain_grace_s))
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait((drained, stopped), return_when=asyncio.FIRST_COMPLETED)
        await _cancelled(drained)
        handover = asyncio.create_task(self._hand_over())
        await asyncio.wait((handover, stopped), timeout=HANDOVER_S, return_when=asyncio.FIRST_COMPLETED)
        await _cancelled(handover, stopped)
        if self._publisher is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._publisher.close(), _RETIRE_S)

    async def _hand_over(self) -> None:
        """Offer blocks to peers. Without them, peers compute these blocks."""
        if self._publisher is None or self._engine is None or self._engine.exchange is None or self._status:
            return
        try:
            upkeep = self._publisher.upkeep
            await hand_over(self._engine.member, self._engine.exchange, await upkeep.workers(), upkeep.held)
        except EngineDeadError as error:
            logger.warning("no hand-over: %s", error)

    def _on_engine_death(self) -> None:
        """End the process, so that its supervisor starts a new worker."""
        self._status = 1
        self._stop.set()

    def _report(self, progress: str) -> None:
        self._service.progress = progress
        _say(progress)


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Run `function` as asyncio.to_thread does, but on a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await asyncio.wrap_future(future)


def _status_of(life: asyncio.Task[int]) -> int:
    """Return the exit status of a worker whose life has ended."""
    if (error := life.exception()) is not None:
        logger.error("the worker failed", exc_info=error)
        return 1
    return life.result()


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"headstart worker: {text}", file=sys.stderr, flush=True)


def _slower(config: WorkerConfig) -> str:
    """Return why the model, which is loaded, runs slower than it could on this processor."""
    if config.engine != "headstart":
        return ""
    from worker.kernels.cpu import problem  # imports torch, which is loaded by now

    return problem() or ""


def _route(member: WorkerMember) -> str:
    """Return the gateway's route for requests to this worker."""
    if not GENERATING.isdisjoint(member.capabilities):
        return CHAT
    return next((path for path in POOLING_PATHS if path in member.capabilities), POOLING_PATHS[0])


def _announce(**fields: str) -> None:
    with contextlib.suppress(OSError):
        print(json.dumps(fields), flush=True)
