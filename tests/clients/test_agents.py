"""Real coding agents against a tiny model: no request is refused, and their shared prefix is found."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.clients.lead import lead
from tests.clients.recorder import Exchange, Recorder, recording
from tests.clients.running import INSTALLED
from tests.e2e.serving import SMALL_POOL, Serve
from tests.tiny_model import write_tiny_model
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.clients
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
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=32768)


@pytest.fixture(scope="module")
def wide(tiny: Path) -> Iterator[Serve]:
    with Serve(*options(tiny, 32768)) as serve:
        yield serve


@pytest.fixture(scope="module")
def narrow(tiny: Path) -> Iterator[Serve]:
    with Serve(*options(tiny, 8192)) as serve:
        yield serve


def options(model: Path, max_model_len: int) -> list[str]:
    worker_args = f"--served-model-name tiny --max-model-len {max_model_len} {SMALL_POOL}"
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


def table(name: str, recorder: Recorder) -> None:
    for exchange in recorder.requests:
        print(f"{name:10} {exchange.path:22} {exchange.status} tokens %6d cached %6d" % usage(exchange))


@pytest.mark.parametrize("name", AGENTS)
def test_wide(name: str, wide: Serve, tmp_path: Path) -> None:
    """A question, a resumed conversation, another folder, a tool that is run, and a program that is ended early."""
    agent = AGENTS[name]
    with recording(wide.url, lead()) as recorder:
        for folder, words, question in (
            ("a", agent.first, "What does this folder hold?"),
            ("a", agent.next, "And what is missing?"),
            ("b", agent.first, "Name three colours."),
            ("b", agent.next, "And a fourth?"),
        ):
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
        table(name, recorder)
        assert {each.status for each in recorder.requests} == {200}
        resumed = max(recorder.requests[:before], key=lambda each: usage(each)[0])
        tokens, cached = usage(resumed)
        assert cached >= 0.9 * tokens, "the longest conversation finds what it has sent before"


@pytest.mark.parametrize("name", AGENTS)
def test_narrow(name: str, narrow: Serve, tmp_path: Path) -> None:
    """A prompt that does not fit is refused in a few requests, and the program ends by itself."""
    with recording(narrow.url, lead()) as recorder:
        started = time.monotonic()
        code, output = run(tmp_path, recorder, "a", [name, *AGENTS[name].first, "What does this folder hold?"])
        table(name, recorder)
        print(name, code, f"{time.monotonic() - started:.1f} s", output[-300:])
        assert all(each.status < 500 for each in recorder.requests)
        assert len(recorder.requests) <= 6, "no loop of retries"
