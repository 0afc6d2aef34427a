"""Real coding agents against a tiny model: what requests share is found, and a prompt that is too long is refused once.

A table has the tokens of each prompt, the cached ones, and those in common with an earlier prompt.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.clients.lead import lead
from tests.clients.recorder import Exchange, Recorder, recording
from tests.clients.running import INSTALLED
from tests.e2e.serving import SMALL_POOL, Serve
from tests.server.text.template_families import FAMILIES
from tests.tiny_model import write_tiny_model
from tests.waiting import HANG_S, wait_until

WIDE: Final = 32768
NARROW: Final = 8192
TOO_LONG: Final = {
    "/messages": re.compile(rf"prompt is too long: \d+ tokens > {NARROW} maximum"),
    "/responses": re.compile(r"Your input exceeds the context window of this model\."),
    "/chat/completions": re.compile(rf"This model's maximum context length is {NARROW} tokens\. However, "),
}
"""The error of each API from which a program learns that it has to shorten the conversation."""
TEMPLATES: Final = ("own", "system-first", "alternating-tools")
BINARIES: Final = INSTALLED / "node_modules" / ".bin"
CODEX: Final = """model = "tiny"
model_provider = "headstart"
[model_providers.headstart]
name = "Headstart"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""


@dataclass(frozen=True)
class Agent:
    first: tuple[str, ...]
    next: tuple[str, ...]
    tool: str
    """One that it runs without asking its user."""


