"""Requests of every kind with keys, and what their clients counted, to compare with the usage log."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from server.auth.identity import digest_text
from server.cli import usage as command
from tests.faults.client import session
from tests.faults.cluster import Cluster, Topology
from tests.faults.part import Gateway, Worker

KEYS: Final = {name: f"sk-{secrets.token_hex(16)}" for name in ("reader", "leaver")}
"""The leaver's clients leave in the middle of a stream."""
EMBEDDER: Final = "embedder"
AMOUNTS: Final = ("prompt_tokens", "cached_tokens", "output_tokens")


@dataclass(slots=True)
class Counted:
    """One request, as its client counted it. `amounts`: None without a usage."""

    id: str
    key: str
    gateway: str = ""
    status: int = 0
    amounts: tuple[int, int, int] | None = None
    num_events: int = 0
    """Events with output; each has at least one token."""
    ended_s: float = 0.0


class UsageFleet(Cluster):
    """Two kinds of workers; all gateways write one usage log."""

    def __init__(self, folder: Path, model: Path, *, num_workers: int, num_gateways: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "usage.jsonl"
        entries = [
            f'[[keys]]\ndigest = "{digest_text(key.encode())}"\ntenant = "tenant-{name}"\nname = "{name}"\n'
            for name, key in KEYS.items()
        ]
        (folder / "keys.toml").write_text("\n".join(entries))
        arguments = ["--api-keys", str(folder / "keys.toml"), "--usage-log", str(self.log_path)]
        arguments += ["--usage-log-size", "32K", "--drain-grace-s", "5"]
        super().__init__(folder, model, Topology(num_workers + 1, num_gateways, gateway_args=arguments))
        last = self.workers.pop()
        options = [EMBEDDER if text == "tiny" else text for text in last.args]
        self.embedder = Worker("e0", last.port, folder / "e0.log", [*options, "--task", "embed"], None)
        self.workers.append(self.embedder)

    def files(self) -> list[Path]:
        return sorted(self.log_path.parent.glob(f"{self.log_path.name}*"))

    def lines(self) -> dict[str, dict[str, Any]]:
        """Return the lines by the id of their request, each of which has at most one."""
        found: dict[str, dict[str, Any]] = {}
        for text in itertools.chain(*(file.read_text().splitlines() for file in self.files())):
            with contextlib.suppress(json.JSONDecodeError):
                line = json.loads(text)
                assert line["request_id"] not in found, line
                found[line["request_id"]] = line
        return found

    def sums(self) -> dict[str, dict[str, Any]]:
        """Return what `headstart usage` sums by key."""
        rows, _ = command.summed(self.files(), ("key",))
        return {row["key"]: row for row in rows}


def body_of(number: int, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a path and a body; every fourth prompt begins like the one before."""
    words = f"Page {number // 4} of the book. " * rng.randrange(3, 25) + f"Line {number}."
    messages = [{"role": "user", "content": words}]
    size, stream = rng.randrange(1, 24), bool(rng.getrandbits(1))
    shown = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    match number % 8:
        case 0 | 1:
            choices = rng.choice((1, 1, 3))
            body = {"model": "tiny", "messages": messages, "max_tokens": size, "n": choices, **shown}
            return "/v1/chat/completions", body
        case 2 | 3:
            prompt = [words, words + " More."] if rng.getrandbits(1) else words
            return "/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": size, "n": 2, **shown}
        case 4:
            return "/v1/responses", {"model": "tiny", "input": words, "max_output_tokens": size, "stream": stream}
        case 5:
            return "/v1/messages", {"model": "tiny", "messages": messages, "max_tokens": size, "stream": stream}
        case 6:
            return "/v1/embeddings", {"model": EMBEDDER, "input": [words, words[:40]]}
        case _:
            wrong = rng.choice(({"max_tokens": -1}, {"model": "none"}, {"temperature": "hot"}))
            return "/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": size, **wrong}


def usage_in(parts: Sequence[dict[str, Any]]) -> tuple[int, int, int] | None:
    found: dict[str, Any] = {}
    for part in parts:
        for holder in (part, part.get("response") or {}, part.get("message") or {}):
            found |= holder.get("usage") or {}
    if not found:
        return None
    read = int(found.get("cache_read_input_tokens") or 0)
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details") or {}
    prompt = int(found.get("prompt_tokens", found.get("input_tokens", 0))) + read
    output = int(found.get("completion_tokens", found.get("output_tokens", 0)))
    return prompt, int(details.get("cached_tokens", read)), output


async def ask(
    http: aiohttp.ClientSession, gateways: Iterable[Gateway], path: str, body: dict[str, Any], counted: Counted
) -> None:
    """Send the request to the first of the gateways that takes connections."""
    headers = {"authorization": f"Bearer {KEYS[counted.key]}", "x-request-id": counted.id}
    for gateway in gateways:
        counted.gateway = gateway.name
        try:
            async with http.post(gateway.url + path, json=body, headers=headers) as response:
                counted.status = response.status
                if body.get("stream") and response.status == 200:
                    await _read_stream(response, counted)
                else:
                    counted.amounts = usage_in([await response.json()])
        except aiohttp.ClientConnectorError:
            continue
        except (aiohttp.ClientError, OSError):
            pass
        break
    counted.ended_s = time.time()


async def _read_stream(response: aiohttp.ClientResponse, counted: Counted) -> None:
    parts, is_over = [], False
    async for line in response.content:
        if line.startswith(b"data: {"):
            part = json.loads(line[6:])
            parts.append(part)
            counted.num_events += any(map(has_text, part.get("choices", ())))
            is_over |= part.get("type") in ("response.completed", "response.incomplete", "message_stop")
        is_over |= line.startswith(b"data: [DONE]")
        if counted.key == "leaver" and counted.num_events > 1:
            return  # which closes the connection
    counted.amounts = usage_in(parts) if is_over else None


def has_text(choice: dict[str, Any]) -> bool:
    """Return whether an event of a choice brings tokens: the first one of a chat brings only the role."""
    return bool(choice.get("text") or choice.get("delta", {}).get("content"))


async def run_load(
    fleet: UsageFleet, num_requests: int, rng: random.Random, *, at_once: int, before: Callable[[int], None]
) -> list[Counted]:
    """Send every kind of request in turn; `before(number)` runs before each, and may kill a part."""
    done: list[Counted] = []
    numbers: Iterator[int] = iter(range(num_requests))

    async def work() -> None:
        async with session() as http:
            for number in numbers:
                await asyncio.to_thread(before, number)
                path, body = body_of(number, rng)
                key = "reader"
                if number % 10 == 9:
                    key, path = "leaver", "/v1/chat/completions"
                    messages = [{"role": "user", "content": f"Count to {number}."}]
                    body = {"model": "tiny", "messages": messages, "max_tokens": 300, "stream": True}
                    body |= {"ignore_eos": True}
                gateways = itertools.cycle(fleet.gateways[number % 2 :] + fleet.gateways[: number % 2])
                counted = Counted(f"load-{number}", key)
                done.append(counted)
                await ask(http, gateways, path, body, counted)

    await asyncio.gather(*(work() for _ in range(at_once)))
    return done


def check(fleet: UsageFleet, done: list[Counted], may_lack: Callable[[Counted], bool]) -> str:
    """Assert that lines and clients agree; `may_lack` names requests whose line may be lost. Return the figures."""
    lines = fleet.lines()
    lacking = [each for each in done if each.id not in lines]
    assert not [each for each in lacking if not may_lack(each)]
    for each in done:
        if (line := lines.get(each.id)) is None:
            continue
        assert (line["key"], line["tenant"]) == (each.key, f"tenant-{each.key}")
        amounts = (line["prompt_tokens"], sum(line["cached_tokens"].values()), line["output_tokens"])
        if each.amounts is not None:
            assert (line["status"], line["finished"], amounts) == (200, True, each.amounts), (line, each)
        else:
            assert line["output_tokens"] >= each.num_events, (line, each)
            assert each.status in (0, 200, line["status"]), (line, each)
    whole = [each for each in done if each.key == "reader" and each.id in lines]
    unknown = [lines[each.id] for each in whole if each.amounts is None]
    expected = [sum(each.amounts[index] for each in whole if each.amounts is not None) for index in range(3)]
    row = fleet.sums()["reader"]
    for name, amount in zip(AMOUNTS, expected, strict=True):
        cut = sum(sum(line[name].values()) if isinstance(line[name], dict) else line[name] for line in unknown)
        assert row[name] - cut == amount, name
    assert row["requests"] == len(whole)
    counted = ", ".join(f"{amount} {name}" for name, amount in zip(AMOUNTS, expected, strict=True))
    shown = (
        f"{len(done)} requests, {len(lines)} lines in {len(fleet.files())} files, {len(lacking)} lost; equal: {counted}"
    )
    return f"{shown}; {sum(line['prompt_tokens'] > 0 for line in unknown)} ended early with work"
