"""Two real vLLM engines with their adapters, Redis and one gateway with the keys of two tenants."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import msgpack
import psutil

from server.auth.identity import digest_text
from tests.e2e.serving import free_ports
from tests.faults.part import ROOT, Gateway, Part, Worker, get, metrics
from tests.redis_server import RedisServer, newest_redis
from tests.server.sse_grammar import events
from tests.stopwatch import Stopwatch
from tests.vllm import replay
from tests.vllm.engines import MODEL, START_S, Engine, Options
from tests.waiting import HANG_S, wait_until

LONG_S: Final = 5 * HANG_S
"""Bound of one answer: two engines share the cores with whatever else runs."""
TENANTS: Final = {"red": "red-key", "blue": "blue-key"}
BLOCK_SIZE: Final = 32
"""Tokens in a block of the engines."""
OWN_BLOCK_SIZE: Final = 16
"""Tokens in a block of the adapters."""
NUM_BLOCKS: Final = 64
WITH_HERMES: Final = Options(
    num_blocks=NUM_BLOCKS,
    max_model_len=1024,
    niceness=5,
    args=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


class Adapter(Part):
    """`headstart worker --engine vllm`."""

    def __init__(self, name: str, port: int, log: Path, engine: Engine, redis: str, *args: str) -> None:
        super().__init__(name, port, log)
        self.engine = engine
        self.args = ["--worker-id", name, "--port", str(port), "--redis", redis, *args]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "worker", "--engine", "vllm", "--engine-url", self.engine.url, *self.args]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return 0 if self._process is None else self._process.poll()

    def is_ready(self) -> bool:
        return bool(get(f"{self.url}/health/ready"))

    def held(self) -> int:
        """Return how many blocks of its engine count as held."""
        return int(json.loads(get(f"{self.url}/debug/state"))["blocks"]["held"])

    def num_requests(self) -> int:
        """Return how many requests are open at its engine. The engine's own gauges may come seconds later."""
        return int(json.loads(get(f"{self.url}/debug/state"))["num_requests"])

    def published(self) -> int:
        """Return how many of its blocks are in the index."""
        return int(metrics(self.url)["headstart_worker_index_entries"])

    def epoch(self) -> str:
        """Return the epoch in which it publishes."""
        found: str = msgpack.unpackb(get(f"{self.url}/state"))["member"]["epoch"]
        return found

    def counted(self, event: str) -> int:
        """Return how often it has seen this of the engine's events."""
        return int(metrics(self.url).get(f"headstart_worker_index_events_total{{engine_{event}}}", 0))

    def is_whole(self) -> bool:
        """Return whether it publishes exactly the blocks that its engine holds."""
        truth = replay.held(self.engine.options.replay, OWN_BLOCK_SIZE)
        return (self.held(), self.published()) == truth

    def settle(self) -> None:
        """Wait until it publishes all that its engine has computed. Events come in order: this call's are last."""
        salt = secrets.token_hex(16)
        ask(self.engine, "tick " * 2 * BLOCK_SIZE, salt)

        def has_shown() -> bool:
            return any(salt.encode() in batch for batch in replay.batches(self.engine.options.replay))

        wait_until(has_shown, what="the engine has published its events")
        wait_until(self.is_whole, what="the index is whole")

    def purge(self) -> str:
        """Empty the engine's cache; return the new epoch."""
        answer = httpx.post(f"{self.url}/purge", timeout=HANG_S)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["epoch"])


