"""`headstart top`: pictures of a view, and the command against a real gateway process."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import sys
import time
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from server import cli
from server.cli import doctor
from server.cli.common import CommandError, ops_url
from server.cli.index import parser as index_parser
from server.cli.top import View, clock, events, index_state, parser, picture
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
        "load": None if lost else load
    }


def decision(request: str, worker: str) -> dict[str, Any]:
    costs = [{"worker": worker, "cost": 0.223}, {"worker": "other", "cost": 0.539}]
    return {"request": request, "at": 0.0, "worker": worker, "prompt_tokens": 74, "matched_tokens": 32} | {
        "found_tokens": None,
        "candidates": costs,
    }


def change(what: str, worker: str = "", *, why: str = "", count: int = 1) -> dict[str, Any]:
    return {"at": 0.0, "last": 0.0, "worker": worker, "model": "m", "what": what, "why": why, "count": count}


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
        {"at": 0.0, "draining": False, "traffic": TRAFFIC, "index": index, "workers": workers} | {"workers_needed": {}},
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


def test_a_view_that_connects_again_shows_a_decision_once() -> None:
    seen = View()
    for last in "bc":
        seen.update("hello", {"decisions": [decision("a", "w0"), decision(last, "w0")]})
    assert [each["request"] for each in seen.decisions] == ["a", "c"]


def test_a_retry_replaces_its_decision() -> None:
    """The first worker does not show what the second one found."""
    seen = View()
    seen.update("decisions", {"decisions": [decision("a", "lost"), decision("b", "w1")]})
    seen.update("decisions", {"decisions": [decision("a", "w1")], "found": {"a": 64}})
    assert [(each["request"], each["worker"]) for each in seen.decisions] == [("b", "w1"), ("a", "w1")]


def test_the_workers_needed_are_on_the_screen() -> None:
    seen = view(worker("w0"))
    assert "needed" not in drawn(seen)
    seen.latest["snapshot"]["workers_needed"] = {"m": 3}
    assert "needed for the objective: m 3" in drawn(seen)


def test_everything_is_on_the_screen() -> None:
    seen = view(worker("w0"), worker("w1", "dead"))
    seen.update("changes", {"changes": [change("died", "w1"), change("refused", why="queue_full", count=12)]})
    seen.update("decisions", {"decisions": [decision("b", "w1")], "found": {"a": 64}})
    text = drawn(seen)
    for part in ("43% of 111", "0.750 s", "200.0 decisions/s", "index healthy", "1 of 2 workers", "60/100", "4.2 s"):
        assert part in text
    latest, earlier = [line for line in text.splitlines() if " cached  " in line]
    assert "w1" in latest
    assert "32 of 74 cached" in latest
    assert "64 of 74 cached" in earlier
    assert "next other 0.539" in earlier
    assert text.index("12 requests refused  queue_full") < text.index("w1 died")
    assert "48 tokens" in text
    assert "w0 w1 and 7 more" in text
    assert "\n  + 96 tokens" in text


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


def test_a_name_cannot_command_the_terminal() -> None:
    seen = view(worker("w\033]0;evil\a"))
    seen.update("decisions", {"decisions": [decision("b", "w\033[2J")], "found": {}})
    text = drawn(seen)
    assert "\033" not in text
    assert "\a" not in text
    assert "\033[36m" in drawn(seen, color_system="standard")


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({**INDEX, "shards": []}, "not used"),
        ({**INDEX, "shards": [{**SHARD, "connected": False}]}, "unreachable"),
        ({**INDEX, "shards": [{**SHARD, "breaker_open": True}]}, "breaker open"),
        ({**INDEX, "shards": [SHARD, {**SHARD, "connected": False}]}, "degraded"),
        ({**INDEX, "blind": True, "reason": "few hits", "shards": [SHARD]}, "blind: few hits"),
        ({**INDEX, "precision": None, "recall": None, "shards": [SHARD]}, "not judged yet"),
        (
            {**INDEX, "precision": None, "shards": [SHARD]},
            "healthy: hits predicted for the last 200 requests",
        ),
    ],
)
def test_the_state_of_the_index_in_words(index: dict[str, Any], says: str) -> None:
    assert index_state(index)[0].startswith(says)


def test_a_time_of_another_day_has_its_day() -> None:
    now = time.time()
    assert re.fullmatch(r"\d\d:\d\d:\d\d", clock(now))
    assert re.fullmatch(r"\d\d \w+ \d\d:\d\d:\d\d", clock(now - 24 * 3600))


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
