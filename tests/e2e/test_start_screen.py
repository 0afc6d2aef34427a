"""The start screen of `headstart serve`: the lines from "ready" on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.serving import READY, Serve

pytestmark = pytest.mark.e2e


def test_a_missing_compiler_is_one_line_with_its_remedy(tiny_model: Path, tmp_path: Path) -> None:
    """However many workers miss it."""
    nothing = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    options = ["--model", str(tiny_model), "--num-workers", "2", "--worker-args", "--num-blocks 64"]
    with Serve(*options, env=nothing) as serving:
        serving.wait_for_line(re.compile("Ctrl-C ends them all"))
        first = next(number for number, line in enumerate(serving.lines) if READY.search(line))
        (line,) = [line for line in serving.lines[first:] if "g++" in line]
    assert "there is no g++: apt-get install g++" in line
    assert not any("loading layer" in line for line in serving.lines), "that is for the bar of a terminal"


def test_the_shown_curl_has_a_place_for_the_key(tiny_model: Path, tmp_path: Path) -> None:
    """Keys may come by the environment, too."""
    (tmp_path / "keys.toml").write_text(f'[[keys]]\ndigest = "sha256:{"0" * 64}"\ntenant = "one"\n')
    options = ["--model", str(tiny_model), "--num-workers", "1", "--worker-args", "--num-blocks 64"]
    with Serve(*options, env={"HEADSTART_API_KEYS": str(tmp_path / "keys.toml")}) as serving:
        serving.wait_for_line(re.compile("curl .*-H 'authorization: Bearer KEY'"))
