"""The gateway as a process: its ports, its drain, and what it refuses to start with."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from server.config import GatewayConfig, parse
from tests.e2e.serving import free_ports
from tests.server.conftest import ANSWER
from tests.server.http.test_hosts import rebound
from tests.server.scripted_worker import ScriptedWorker, listening
from tests.server.sse_grammar import check_chat
from tests.server.test_app import chat, post
from tests.waiting import HANG_S
from worker.wire import TokenizerBundle


def mapped_files(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


class Process:
    def __init__(self, process: asyncio.subprocess.Process, port: int, ops_port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.ops = f"http://127.0.0.1:{ops_port}"

    async def get(self, url: str) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status, await response.text()

    async def until_ready(self) -> None:
        await until_ready(self.url, self.process)


async def until_ready(url: str, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(HANG_S), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url + "/health/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            assert process.returncode is None, "the gateway has ended"
            await asyncio.sleep(0.02)


@asynccontextmanager
async def gateway_process(*arguments: str, module: str = "server.gateway") -> AsyncIterator[Process]:
    port, ops_port = free_ports(2)
    ports = ("--port", str(port), "--ops-port", str(ops_port))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *ports, *arguments, stderr=asyncio.subprocess.PIPE
    )
    drained = asyncio.create_task(process.stderr.read())  # type: ignore[union-attr]
    try:
        yield Process(process, port, ops_port)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await drained


async def test_two_ports_from_a_static_worker(worker: ScriptedWorker) -> None:
    async with listening(worker.app()) as worker.url, gateway_process("--workers", worker.url) as gateway:
        await gateway.until_ready()
        worker.num_cached_tokens = 16
        _, _, raw = await post(gateway.url, chat(stream=True))
        assert check_chat(raw) == [ANSWER]
        status, metrics = await gateway.get(gateway.ops + "/metrics")
        assert status == 200
        assert 'headstart_requests_total{route="chat",status="200"} 1.0' in metrics
        _, workers = await gateway.get(gateway.ops + "/workers")
        assert [each["worker_id"] for each in json.loads(workers)["workers"]] == ["w0"]
        _, _, explained = await post(gateway.ops, chat(), "/route/explain")
        assert json.loads(explained)["choice"] == ["w0"]
        assert len(worker.received) == 1, "an explanation sends nothing"
        _, prefixes = await gateway.get(gateway.ops + "/prefixes?limit=3")
        assert [each["num_hits"] for each in json.loads(prefixes)["prefixes"]] == [1]
        assert (await gateway.get(gateway.ops + "/prefixes?limit=none"))[0] == 400
        for path in ("/metrics", "/workers", "/prefixes", "/route/explain", "/drain"):
            assert (await gateway.get(gateway.url + path))[0] == 404, "operations are not on the public port"
        maps = mapped_files(gateway.process.pid)
        assert "tokenizers" in maps
        assert "torch" not in maps


@pytest.mark.e2e
async def test_several_models_each_with_its_workers_and_its_namespace(
    bundle: TokenizerBundle, raw_tokenizer: Tokenizer
) -> None:
    """One prompt, two models, and a cache key that both requests carry: no worker, and no block, is shared."""
    reply = raw_tokenizer.encode(ANSWER).ids
    tiny = [ScriptedWorker(bundle, worker_id=f"tiny-{n}", reply=reply) for n in range(2)]
    other = ScriptedWorker(replace(bundle, model="other"), worker_id="other-0", reply=reply)
    async with AsyncExitStack() as stack:
        for worker in (*tiny, other):
            worker.url = await stack.enter_async_context(listening(worker.app()))
        urls = [worker.url for worker in (*tiny, other)]
        gateway = await stack.enter_async_context(gateway_process("--workers", *urls))
        await gateway.until_ready()
        ids: list[str] = []
        while len(ids) < 2:
            _, models = await gateway.get(gateway.url + "/v1/models")
            ids = sorted(model["id"] for model in json.loads(models)["data"])
        assert ids == ["other", "tiny"]
        for model in ("tiny", "other", "tiny", "other", "tiny", "other"):
            status, _, _ = await post(gateway.url, chat(model=model, prompt_cache_key="one"))
            assert status == 200
        assert sum(len(worker.received) for worker in tiny) == 3
        assert len(other.received) == 3
        roots = {request.root for worker in tiny for request in worker.received}
        assert len(roots) == 1
        assert roots.isdisjoint(request.root for request in other.received)
        status, _, raw = await post(gateway.url, chat(model="third"))
        error = json.loads(raw)["error"]
        assert (status, error["code"]) == (404, "model_not_found")
        listed = error["message"].partition("GET /v1/models lists: ")[2].removesuffix(".").split(", ")
        assert sorted(listed) == ["other", "tiny"]
        _, _, explained = await post(gateway.ops, chat(model="other"), "/route/explain")
        assert [worker["worker"] for worker in json.loads(explained)["workers"]] == ["other-0"]


async def test_a_model_is_not_denied_before_all_workers_have_answered(
    bundle: TokenizerBundle, raw_tokenizer: Tokenizer
) -> None:
    """Every listed worker may have the model."""
    first = ScriptedWorker(bundle, reply=raw_tokenizer.encode(ANSWER).ids)
    (port,) = free_ports(1)
    async with (
        listening(first.app()) as first.url,
        gateway_process("--workers", first.url, f"http://127.0.0.1:{port}") as gateway,
    ):
        await gateway.until_ready()
        status, headers, _ = await post(gateway.url, chat(model="later"))
        assert (status, headers["retry-after"]) == (503, "2")
        assert (await gateway.get(gateway.url + "/v1/models/later"))[0] == 503


async def test_sigterm_lets_open_streams_end(worker: ScriptedWorker) -> None:
    worker.pace_s = 0.05
    async with listening(worker.app()) as worker.url, gateway_process("--workers", worker.url) as gateway:
        await gateway.until_ready()
        async with (
            aiohttp.ClientSession() as session,
            session.post(gateway.url + "/v1/chat/completions", json=chat(stream=True)) as response,
        ):
            first = await response.content.readany()
            gateway.process.send_signal(signal.SIGTERM)
            assert check_chat(first + await response.read()) == [ANSWER]
        async with asyncio.timeout(HANG_S):
            assert await gateway.process.wait() == 0


async def test_gateways_share_a_port(worker: ScriptedWorker) -> None:
    """The kernel spreads connections; each has its own metrics; one drains without the other."""
    async with listening(worker.app()) as worker.url, AsyncExitStack() as stack:
        first = await stack.enter_async_context(gateway_process("--workers", worker.url, "--share-port"))
        await first.until_ready()
        again = ("--workers", worker.url, "--share-port", "--port", first.url.rpartition(":")[2])
        second = await stack.enter_async_context(gateway_process(*again))
        await until_ready(second.ops, second.process)
        assert [(await post(first.url, chat()))[0] for _ in range(32)] == [200] * 32
        assert len({request.gateway_id for request in worker.received}) == 2
        counts = []
        for gateway in (first, second):
            _, page = await gateway.get(gateway.ops + "/metrics")
            counts.append(float(page.split('requests_total{route="chat",status="200"} ')[1].split()[0]))
        assert sum(counts) == 32
        second.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(HANG_S):
            assert await second.process.wait() == 0
        assert [(await post(first.url, chat()))[0] for _ in range(8)] == [200] * 8


async def test_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "server.gateway", "--port", port, "--workers", "http://127.0.0.1:1"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"Address already in use" in errors


XARGS_OF_TRANSFERS = (
    *("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode", "KV_x"),
    *("", "a b", "n" * 65),
)


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"port": 70_000}, "--port"),
        ({"max_body_bytes": 0}, "--max-body"),
        ({"ping_s": 0.0}, "--ping-s"),
        ({"policy": "magic"}, "--policy"),
        ({"workers": ()}, "--workers"),
        ({"redis_shards": 0}, "--redis-shards"),
        ({"redis": "nowhere"}, "--redis: .* use redis://"),
        ({"redis": "redis://h:6379/first"}, "--redis: .* use redis://"),
        ({"redis": "redis://h", "redis_prefix": "{x}"}, "--redis-prefix"),
        ({"tls_cert": "x"}, "--tls-key"),
        ({"tls_key": "x"}, "--tls-cert"),
        ({"worker_tls_name": "x"}, "--worker-ca"),
        ({"worker_ca": "x"}, "https://"),
        ({"max_connections": 0}, "--max-connections"),
        *(({"ops_hosts": ("ok.example", name)}, "--ops-hosts") for name in ("http://x", "x:80", "", "a b", "[::1]")),
        *(({"engine_xargs": frozenset({name})}, "--engine-xargs") for name in XARGS_OF_TRANSFERS),
    ],
)
def test_bad_options_are_named(fields: dict[str, Any], option: str) -> None:
    with pytest.raises(ValueError, match=option):
        GatewayConfig(**{"workers": ("http://w",), **fields})


def test_the_command_line() -> None:
    arguments = (
        "--workers http://a http://b --workers dns:w:1 --max-body 1M --alias x=y --alias z=y --policy round_robin"
    )
    config = parse(arguments.split())
    assert config.workers == ("http://a", "http://b", "dns:w:1")
    assert config.max_body_bytes == 1 << 20
    assert dict(config.aliases) == {"x": "y", "z": "y"}
    assert config.policy == "round_robin"


def test_the_cluster_secret_comes_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"s3cret\n")
    assert GatewayConfig(workers=("http://w",), cluster_secret_file=str(file)).cluster_secret() == b"s3cret"
    assert "HEADSTART_CLUSTER_SECRET" not in os.environ


async def test_dns_rebinding_drains_nothing(worker: ScriptedWorker) -> None:
    more = ("--ops-hosts", "ops.example,gateway")
    async with listening(worker.app()) as worker.url, gateway_process("--workers", worker.url, *more) as gateway:
        await gateway.until_ready()
        port = gateway.ops.rpartition(":")[2]
        assert await rebound(gateway.ops, f"evil.example:{port}") == 403
        for host in ("evil.example", "10.0.0.1", f"localhost.evil.example:{port}"):
            async with aiohttp.ClientSession() as session:
                for path in ("/metrics", "/health/live", "/chat/api/v1/models", "/dashboard"):
                    async with session.get(gateway.ops + path, headers={"host": host}) as response:
                        assert response.status == 403, path
                        assert "--ops-hosts" in await response.text()
        for host in (f"localhost:{port}", "ops.example", "GATEWAY:80", f"127.0.0.1:{port}"):
            async with (
                aiohttp.ClientSession() as session,
                session.get(gateway.ops + "/metrics", headers={"host": host}) as response,
            ):
                assert response.status == 200
        assert (await gateway.get(gateway.url + "/health/ready"))[0] == 200, "it was not drained"
        assert await rebound(gateway.ops, "gateway") == 200


@pytest.mark.e2e
async def test_explaining_a_tenants_cache_needs_the_ops_key(worker: ScriptedWorker, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    wide = ("--ops-host", "0.0.0.0")

    async def explain(gateway: Process, path: str, **headers: str) -> int:
        return (await post(gateway.ops, chat(), path, **headers))[0]

    async with listening(worker.app()) as worker.url:
        async with gateway_process("--workers", worker.url, *wide, "--ops-key-file", str(key)) as gateway:
            await gateway.until_ready()
            assert await explain(gateway, "/route/explain?tenant=alice") == 401
            assert await explain(gateway, "/route/explain?tenant=alice", authorization="Bearer secret") == 200
            assert await explain(gateway, "/route/explain") == 200
        async with gateway_process("--workers", worker.url, *wide) as gateway:
            await gateway.until_ready()
            assert await explain(gateway, "/route/explain?%74enant=alice") == 403
        async with gateway_process("--workers", worker.url) as gateway:
            await gateway.until_ready()
            assert await explain(gateway, "/route/explain?tenant=alice") == 200, "this machine alone reaches it"
        async with gateway_process("--workers", worker.url, "--ops-key-file", str(key)) as gateway:
            await gateway.until_ready()
            assert await explain(gateway, "/route/explain?tenant=alice") == 401
            assert await explain(gateway, "/route/explain?tenant=alice", authorization="Bearer secret") == 200
