"""Options from the command line, the environment and a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

import server.cli.keys
import server.cli.serve
import server.config
import worker.config
from worker.common.command_line import CONFIG_VARIABLE, CommandParser, reason

PARSERS: dict[str, Callable[[], CommandParser]] = {
    "serve": server.cli.serve.parser,
    "gateway": server.config.parser,
    "worker": worker.config.parser,
}


def sample(action: argparse.Action) -> str:
    """A value that the option takes, other than its default."""
    if action.choices is not None:
        return str(next(choice for choice in action.choices if choice != action.default))
    for text in ("17", "name=model", "127.0.0.0/8", "text", '{"a":1}', f"name={__file__}", __file__):
        try:
            if action.type is None or (callable(action.type) and action.type(text) is not None):
                return text
        except (ValueError, argparse.ArgumentTypeError):
            continue
    raise AssertionError(f"no sample for {action.option_strings}")


def options() -> list[Any]:
    return [
        pytest.param(command, action, id=f"{command} {action.option_strings[-1]}")
        for command, parser in PARSERS.items()
        for action in parser()._actions
        if action.option_strings and action.dest not in ("help", "config")
    ]


@pytest.mark.parametrize(("command", "action"), options())
def test_every_option_has_a_variable_and_a_key(
    command: str, action: argparse.Action, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HEADSTART_DRAIN_NOTICE_S")  # the suite sets it
    flag = action.option_strings[-1]
    is_flag = action.nargs == 0
    text = "" if is_flag else sample(action)
    wanted = PARSERS[command]().parse_args([flag] if is_flag else [flag, text])
    assert wanted != PARSERS[command]().parse_args([])
    with monkeypatch.context() as patch:
        patch.setenv(PARSERS[command]().variable(flag), "true" if is_flag else text)
        assert PARSERS[command]().parse_args([]) == wanted
    file = tmp_path / "headstart.toml"
    file.write_text(f"[{command}]\n{flag[2:]} = {'true' if is_flag else json.dumps(text)}\n[top]\nonce = true\n")
    assert PARSERS[command]().parse_args(["--config", str(file)]) == wanted
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    assert PARSERS[command]().parse_args([]) == wanted


@pytest.fixture
def parser() -> CommandParser:
    p = CommandParser(prog="headstart top", command="top")
    p.add_argument("--size", type=int, default=1)
    p.add_argument("--name", action="append", default=[])
    p.add_argument("--hosts", action="extend", type=methodcaller("split", ","))
    p.add_argument("--fast", action="store_true")
    return p


def table(path: Path, text: str) -> list[str]:
    file = path / "options.toml"
    file.write_text(f"[top]\n{text}\n")
    return ["--config", str(file)]


def test_command_line_before_variables_before_the_file(
    parser: CommandParser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = table(tmp_path, 'size = 2\nname = ["a", "b"]\nfast = true')
    parsed = parser.parse_args(config)
    assert (parsed.size, parsed.name, parsed.fast, parsed.hosts) == (2, ["a", "b"], True, None)
    monkeypatch.setenv("HEADSTART_TOP_SIZE", "3")
    monkeypatch.setenv("HEADSTART_TOP_NAME", "c d")
    monkeypatch.setenv("HEADSTART_TOP_FAST", "false")
    parsed = parser.parse_args(config)
    assert (parsed.size, parsed.name, parsed.fast) == (3, ["c", "d"], False)
    parsed = parser.parse_args([*config, "--size=4", "--name", "e", "--fast"])
    assert (parsed.size, parsed.name, parsed.fast) == (4, ["e"], True)


def test_lists_in_a_file_have_their_parts(parser: CommandParser, tmp_path: Path) -> None:
    assert parser.parse_args(table(tmp_path, 'hosts = ["a,b", "c"]')).hosts == ["a", "b", "c"]


def test_a_variable_of_json_is_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_DEFAULT_CHAT_TEMPLATE_KWARGS", '{"enable_thinking": false, "date": "1 May"}')
    parsed = server.config.parse(["--workers", "http://127.0.0.1:9"])
    assert parsed.template_kwargs_of("any")[0] == {"enable_thinking": False, "date": "1 May"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("size = true", "argument --size: takes a value, got True (from {file} [top])"),
        ("size = [2, 3]", "argument --size: takes a value, got [2, 3] (from {file} [top])"),
        ('size = "x"', "argument --size: invalid int value: 'x' (from {file} [top])"),
        ("fast = 3", "argument --fast: must be true or false, got 3 (from {file} [top])"),
        ("sise = 3", "--config {file}: [top] has no option 'sise'; did you mean size?"),
        ("config = 'x'", "--config {file}: [top] has no option 'config'"),
        ("size = ", "--config {file}: Invalid value (at line 2, column 8)"),
        ("[top.size]\nx = 1", "argument --size: takes a value, got {{'x': 1}} (from {file} [top])"),
    ],
)
def test_a_wrong_file(
    parser: CommandParser, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    config = table(tmp_path, text)
    with pytest.raises(SystemExit) as raised:
        parser.parse_args(config)
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"headstart top: error: {problem.format(file=config[1])}"
    assert (second, raised.value.code) == ("headstart top --help lists its options.", 2)


@pytest.mark.parametrize(
    ("text", "problem"), [("size = 3\n", "size belongs into a table, such as [gateway]"), (None, "No such file")]
)
def test_a_file_without_tables_and_none(
    parser: CommandParser, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, problem: str
) -> None:
    file = tmp_path / "options.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit):
        parser.parse_args(["--config", str(file)])
    assert problem in capsys.readouterr().err


def test_errors_name_the_variable_and_the_nearest_option(
    parser: CommandParser, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--siez", "3"])
    assert "unrecognized arguments: --siez 3; did you mean --size?" in capsys.readouterr().err
    monkeypatch.setenv("HEADSTART_TOP_SIZE", "tcp://10.0.0.1:80")
    with pytest.raises(SystemExit):
        parser.parse_args([])
    problem = "argument --size: invalid int value: 'tcp://10.0.0.1:80' (from HEADSTART_TOP_SIZE)"
    assert problem in capsys.readouterr().err


def test_help_reads_neither_variables_nor_file(parser: CommandParser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_TOP_SIZE", "x")
    monkeypatch.setenv(CONFIG_VARIABLE, "/nowhere")
    with pytest.raises(SystemExit) as raised:
        parser.parse_args(["--help"])
    assert raised.value.code == 0


def test_children_of_serve_get_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {f"HEADSTART_{name}": "1" for name in ("PORT", "TLS_CERT", "NUM_BLOCKS")}
    server.cli.serve.parser().leave_to_children(["--config", "my.toml"], environ)
    assert environ == {"HEADSTART_NUM_BLOCKS": "1", CONFIG_VARIABLE: str(Path("my.toml").absolute())}


def test_errors_of_subcommands_name_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        server.cli.keys.parser().parse_args(["new", "--tenant", "a", "--wieght", "3"])
    assert "headstart keys new: error: unrecognized arguments: --wieght 3; did you mean --weight?" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError(2, "No such file or directory", "/nowhere"), "No such file or directory"),
        (OSError("No such device"), "No such device"),  # a library's, without a number
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "invalid start byte"),
        (TimeoutError(), "no answer in time"),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
)
def test_every_error_has_a_reason(error: Exception, text: str) -> None:
    assert text in reason(error)