class VllmFleet:
    """A context manager; ready when entered, gone when left. Engine and adapter of one number go together.

    The first adapter uses the engine's advertised endpoint; the last one gets it by options.
    """

    def __init__(
        self, folder: Path, num_engines: int = 2, base: Options = WITH_HERMES, gateway_args: Sequence[str] = ()
    ) -> None:
        """`base`: the options of the engines, without their endpoints. `gateway_args`: more options of the gateway."""
        binary = newest_redis()
        ports = iter(free_ports(5 * num_engines + 5))
        self.folder = folder
        redis_port = next(ports)
        self.redis = RedisServer(folder, binary, "--port", str(redis_port))
        redis = f"redis://127.0.0.1:{redis_port}"
        self.engines: list[Engine] = []
        self.adapters: list[Adapter] = []
        for number in range(num_engines):
            ends = [f"tcp://127.0.0.1:{next(ports)}" for _ in range(2)]
            engine = Engine(folder, replace(base, events=ends[0], replay=ends[1]), f"e{number}")
            args: list[str] = []
            if number == num_engines - 1:
                args = ["--events", engine.options.events, "--events-replay", engine.options.replay]
            self.engines.append(engine)
            self.adapters.append(Adapter(f"w{number}", next(ports), folder / f"w{number}.log", engine, redis, *args))
        keys = folder / "keys.toml"
        entries = [
            f'[[keys]]\ntenant = "{tenant}"\ndigest = "{digest_text(key.encode())}"\nmay_prioritise = true\n'
            for tenant, key in TENANTS.items()
        ]
        keys.write_text("".join(entries))
        args = ["--redis", redis, "--api-keys", str(keys), *gateway_args]
        self.gateway = Gateway("g0", next(ports), next(ports), folder / "g0.log", args)
        self._client = httpx.Client(base_url=self.gateway.url, timeout=LONG_S)

    def __enter__(self) -> VllmFleet:
        try:
            self.redis.start()
            for part in (*self.engines, *self.adapters, self.gateway):
                part.start()
            with ThreadPoolExecutor(len(self.engines)) as pool:
                list(pool.map(Engine.wait_ready, self.engines))
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        for part in (self.gateway, *self.adapters, *self.engines):
            part.stop()
        self.redis.kill()

    def stopwatch(self) -> Stopwatch:
        parts = (self.gateway, *self.adapters, *self.engines)
        return Stopwatch(lambda: [*(pid for part in parts for pid in family(part)), *self.redis.pids])

    def wait_ready(self) -> None:
        """Wait until every adapter serves and is ready at the gateway."""

        def ready() -> bool:
            for adapter in self.adapters:
                if adapter.poll() is not None:  # a supervisor starts it again after its engine
                    adapter.start()
            return all(a.is_ready() for a in self.adapters) and self.gateway.num_ready() == len(self.adapters)

        wait_until(ready, START_S, "the fleet is ready")

    def wait_idle(self) -> None:
        """Wait until no engine counts a running request. An engine's gauge comes after its answers."""
        wait_until(lambda: not any(map(running, self.engines)), what="the engines are idle")

    def adapter_of(self, answer: httpx.Response) -> Adapter:
        """Return the adapter that has served an answer."""
        name = answer.headers["x-headstart-worker"]
        return next(adapter for adapter in self.adapters if adapter.name == name)

    def headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {TENANTS[tenant]}"}

    def post(self, path: str, body: dict[str, Any], *, tenant: str = "red") -> httpx.Response:
        """Return the answer to a request, whatever its status."""
        return self._client.post(path, json={"model": MODEL} | body, headers=self.headers(tenant))

    def complete(self, body: dict[str, Any], *, tenant: str = "red") -> httpx.Response:
        """Ask for a chat if there are messages, else for a completion, greedy unless the body sets a temperature."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = self.post(path, {"temperature": 0, "max_tokens": 8} | body, tenant=tenant)
        assert answer.status_code == 200, (answer.status_code, answer.text, self.gateway.tail())
        return answer

    def matched(self, body: dict[str, Any], adapter: Adapter, *, tenant: str = "red") -> int:
        """Return how many tokens of this prompt are promised at an adapter; 0 for one that no request goes to."""
        return int(self._explained(body, adapter, tenant).get("matched_tokens", 0))

    def indexed(self, body: dict[str, Any], adapter: Adapter, *, tenant: str = "red") -> int:
        """Return how many of them are in the index, without those of requests that are ending."""
        return int(self._explained(body, adapter, tenant).get("index_tokens", 0))

    def knows_epoch(self, body: dict[str, Any], adapter: Adapter) -> bool:
        """Return whether the gateway routes to the epoch in which the adapter publishes.

        A lookup that finds a new epoch still has the old one: the gateway then reads the registry.
        """
        return bool(self._explained(body, adapter, "red").get("epoch") == adapter.epoch())

    def _explained(self, body: dict[str, Any], adapter: Adapter, tenant: str) -> dict[str, Any]:
        answer = self._client.post(
            f"{self.gateway.ops_url}/route/explain", params={"tenant": tenant}, json={"model": MODEL} | body
        )
        assert answer.status_code == 200, answer.text
        return next((worker for worker in answer.json()["workers"] if worker["worker"] == adapter.name), {})


@contextmanager
def models_behind_a_gateway(
    folder: Path, engines: Mapping[str, Options], worker_args: Sequence[str] = ()
) -> Iterator[tuple[Gateway, dict[str, Adapter]]]:
    """Run an engine and its adapter for each model, by name, and a gateway. `worker_args`: also a built-in worker."""
    ports = iter(free_ports(4 + 3 * len(engines)))
    server = RedisServer(folder, newest_redis(), "--port", str(redis_port := next(ports)))
    redis = f"redis://127.0.0.1:{redis_port}"
    adapters: dict[str, Adapter] = {}
    for name, options in engines.items():
        ends = [f"tcp://127.0.0.1:{next(ports)}" for _ in range(2)]
        engine = Engine(folder, replace(options, events=ends[0], replay=ends[1], name=name), f"e-{name}")
        adapters[name] = Adapter(f"w-{name}", next(ports), folder / f"w-{name}.log", engine, redis)
    gateway = Gateway("g0", next(ports), next(ports), folder / "g0.log", ["--redis", redis])
    parts: list[Part] = [adapter.engine for adapter in adapters.values()]
    parts += [*adapters.values(), gateway]
    if worker_args:
        parts.append(Worker("w-own", next(ports), folder / "w-own.log", [*worker_args, "--redis", redis], None))
    with ExitStack() as stack:
        stack.callback(server.kill)
        server.start()
        for part in parts:
            stack.callback(part.stop)
            part.start()
        with ThreadPoolExecutor() as pool:
            list(pool.map(Engine.wait_ready, [adapter.engine for adapter in adapters.values()]))
        num_workers = len(adapters) + bool(worker_args)
        wait_until(lambda: gateway.num_ready() == num_workers, START_S, "the gateway has all models")
        yield gateway, adapters


def ask(engine: Engine, prompt: str, salt: str = "") -> None:
    """Compute a prompt at an engine, past gateway and adapter, under a root of its own."""
    body = {"model": engine.options.name, "prompt": prompt, "max_tokens": 1}
    engine.request("/v1/completions", body | {"cache_salt": salt or secrets.token_hex(16)}, timeout_s=LONG_S)


def family(part: Part) -> list[int]:
    """Return the processes of a part."""
    try:
        return [part.pid, *(child.pid for child in part.process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def hits(engine: Engine) -> int:
    """Return how many prompt tokens the engine has found cached, by its own counter."""
    return int(engine.metrics()[f"vllm:prefix_cache_hits_total{{0,{MODEL}}}"])


def running(engine: Engine) -> int:
    """Return how many requests the engine reports."""
    samples = engine.metrics()
    return int(sum(samples[f"vllm:num_requests_{state}{{0,{MODEL}}}"] for state in ("running", "waiting")))


def promised(answer: httpx.Response) -> int:
    """Return the promise in the headers of a stream, which precede the engine's own count."""
    return int(answer.headers["x-headstart-cached-tokens"])


def found(answer: httpx.Response) -> int:
    """Return the cached tokens in the usage, which are those that the engine has found."""
    usage = events(answer.content)[-2]["usage"] if answer.content.startswith(b"data:") else answer.json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])
