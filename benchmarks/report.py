"""Print a bench's results: a table, a plot on request, and one JSON object on the last line for programs.

figures = [Figure("hit_ns_per_block", 312.0, "ns", "8,192 tokens found cached", goal="<= 0.6 x hash")]
options = option_parser("cache", "What it measures").parse_args(argv)
publish(Report("cache", figures), options)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.progress import CLEAR
from worker.common.command_line import CommandParser

Draw = Callable[[Any], None]
"""Draws on a matplotlib `Axes`."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. `name` ends with its unit, as in `ttft_mean_s`, and stays stable: scripts read it."""

    name: str
    value: float
    unit: str = ""
    note: str = ""
    goal: str = ""
    met: bool | None = None
    """The verdict on a goal whose text is no bound such as `<= 2`."""

    @property
    def is_missed(self) -> bool:
        """Return whether the figure has a goal that it does not meet."""
        if self.met is not None:
            return not self.met
        bound = re.match(r"(<=|>=|within|)\s*([\d.]+)$", self.goal)
        if bound is None:
            return False
        value, limit = abs(self.value) if bound[1] == "within" else self.value, float(bound[2])
        return value < limit if bound[1] == ">=" else value > limit


@dataclass(frozen=True, slots=True)
class Report:
    bench: str
    figures: Sequence[Figure]
    env: Mapping[str, object] = field(default_factory=dict)
    """Sizes, repetitions and versions that the figures depend on."""


def percentile(values: Iterable[float], share: float) -> float:
    """The nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def option_parser(bench: str, description: str) -> argparse.ArgumentParser:
    """The options that every bench has; add your own."""
    plain = argparse.RawDescriptionHelpFormatter if "\n" in description else argparse.HelpFormatter
    parser = CommandParser(f"headstart bench {bench}", description=description, formatter_class=plain)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures into FILE (.png, .svg or .pdf)")
    return parser


def publish(report: Report, options: argparse.Namespace, draw: Draw | None = None) -> None:
    """Print the table, draw the plot on request, and end with the JSON. `draw`: by default a bar for every figure."""
    if sys.stderr.isatty():
        print(CLEAR, end="", file=sys.stderr, flush=True)
    print(table(report))
    if options.plot is not None:
        save_plot(options.plot, report, draw)
        print(f"\nplot: {options.plot}")
    if options.json:
        print(to_json(report), flush=True)


def table(report: Report) -> str:
    rows = [
        (figure.name, formatted(figure.value), figure.unit, figure.goal + (" missed" * figure.is_missed), figure.note)
        for figure in report.figures
    ]
    rows.insert(0, ("figure", "value", "unit", "goal", "what"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"headstart bench {report.bench}",
        ", ".join(f"{key} {value}" for key, value in environment(report).items()),
        "",
    ]
    for name, value, unit, goal, note in rows:
        cells = (name.ljust(widths[0]), value.rjust(widths[1]), unit.ljust(widths[2]), goal.ljust(widths[3]), note)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def to_json(report: Report) -> str:
    figures = {figure.name: figure.value for figure in report.figures}
    assert len(figures) == len(report.figures), "two figures have one name"
    missed = {figure.name: figure.goal for figure in report.figures if figure.is_missed}
    command = shlex.join(["headstart", "bench", *sys.argv[1:]])
    return json.dumps(
        {
            "bench": report.bench,
            "command": command,
            "env": environment(report),
            "figures": figures,
            "missed": missed,
        }
    )


def save_plot(path: Path, report: Report, draw: Draw | None) -> None:
    """Raises SystemExit with the reason when the drawing library is not installed."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ModuleNotFoundError as error:
        raise SystemExit(f"--plot: {error}; it comes with `make install`") from error
    canvas = Canvas(figsize=(9, 5), layout="constrained")
    axes = canvas.add_subplot()
    (draw or _bars(report.figures))(axes)
    axes.set_title(f"headstart bench {report.bench}")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path)


def _bars(figures: Sequence[Figure]) -> Draw:
    def draw(axes: Any) -> None:
        bars = axes.barh([figure.name for figure in figures], [figure.value for figure in figures])
        axes.bar_label(bars, [f" {formatted(figure.value)} {figure.unit}" for figure in figures])
        axes.invert_yaxis()
        axes.margins(x=0.2)

    return draw


def environment(report: Report) -> dict[str, object]:
    """The machine and the versions, then what the report adds."""
    return {
        "headstart": _version("headstart"),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **report.env,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def formatted(value: float) -> str:
    """Return a number as the table shows it."""
    if value == 0 or 0.001 <= abs(value) < 1_000_000:
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.3e}"
