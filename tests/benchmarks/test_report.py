"""The table, the plot and the last line that programs read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import Figure, Report, option_parser, publish, table

REPORT = Report(
    "some",
    [Figure("ttft_mean_s", 0.25, "s", "warm", goal="<= 0.3"), Figure("tokens_per_s", 12345.6, "tokens/s")],
    {"workers": 8},
)


def run(*argv: str) -> None:
    publish(REPORT, option_parser("some", "Something.").parse_args(argv))


def test_json_is_one_object_on_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    run("--json")
    message = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert message["bench"] == "some"
    assert message["figures"] == {"ttft_mean_s": 0.25, "tokens_per_s": 12345.6}
    assert message["env"]["workers"] == 8
    assert message["env"]["python"]


def test_without_json_there_is_only_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    assert capsys.readouterr().out == table(REPORT) + "\n"
    rows = table(REPORT).splitlines()
    assert rows[-2].split() == ["ttft_mean_s", "0.25", "s", "<=", "0.3", "warm"]
    assert rows[-1].split() == ["tokens_per_s", "12,346", "tokens/s"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "plots" / f"some{suffix}"
    run("--plot", str(path))
    assert path.stat().st_size > 1000