AGENTS: Final = {
    "claude": Agent(("-p",), ("-p", "--continue"), "TaskList"),
    "codex": Agent(
        ("exec", "--skip-git-repo-check"), ("exec", "resume", "--last", "--skip-git-repo-check"), "get_goal"
    ),
    "opencode": Agent(("run",), ("run", "--continue"), "glob"),
    "qwen": Agent(("-p",), ("--continue", "-p"), "todo_write"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=WIDE)


@pytest.fixture(scope="module", params=TEMPLATES)
def wide(tiny: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Serve]:
    """Serve with the model's own template, or with the rules of another."""
    worker_args = ""
    if request.param != "own":
        file = tmp_path_factory.mktemp("templates") / "template.jinja"
        file.write_text(FAMILIES[request.param])
        worker_args = f"--chat-template {file}"
    with Serve(*options(tiny, WIDE, worker_args)) as serve:
        yield serve


@pytest.fixture(scope="module")
def narrow(tiny: Path) -> Iterator[Serve]:
    with Serve(*options(tiny, NARROW)) as serve:
        yield serve


def options(model: Path, max_model_len: int, more: str = "") -> list[str]:
    worker_args = f"--served-model-name tiny --max-model-len {max_model_len} {SMALL_POOL} {more}"
    return ["--model", str(model), "--num-workers", "1", "--worker-args", worker_args]


def start(home: Path, recorder: Recorder, folder: str, command: list[str]) -> subprocess.Popen[str]:
    """Start a program with its default settings in a folder, and a home where it finds the server."""
    (home / folder).mkdir(exist_ok=True, parents=True)
    (home / ".codex").mkdir(exist_ok=True)
    (home / ".codex" / "config.toml").write_text(CODEX.format(url=recorder.url))
    (home / ".config" / "opencode").mkdir(exist_ok=True, parents=True)
    context: int = httpx.get(f"{recorder.upstream}/v1/models").json()["data"][0]["max_model_len"]
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Headstart",
        "options": {"baseURL": f"{recorder.url}/v1", "apiKey": "unused"},
        "models": {"tiny": {"name": "tiny", "limit": {"context": context, "output": context // 20}}},
    }
    settings = {"model": "headstart/tiny", "autoupdate": False, "provider": {"headstart": provider}}
    (home / ".config" / "opencode" / "opencode.json").write_text(json.dumps(settings))
    env = {"HOME": str(home), "PATH": f"{BINARIES}:{os.environ['PATH']}", "TERM": "dumb", "NO_PROXY": "*"}
    env |= {"ANTHROPIC_BASE_URL": recorder.url, "ANTHROPIC_AUTH_TOKEN": "unused", "ANTHROPIC_MODEL": "tiny"}
    env |= {"OPENAI_BASE_URL": f"{recorder.url}/v1", "OPENAI_API_KEY": "unused", "OPENAI_MODEL": "tiny"}
    env |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    env |= {"QWEN_CODE_MAX_OUTPUT_TOKENS": "1000"}  # else it asks for 64,000 once an answer was cut
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        command, env=env, cwd=home / folder, text=True, start_new_session=True, **pipes
    )


def run(home: Path, recorder: Recorder, folder: str, command: list[str]) -> tuple[int, str]:
    process = start(home, recorder, folder, command)
    output, _ = process.communicate(timeout=5 * HANG_S)
    return process.returncode, output


def usage(exchange: Exchange) -> tuple[int, int]:
    """Return the tokens of a prompt, and how many of them were cached."""
    counts = {name.decode(): int(n) for name, n in re.findall(rb'"(\w+_tokens)": ?(\d+)', exchange.answer)}
    if "cache_read_input_tokens" in counts:
        return counts["input_tokens"] + counts["cache_read_input_tokens"], counts["cache_read_input_tokens"]
    return counts.get("prompt_tokens", counts.get("input_tokens", 0)), counts.get("cached_tokens", 0)


def shared_tokens(serve: Serve, earlier: Sequence[Exchange], exchange: Exchange) -> int:
    """Return how many tokens a prompt shares with that one of `earlier` with which it shares most."""

    def shared_with(one: Exchange) -> int:
        pair = {"a": one.body, "b": exchange.body}
        answer = httpx.post(f"{serve.ops_url}/prefixes/compare", json=pair, timeout=HANG_S).raise_for_status()
        return int(answer.json()["num_shared_tokens"])

    read = [one for one in (*earlier, exchange) if one.status == 200]  # a refused prompt may fit no context
    return max(map(shared_with, read[:-1]), default=0) if exchange in read else 0


@dataclass(frozen=True)
class Row:
    """A request of a program. The counts are tokens of its prompt."""

    exchange: Exchange
    tokens: int
    cached: int
    shared: int


def table(name: str, serve: Serve, exchanges: Sequence[Exchange]) -> list[Row]:
    """Print and return a row for each request."""
    rows = [
        Row(exchange, *usage(exchange), shared_tokens(serve, exchanges[:number], exchange))
        for number, exchange in enumerate(exchanges)
    ]
    for row in rows:
        line = f"{name:10} {row.exchange.path:22} {row.exchange.status}"
        print(f"{line} tokens {row.tokens:6} cached {row.cached:6} shared {row.shared:6}")
    return rows


@pytest.mark.parametrize("name", AGENTS)
def test_wide(name: str, wide: Serve, tmp_path: Path) -> None:
    """A question, a resumed conversation, another folder, a tool that is run, and a program that is ended early."""
    agent = AGENTS[name]
    begun = []
    with recording(wide.url, lead()) as recorder:
        for folder, words, question in (
            ("a", agent.first, "What does this folder hold?"),
            ("a", agent.next, "And what is missing?"),
            ("b", agent.first, "Name three colours."),
            ("b", agent.next, "And a fourth?"),
        ):
            begun.append(len(recorder.requests))
            code, output = run(tmp_path, recorder, folder, [name, *words, question])
            assert code == 0, output
        recorder.change = lead(agent.tool)
        before = len(recorder.requests)
        code, output = run(tmp_path, recorder, "a", [name, *agent.first, "Use the tool."])
        assert code == 0, output
        assert any(agent.tool.encode() in each.answer for each in recorder.requests[before:])
        assert len(recorder.requests) > before + 1, "the tool's result has been sent"
        recorder.change = lambda path, body: {**body, "temperature": 1.0, "ignore_eos": True}
        before = len(recorder.requests)
        process = start(tmp_path, recorder, "a", [name, *agent.first, "Go on for long."])
        wait_until(lambda: any(each.answer for each in recorder.requests[before:]))
        os.killpg(process.pid, signal.SIGKILL)  # a package's command may be a child of what was started
        process.communicate()
        wait_until(lambda: any(each.is_cut for each in recorder.requests[before:]))
        rows = table(name, wide, recorder.requests)
        assert {row.exchange.status for row in rows} == {200}
        for start_, end in zip(begun[1:], [*begun[2:], before], strict=True):
            counted = [row for row in rows[start_:end] if row.tokens]  # a stream that was left has no usage
            cached, shared = sum(row.cached for row in counted), sum(row.shared for row in counted)
            assert cached >= 0.9 * shared > 0, "a later conversation finds what it shares with an earlier one"


@pytest.mark.parametrize("name", AGENTS)
def test_narrow(name: str, narrow: Serve, tmp_path: Path) -> None:
    """A prompt that does not fit is refused once, with the error of its API, and the program ends."""
    with recording(narrow.url, lead()) as recorder:
        started = time.monotonic()
        code, output = run(tmp_path, recorder, "a", [name, *AGENTS[name].first, "What does this folder hold?"])
        table(name, narrow, recorder.requests)
        assert all(each.status < 500 for each in recorder.requests)
        assert len(recorder.requests) <= 6, "no loop of retries"
        refused = [each for each in recorder.requests if each.status == 400]
        sentences = [TOO_LONG[each.path.removeprefix("/v1")].search(each.answer.decode()) for each in refused]
        assert all(sentences), [each.answer for each in refused]
        assert set(Counter(each.raw for each in refused).values()) <= {1}, "no body is refused twice"
        shows = any(match is not None and match[0] in output for match in sentences)
        what = "shows it" if shows else "does not show it"
        print(f"{name}: refused {len(refused)} of {len(recorder.requests)}, {what}; exit code {code}", end=" ")
        print(f"after {time.monotonic() - started:.1f} s: {output[-300:]}")
