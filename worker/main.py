"""The worker process: listen at once, load the model, serve, drain on SIGTERM.

Progress goes to stderr, one line a step; stdout gets one JSON object a line for whoever started the worker:
{"event": "listening", "url": ...} and {"event": "ready", "url": ..., "worker_id": ..., "epoch": ..., "model": ...}.
Exit status: 0 after a drain, 1 when the engine died, 2 when the worker cannot work as it was asked to.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, TypeVar

import uvicorn

from cache.redis_index import check_key_part
from worker.common.logs import configure_logging
from worker.common.sockets import listen, reachable
from worker.common.tls import ServerCertificate
from worker.common.tracing import Tracing, open_tracing
from worker.config import WorkerConfig, parse
from worker.engine.engine import Engine, EngineParts
from worker.engine.load_report import LoadReport
from worker.engine.metrics import WorkerMetrics
from worker.engine.publisher import Publisher
from worker.grammar import GrammarCompiler
from worker.http.app import make_app
from worker.http.service import ServingParts, WorkerService
from worker.http.streams import Streams
from worker.http.waiting import Waiting
from worker.wire import gateway_token

if TYPE_CHECKING:
    from worker.loader import Assembly

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHUTDOWN_S: Final = 2
_RETIRE_S: Final = 1.0
_REFUSED: Final = 2


def main(argv: Sequence[str]) -> int:
    try:
        config = parse(argv)
        certificate = config.certificate()
        tracing = open_tracing("headstart-worker", config.otlp_endpoint, config.worker_id or socket.gethostname())
    except ValueError as error:
        print(f"headstart worker: {error}", file=sys.stderr)
        return _REFUSED
    configure_logging(config.log_level, config.log_format)
    try:
        status = asyncio.run(Worker(config, tracing, certificate).run())
    finally:
        if tracing is not None:
            tracing.close()
    if any(thread.daemon for thread in threading.enumerate()):
        # It loads, or hangs in a step. The interpreter would end it under frames of C++, which aborts the process.
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)
    return status


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the worker drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Worker:
    """Owner of the process' parts, from the socket to the engine's thread."""

    def __init__(
        self, config: WorkerConfig, tracing: Tracing | None = None, certificate: ServerCertificate | None = None
    ) -> None:
        self._config = config
        self._certificate = certificate
        self._service = WorkerService(WorkerMetrics(), tracing)
        self._stop = asyncio.Event()
        self._exit_code = 0
        self._engine: Engine | None = None
        self._publisher: Publisher | None = None

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, or until the engine dies; the exit status."""
        try:
            sock = listen(self._config.host, self._config.port, probe_idle_s=5, probe_every_s=2)
        except OSError as error:
            _say(str(error))
            return _REFUSED
        loop = asyncio.get_running_loop()
        self._service.metrics.follow_tasks(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        server = _Server(self._uvicorn_config())
        serving = asyncio.create_task(server.serve(sockets=[sock]), name="http")
        life = asyncio.create_task(self._live(sock), name="worker")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        await asyncio.wait((serving, life, stop), return_when=asyncio.FIRST_COMPLETED)
        await _cancelled(stop)
        if life.done() and life.exception() is not None:
            logger.error("the worker failed", exc_info=life.exception())
            self._exit_code = 1
        await self._shut_down()
        await _cancelled(life)
        server.should_exit = True
        await serving
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
        return self._exit_code

    def _uvicorn_config(self) -> uvicorn.Config:
        token = gateway_token(self._config.cluster_secret())
        config = uvicorn.Config(
            make_app(self._service, token, self._config.host, self._config.advertise_url),
            http="h11",
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

    async def _live(self, sock: socket.socket) -> None:
        """Load, then publish and watch the engine until cancelled. Returns when there is nothing to serve."""
        port = sock.getsockname()[1]
        scheme = "http" if self._certificate is None else "https"
        url = self._config.advertise_url or f"{scheme}://{reachable(self._config.host)}:{port}"
        worker_id = self._config.worker_id or f"{socket.gethostname()}-{port}"
        _announce(event="listening", url=url)
        try:
            engine = await self._start(url, worker_id)
        except _StartError as error:
            _say(str(error))
            self._exit_code = _REFUSED
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(watch_for_hangs(engine, self._config.max_step_s))
            if self._publisher is not None:
                group.create_task(self._publisher.run())
            if self._certificate is not None:
                group.create_task(self._certificate.follow())

    async def _start(self, url: str, worker_id: str) -> Engine:
        """Everything from the weights to the first request. Raises _StartError."""

        def load() -> Assembly:
            from worker.loader import assemble  # torch takes seconds to import: the port answers meanwhile

            return assemble(self._config, url, worker_id, self._report)

        try:
            if self._config.redis is not None:
                check_key_part("--worker-id", worker_id)
            settings = self._config.writer_settings()
            assembly = await in_daemon_thread(load)
        except (ValueError, OSError, RuntimeError) as error:
            logger.debug("loading failed", exc_info=error)
            raise _StartError(f"cannot serve {self._config.model or 'the default model'}: {error}") from error
        loop = asyncio.get_running_loop()
        streams = Streams(loop, Waiting(assembly.limits))

        def die(error: BaseException) -> None:
            loop.call_soon_threadsafe(self._die)

        member = assembly.member
        if self._config.redis is not None:
            metrics = self._service.metrics
            self._publisher = publisher = Publisher(
                self._config.redis,
                member,
                writer_settings=settings,
                count=lambda event: metrics.index_events.labels(event).inc(),
            )
            metrics.follow_index(lambda: publisher.connected, lambda: publisher.num_held)
            self._service.index_problem = lambda: publisher.problem
        self._engine = engine = Engine(
            EngineParts(
                scheduler=assembly.scheduler,
                runner=assembly.runner,
                load_report=LoadReport(assembly.rate),
                metrics=self._service.metrics,
                member=member,
                deliver=streams.deliver,
                on_death=die,
                listener=self._publisher,
                launch_ahead=self._config.launch_ahead,
            )
        )
        # What is loaded by now stays: 750,000 objects, over which a pass of the collector takes 0.35 s, in mid-stream.
        gc.collect()
        gc.freeze()
        engine.start()
        pool_tokens = (assembly.scheduler.allocator.num_blocks - 1) * member.block_size
        self._service.serve(
            ServingParts(
                engine=engine,
                streams=streams,
                limits=assembly.limits,
                bundle=assembly.bundle,
                grammars=GrammarCompiler(assembly.bundle),
                pool_tokens=pool_tokens,
                max_step_s=self._config.max_step_s,
            )
        )
        _say(f"ready: {member.model} on {url}, {member.numerics}")
        _announce(event="ready", url=url, worker_id=worker_id, epoch=member.epoch, model=member.model)
        return engine

    async def _shut_down(self) -> None:
        """Drain within the grace and leave the registry. A second signal ends the waiting."""
        self._stop.clear()
        self._service.drain()
        drained = asyncio.create_task(self._service.drained(self._config.drain_grace_s))
        hurried = asyncio.create_task(self._stop.wait())
        await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
        await _cancelled(drained)
        await _cancelled(hurried)
        if self._publisher is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETIRE_S):
                    await self._publisher.close()

    def _die(self) -> None:
        """The engine is dead: exit, so that whoever supervises starts a new worker."""
        self._service.bury()
        self._exit_code = 1
        self._stop.set()

    def _report(self, progress: str) -> None:
        self._service.progress = progress
        _say(progress)


async def watch_for_hangs(engine: Engine, max_step_s: float, tick_s: float = 1.0) -> None:
    """End the process when one step lasts `max_step_s`: its thread cannot be ended, and clients must hear of it.

    Counted in ticks of this loop, so that a process that was stopped and continued is not taken for a hung one.
    """
    step_started_s, num_ticks = None, 0
    while True:
        await asyncio.sleep(tick_s)
        same = engine.step_started_s is not None and engine.step_started_s == step_started_s
        num_ticks = num_ticks + 1 if same else 0
        step_started_s = engine.step_started_s
        if num_ticks * tick_s > max_step_s:
            logger.critical("a step has been running for %.0f s: the worker ends", num_ticks * tick_s)
            os._exit(1)


class _StartError(Exception):
    """The model cannot be served as it was asked for."""


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """As asyncio.to_thread, but the process may end while the function still runs."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await asyncio.wrap_future(future)


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"headstart worker: {text}", file=sys.stderr, flush=True)


def _announce(**fields: str) -> None:
    with contextlib.suppress(OSError):
        print(json.dumps(fields), flush=True)
