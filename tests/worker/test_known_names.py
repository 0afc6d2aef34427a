"""Every command refuses a variable, a table or a key that none reads, with a hint at the right one."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import string
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from benchmarks.report import option_parser
from server.cli.commands import COMMANDS
from worker.common.command_line import CONFIG_VARIABLE, SECRET_VARIABLE, known_options, variable

OPTIONS = known_options()
VARIABLES = {variable(command, option) for command, names in OPTIONS.items() for option in names}
VARIABLES |= {CONFIG_VARIABLE, SECRET_VARIABLE}
MODULES = {"gateway": "server.config", "worker": "worker.config"}
SERVICE = {
    "SERVICE_HOST": "10.0.0.1",
    "SERVICE_PORT": "8000",
    "SERVICE_PORT_OPS": "8001",
    "PORT": "tcp://10.0.0.1:8000",
    "PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "PORT_8000_TCP_PROTO": "tcp",
    "PORT_8000_TCP_PORT": "8000",
    "PORT_8000_TCP_ADDR": "10.0.0.1",
}
"""The end of each variable that Kubernetes sets for a Service, and its value."""
ARGUMENTS = {"keys": ["check", "keys.toml"], "batch": ["in", "out"], "prefix": ["a", "b"], "usage": ["log"]}


def parser_of(command: str) -> Callable[[], argparse.ArgumentParser]:
    if command == "bench":
        return lambda: option_parser("cache", "")
    found: Callable[[], argparse.ArgumentParser] = import_module(MODULES.get(command, f"server.cli.{command}")).parser
    return found


PARSERS = {command: parser_of(command)() for command in COMMANDS}
COMMAND = st.sampled_from(sorted(PARSERS))
PROPERTY = settings(deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def misspelt(draw: st.DrawFn, known: set[str], letters: str) -> tuple[str, str]:
    """Return a word, and what one wrong, missing, further or swapped letter makes of it."""
    word = draw(st.sampled_from(sorted(known)))
    at, letter = draw(st.integers(0, len(word) - 1)), draw(st.sampled_from(letters))
    before, after = word[:at], word[at + 1 :]
    swapped = before + after[:1] + word[at] + after[1:]
    wrong = draw(st.sampled_from([before + letter + after, before + after, before + letter + word[at:], swapped]))
    assume(wrong and wrong not in known)
    return word, wrong


def refusal(command: str, environ: dict[str, str]) -> str:
    """Return the error of a command; empty: it refuses nothing."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        for name in [name for name in os.environ if name.startswith("HEADSTART_")]:
            patch.delenv(name)
        for name, value in environ.items():
            patch.setenv(name, value)
        with contextlib.suppress(SystemExit):
            PARSERS[command].parse_args(ARGUMENTS.get(command, []))
    return said.getvalue()


@PROPERTY
@given(COMMAND, misspelt(VARIABLES, string.ascii_uppercase + "_"))
def test_a_misspelt_variable_is_refused(command: str, spelling: tuple[str, str]) -> None:
    right, wrong = spelling
    said = refusal(command, {wrong: "1"})
    assert f"no command reads the variable {wrong}; did you mean " in said
    assert right in said.splitlines()[0].partition("; did you mean ")[2].rstrip("?").split(" or ")


@PROPERTY
@given(COMMAND, misspelt(set(OPTIONS), string.ascii_lowercase + "-_"))
def test_a_misspelt_table_is_refused(tmp_path: Path, command: str, spelling: tuple[str, str]) -> None:
    right, wrong = spelling
    file = tmp_path / "options.toml"
    file.write_text(f"[{json.dumps(wrong)}]\n")
    said = refusal(command, {CONFIG_VARIABLE: str(file)})
    assert f"--config {file}: no command reads the table [{wrong}]; did you mean {right}" in said


