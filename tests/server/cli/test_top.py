"""`headstart top`: pictures of a view, and the command against a real gateway process."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import sys
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from server import cli
from server.cli import doctor
from server.cli.common import CommandError, ops_url
from server.cli.index import parser as index_parser
from server.cli.top import View, events, parser, picture
from tests.server.cli.commands import status_of
from tests.server.conftest import ANSWER
from tests.server.scripted_worker import ScriptedWorker, listening
from tests.server.test_app import chat, post
from tests.server.test_gateway import gateway_process
from tests.waiting import HANG_S
from worker.wire import TokenizerBundle

TRAFFIC = {
    "prompt_tokens": 111.0,
    "hit_rate": 0.43,
    "ttft_p50_s": 0.75,
    "ttft_p95_s": 0.975,
    "output_tokens_per_s": 12.0,
    "in_flight": 3,
    "decisions_per_s": 200.0,
}
INDEX = {"blind": False, "reason": "", "precision": 1.0, "recall": 0.9, "num_requests": 200}
SHARD = {"redis": "redis://here", "connected": True, "breaker_open": False}


def worker(name: str, state: str = "serving") -> dict[str, Any]:
    load = {"running": 2, "waiting": 1, "queued_s": 0.25, "prefill_tokens_per_s": 105.0, "blocks": 100}
    load |= {"free_blocks": 40, "age_s": 0.0}
    lost = state == "dead"
    return {"worker": name, "model": "m", "state": state, "hit_rate": 0.5, "lease_left_s": 4.2} | {
        "load": None if lost else load,
        "published_blocks": 70,
    }


def decision(request: str, worker: str) -> dict[str, Any]:
    costs = [{"worker": worker, "cost": 0.223}, {"worker": "other", "cost": 0.539}]
    return {"request": request, "at": 0.0, "worker": worker, "prompt_tokens": 74, "matched_tokens": 32} | {
        "found_tokens": None,
        "candidates": costs,
    }


def prefix(tokens: int, level: int, *workers: str, num_workers: int | None = None) -> dict[str, Any]:
    return {"num_tokens": tokens, "level": level, "num_hits": 7, "workers": list(workers)} | {
        "num_workers": num_workers or len(workers)
    }


def view(*workers: dict[str, Any]) -> View:
    seen = View()
    seen.update("hello", {"version": "1", "gateway": "g", "policy": "headstart", "decisions": [decision("a", "w0")]})
    index = {**INDEX, "shards": [SHARD]}
    seen.update(
        "snapshot",
        {"at": 0.0, "draining": False, "traffic": TRAFFIC, "index": index, "workers": workers}
        | {"workers_needed": {"m": 3}, "objective_s": 3.0},
    )
    tree = [prefix(48, 1, "w0", "w1", num_workers=9), prefix(96, 2, "w1")]
    seen.update("prefixes", {"prefixes": tree})
    return seen


def drawn(seen: View, columns: int = 160, height: int | None = None, **options: Any) -> str:
    """Draw the view on a console of this size."""
    console = Console(width=columns, file=io.StringIO(), force_terminal=bool(options), markup=False, **options)
    with console.capture() as captured:
        console.print(picture(seen, height))
    return captured.get()


@pytest.mark.parametrize(("columns", "height"), [(80, 24), (40, 10), (200, 60)])
def test_a_dead_worker_is_shown_on_every_terminal(columns: int, height: int) -> None:
    """Decisions are shown where there is room."""
    seen = view(*(worker(f"w{i}") for i in range(64)), worker("w64", "dead"))
    shown = drawn(seen, columns, height).splitlines()
    assert max(map(len, shown)) <= columns
    assert any("w64" in line for line in shown[:height])
    if height >= 24:
        assert len(shown) <= height
        assert "HOTTEST" in "".join(shown)


def test_blocks_and_leases_are_those_of_the_dashboard() -> None:
    """Cached blocks count as held, a lease shows where it is late, and the objective has its number."""
    late = worker("w1") | {"lease_left_s": 1.5}
    text = drawn(view(worker("w0"), late))
    assert "70/100" in text
    assert text.count("lease") == text.count("serving, lease 1.5 s") == 1
    assert "needed for waits of at most 3 s: m 3" in text


def test_a_name_cannot_command_the_terminal() -> None:
    seen = view(worker("w\033]0;evil\a"))
    seen.update("decisions", {"decisions": [decision("b", "w\033[2J")], "found": {}})
    text = drawn(seen)
    assert "\033" not in text
    assert "\a" not in text
    assert "\033[36m" in drawn(seen, color_system="standard")


def test_ops_url() -> None:
    assert ops_url("8001") == "http://127.0.0.1:8001"
    assert ops_url("there:9/dashboard") == "http://there:9"
    assert index_parser().parse_args(["--ops", "8001"]).ops == "http://127.0.0.1:8001"
    assert ops_url("https://there/") == "https://there"
    assert parser().parse_args([]).ops == "http://127.0.0.1:8001"
    assert parser().parse_args(["--ops", "host:9"]).ops == "http://host:9"


def test_a_missing_gateway_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("top", "--ops", "ftp://there") == 2
    assert "ftp://there" in capsys.readouterr().err
    assert cli.main(["top", "--ops", "http://127.0.0.1:1", "--once"]) == 1
    assert "is a gateway running?" in capsys.readouterr().err
    assert status_of("top", "--interval", "0") == 2


async def test_a_real_gateway(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> None:
    scripted = ScriptedWorker(bundle, reply=raw_tokenizer.encode(ANSWER).ids, num_cached_tokens=16)
    async with listening(scripted.app()) as scripted.url, gateway_process("--workers", scripted.url) as gateway:
        await gateway.until_ready()
        await post(gateway.url, chat())

        async def top(*arguments: str) -> str:
            command = [sys.executable, "-m", "server.cli", "top", "--ops", gateway.ops, "--once", *arguments]
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            out, _ = await process.communicate()
            assert process.returncode == 0
            return out.decode()

        async with asyncio.timeout(HANG_S):
            text, as_json = await asyncio.gather(top(), top("--json"))
        assert "1 of 1 workers serving" in text
        assert "\033" not in text, "no terminal, no colours"
        assert re.search(r"16 tokens +found 1x +w0", text), "the prefix that the request shared"
        assert [row["worker"] for row in json.loads(as_json)["workers"]] == ["w0"]
        with pytest.raises(CommandError, match="ops port"):
            await anext(events(gateway.url))
        number = int(gateway.ops.rpartition(":")[2])
        assert "with 1 worker" in (await doctor.port("ops port", "127.0.0.1", number, "--ops-port")).found


@pytest.mark.parametrize("end", [b"q", signal.SIGINT])
async def test_on_a_terminal_it_draws_over_and_outlives_the_gateway(
    end: bytes | signal.Signals, bundle: TokenizerBundle, raw_tokenizer: Tokenizer
) -> None:
    scripted = ScriptedWorker(bundle)
    ours, theirs = os.openpty()
    heard = b""

    async def until(text: bytes) -> None:
        nonlocal heard
        while text not in heard:
            heard += await asyncio.to_thread(os.read, ours, 65536)

    async with asyncio.timeout(HANG_S), listening(scripted.app()) as scripted.url:
        async with gateway_process("--workers", scripted.url) as gateway:
            await gateway.until_ready()
            command = [sys.executable, "-m", "server.cli", "top", "--ops", gateway.ops, "--interval", "0.1"]
            top = await asyncio.create_subprocess_exec(*command, stdin=theirs, stdout=theirs, stderr=theirs)
            await until(b"1 of 1 workers serving")
        await until(b"Trying again")
        if isinstance(end, bytes):
            os.write(ours, end)
        else:
            top.send_signal(end)
        await until(b"\033[?1049l")
        assert await top.wait() == 0
    os.close(ours)
    os.close(theirs)
    assert heard.index(b"\033[?1049h") < heard.index(b"\033[H")
