"""The compose file: its variables are options, and its targets are stages of the Dockerfile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import server.config
import worker.config

ROOT = Path(__file__).parents[2]
SECRET = "HEADSTART_CLUSTER_SECRET"
PARTS = {"gateway": server.config, "worker": worker.config}


@pytest.fixture
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "compose.yaml").read_text())["services"]
    return found


@pytest.mark.parametrize("name", sorted(PARTS))
def test_the_variables_are_options(services: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, environment = PARTS[name], services[name]["environment"]
    flags = [action.option_strings[-1] for action in part.parser()._actions]
    assert environment.keys() <= {SECRET, *(part.parser().variable(flag) for flag in flags)}
    for variable, value in environment.items():
        monkeypatch.setenv(variable, str(value))
    config = part.parse(["--host", "0.0.0.0"])
    assert config.redis == "redis://redis:6379"
    assert "redis" in services
    assert config.cluster_secret() == str(environment[SECRET]).encode()


@pytest.mark.parametrize("name", sorted(PARTS))
def test_the_targets_are_stages_of_the_dockerfile(services: dict[str, Any], name: str) -> None:
    build = services[name]["build"]
    text = (ROOT / "Dockerfile").read_text()
    assert build["target"] in re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    assert build.get("args", {}).keys() <= set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))


def test_the_ports_are_those_of_the_gateway(services: dict[str, Any]) -> None:
    config = server.config.parse(["--redis", "redis://redis:6379"])
    wanted = [f"127.0.0.1:{port}:{port}" for port in (config.port, config.ops_port)]
    assert services["gateway"]["ports"] == wanted