@PROPERTY
@given(COMMAND, st.data(), st.sampled_from(sorted(OPTIONS)))
def test_a_misspelt_key_of_any_table_is_refused(tmp_path: Path, command: str, data: st.DataObject, table: str) -> None:
    right, wrong = data.draw(misspelt(set(OPTIONS[table]), string.ascii_lowercase + "-_"))
    file = tmp_path / "options.toml"
    file.write_text(f"[{table}]\n{json.dumps(wrong)} = 1\n")
    said = refusal(command, {CONFIG_VARIABLE: str(file)})
    assert f"--config {file}: [{table}] has no option {wrong!r}; did you mean " in said
    assert right in said.splitlines()[0].partition("; did you mean ")[2].rstrip("?").split(" or ")


@pytest.mark.parametrize("service", ["HEADSTART", "HEADSTART_GATEWAY", "HEADSTART_OPS", "HEADSTARTS"])
def test_variables_of_a_service_are_ignored(service: str) -> None:
    environ = {f"{service}_{end}": value for end, value in SERVICE.items()}
    for command in PARSERS:
        assert refusal(command, environ) == ""
        assert refusal(command, {k: v.replace("//10.0.0.1", "//[fd00::1]") for k, v in environ.items()}) == ""


@PROPERTY
@given(COMMAND, misspelt({f"HEADSTART_{end}" for end in SERVICE}, string.ascii_uppercase + "_"))
def test_what_only_looks_like_a_service_is_refused(command: str, spelling: tuple[str, str]) -> None:
    """A value is not that of a service, or the service has no address."""
    _, wrong = spelling
    assume(wrong.startswith("HEADSTART_") and wrong not in VARIABLES and not wrong.endswith("_SERVICE_HOST"))
    assert f"no command reads the variable {wrong}" in refusal(command, {wrong: "8000"})
    assert f"no command reads the variable {wrong}" in refusal(command, {wrong: "tcp://10.0.0.1:8000"})


def test_a_port_is_still_read_next_to_a_service() -> None:
    environ = {f"HEADSTART_{end}": value for end, value in SERVICE.items()}
    assert "invalid int value: 'many'" in refusal("gateway", {**environ, "HEADSTART_PORT": "many"})
    del environ["HEADSTART_SERVICE_HOST"]
    assert "HEADSTART_PORT" in refusal("gateway", {"HEADSTART_PORT": environ["HEADSTART_PORT"]})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("HEADSTART_APIKEYS", "HEADSTART_API_KEYS"),
        ("HEADSTART_GATEWAY_API_KEYS", "HEADSTART_API_KEYS"),
        ("HEADSTART_WORKER_MODEL", "HEADSTART_MODEL"),
        ("headstart_api_keys", "HEADSTART_API_KEYS"),
        ("HEADSTART_API_KEY", "HEADSTART_API_KEYS"),
        ("HEADSTAR_API_KEYS", "HEADSTART_API_KEYS"),
        ("HEADTSART_API_KEYS", "HEADSTART_API_KEYS"),
    ],
)
def test_usual_mistakes_get_a_hint(name: str, hint: str) -> None:
    assert f"{name}; did you mean {hint}" in refusal("top", {name: "1"})


@pytest.mark.parametrize("name", ["HEADS_UP", "MY_HEADSTART_PORT", "START_PORT", "HEAD", "XDG_HEADSTART"])
def test_variables_of_others_are_left_alone(name: str) -> None:
    assert refusal("gateway", {name: "1"}) == ""


@pytest.mark.parametrize("command", ["gateway", "worker", "bench cache"])
def test_real_commands_refuse(command: str) -> None:
    words = [*command.split(), *ARGUMENTS.get(command, [])]
    environ = {**os.environ, "HEADSTART_APIKEYS": "keys.toml"}
    done = subprocess.run([sys.executable, "-m", "server.cli", *words], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no command reads the variable HEADSTART_APIKEYS; did you mean HEADSTART_API_KEYS?" in done.stderr
