"""The options of `headstart bench replay`."""

from __future__ import annotations

import pytest

from benchmarks.replay import command_of, options_of


@pytest.mark.parametrize("option", ["--rate", "--speed", "--timeout"])
@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_a_pace_is_above_zero(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        options_of(["file", "--url", "http://h", f"{option}={value}"])
    assert f"{option}: must be at least 0.001, got {value}" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--api-key", "sk-1"], ["--api-key=sk-1"]])
def test_a_page_has_no_key(given: list[str]) -> None:
    assert "sk-1" not in command_of(["file", *given], "sk-1")
    assert command_of(["file"], "") == "headstart bench replay file"
