"""Every command that README and docs show is run: here against a live server, or by the test named next to it.

A new command in a page fails this test until `COVERED` names how it is run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.serving import Serve
from tests.waiting import HANG_S

pytestmark = pytest.mark.e2e

ROOT: Final = Path(__file__).parent.parent.parent
PROGRAMS: Final = (
    *("make", "headstart", "curl", "helm", "docker", "kubectl", "python", "podman", "openssl", "pkill", "redis-cli"),
)
FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
HERE: Final = "run here"
COVERED: Final = {
    r"make serve": "tests/e2e/test_main_job.py",
    r"make (test|check|bench|install|test-chart)(?![-\w])": ".ci/run",
    r"make test-k8s": "tests/k8s/test_fleet.py",
    r"make test-(faults|soak)": "tests/faults",
    r"make test-browser": "tests/browser/test_pages.py",
    r"make test-deep": "tests/cache/test_allocator_machine.py",
    r"make gpu-(check|bundle)": "tests/benchmarks/test_gpu.py",
    r"python -m sglang\.launch_server": "tests/worker/adapter/test_over_sglang.py",
    r"headstart serve": "tests/e2e/serving.py",
    r"pkill ": "tests/e2e/test_faults.py",
    r"headstart (gateway|worker)": "tests/e2e/test_main_job.py",
    r"headstart bench route": "tests/benchmarks/dev/test_route.py",
    r"headstart bench replay": "tests/e2e/test_replay.py",
    r"headstart bench (cache|index|engine|gateway|speculation)": "tests/benchmarks",
    r"headstart top": "tests/server/cli/test_top.py",
    r"headstart doctor": "tests/server/cli/test_doctor.py",
    r"headstart index purge": "tests/server/cli/test_index.py",
    r"headstart index": HERE,
    r"headstart prefix": "tests/server/ops/test_prefix.py",
    r"headstart usage": "tests/server/usage/test_accounts.py",
    r"headstart keys": "tests/server/auth/test_api_keys.py",
    r"(docker|podman) (build|run)": "tests/k8s/test_dockerfile.py",
    r"(helm|kubectl) ": "tests/k8s",
    r"curl .*qwen3-8b": "tests/server/test_gateway.py",
    r"curl .*127\.0\.0\.1:800[01]": HERE,
    r"python examples/": HERE,
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]


def commands(page: Path) -> list[str]:
    """The lines of fenced blocks that begin with a program; a line that ends with a backslash goes on."""
    found = []
    for _, body in FENCE.findall(page.read_text(encoding="utf-8")):
        for line in body.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ")
            if line.split(" ")[0] in PROGRAMS:
                found.append(line)
    return found


def way(command: str) -> str | None:
    return next((how for pattern, how in COVERED.items() if re.match(pattern, command)), None)


SHOWN: Final = [(page, command) for page in pages() for command in commands(page)]


@pytest.mark.parametrize(("page", "command"), SHOWN, ids=[f"{page.name}: {command[:50]}" for page, command in SHOWN])
def test_a_command_is_run_somewhere(page: Path, command: str) -> None:
    how = way(command)
    assert how is not None, f"{page.name} shows {command!r}: say in COVERED what runs it"
    assert how == HERE or (ROOT / how).exists()


def run(command: str, serve: Serve) -> str:
    """Its output; the addresses are those of `serve`. Asserts that it succeeds."""
    local = command.replace("http://127.0.0.1:8000", serve.url).replace("http://127.0.0.1:8001", serve.ops_url)
    local = local.split(" &")[0].replace("| jq", "").replace("explain.py", f"explain.py {serve.ops_url}")
    local = re.sub(r"^headstart ", "python -m server.cli ", local)
    local = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", local)
    if local.startswith("curl"):
        if shutil.which("curl") is None:
            pytest.skip("needs curl")
        local = local.replace("curl", f"curl --silent --show-error --fail-with-body --max-time {HANG_S:g}", 1)
    env = {**os.environ, "OPENAI_BASE_URL": f"{serve.url}/v1", "OPENAI_API_KEY": "unused"}
    done = subprocess.run(["bash", "-c", local], capture_output=True, text=True, timeout=HANG_S, cwd=ROOT, env=env)
    assert done.returncode == 0, (local, done.stdout, done.stderr)
    return done.stdout


TO_FIND: Final = {
    "block hash": "hash",
    "eviction": "evict",
    "cost function": "seconds",
    "wire types": "msgpack",
    "SSE format": "data: ",
}
"""Topics that a reader of the architecture page must find, each with a word of the code named there."""


@pytest.mark.parametrize(("topic", "word"), TO_FIND.items())
def test_the_architecture_leads_to_the_code(topic: str, word: str) -> None:
    lines = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()
    lines = lines[lines.index("| to find | look for | in |") :]
    (row,) = [line for line in lines if line.startswith("|") and topic in line.split("|")[1]]
    symbols, files = (re.findall(r"`([^`]+)`", cell) for cell in row.split("|")[2:4])
    assert symbols
    code = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    for symbol in symbols:
        assert re.search(rf"^(class|def) {symbol}\b", code, re.MULTILINE), f"{symbol} is not in {files}"
    assert word in code


def test_the_commands_that_need_a_server(smollm2: Serve) -> None:
    shown = [command for _, command in SHOWN if way(command) == HERE]
    assert shown
    for command in sorted(shown, key=lambda command: command.startswith("curl")):  # which may be missing
        assert run(command, smollm2).strip(), command


def test_the_answer_that_the_readme_promises(smollm2: Serve) -> None:
    (curl,) = [command for command in commands(ROOT / "README.md") if command.startswith("curl")]
    assert "Paris" in run(curl, smollm2)


def test_the_python_of_the_readme(smollm2: Serve) -> None:
    blocks = FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    (code,) = [body for language, body in blocks if language == "python"]
    code = code.replace("http://127.0.0.1:8000", smollm2.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("chat.py", r"prompt tokens were cached"),
        ("structured.py", r"'inhabitants': \d+"),
        ("tools.py", r"get_weather \{'city': '(Paris|Rome|Oslo)'\}"),
        ("choices.py", r"-\d+\.\d\d '"),
        ("explain.py", r"prompt tokens would go to worker-\d[^\n]*\nworker +cached +fetched +queue_s"),
    ],
)
def test_an_example(name: str, says: str, smollm2: Serve) -> None:
    url = smollm2.ops_url if name == "explain.py" else smollm2.url
    command = [sys.executable, str(ROOT / "examples" / name), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env={**os.environ})
    assert done.returncode == 0, (shlex.join(command), done.stderr)
    assert re.search(says, done.stdout), done.stdout


def test_every_example_is_listed_and_tested() -> None:
    listed = set(re.findall(r"\]\((\w+\.py)\)", (ROOT / "examples" / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in (ROOT / "examples").glob("*.py")}
