"""The report as one HTML file: figures side by side, plots as inline SVG, nothing from elsewhere."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from heapq import nlargest
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from benchmarks.replay_load.plots import PLOTS, Plot, title
from benchmarks.replay_load.summary import Run
from benchmarks.report import Figure, formatted


def render(runs: Sequence[Run], figures: Sequence[Figure], facts: Mapping[str, object], command: str) -> str:
    """`facts`: what the figures depend on. `command` repeats the run."""
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        labels=[run.label for run in runs],
        rows=_rows(runs, figures),
        ratios=[(figure.name, formatted(figure.value), figure.note) for figure in figures if figure.unit == "x"],
        plots=[(title(plot), Markup(svg(plot, runs))) for plot in PLOTS if _worth_it(plot, runs)],
        slowest=[(run.label, nlargest(10, run.answered, key=lambda outcome: outcome.ttft_s)) for run in runs],
        errors=[(run.label, run.errors[:20]) for run in runs if run.errors],
        facts=facts,
        command=command,
    )


def svg(plot: Plot, runs: Sequence[Run]) -> str:
    """One plot as an `<svg>` element whose text is text."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "axes.spines.top": False}):
        canvas = Canvas(figsize=(7, 3.6), layout="constrained")
        axes = canvas.add_subplot()
        plot(axes, runs)
        axes.grid(alpha=0.3)
        if len(runs) > 1:
            axes.legend([run.label for run in runs], frameon=False)
        drawing = io.StringIO()
        canvas.savefig(drawing, format="svg", transparent=True)
    text = drawing.getvalue()
    return text[text.index("<svg") :]


def _worth_it(plot: Plot, runs: Sequence[Run]) -> bool:
    """A server that names no worker, and a recording of one turn, have nothing to show in some plots."""
    answered = [outcome for run in runs for outcome in run.answered]
    if plot.__name__.endswith("by_worker"):
        return any(outcome.worker for outcome in answered)
    if plot.__name__.endswith("by_turn"):
        return any(outcome.turn > 1 for outcome in answered)
    return bool(answered)


def _rows(runs: Sequence[Run], figures: Sequence[Figure]) -> list[tuple[str, str, list[str]]]:
    """Name, note, and one cell a run."""
    values = {figure.name: formatted(figure.value) for figure in figures}
    first = [figure for figure in figures if figure.name.startswith(f"{runs[0].label}.")]
    names = [(figure.name.removeprefix(f"{runs[0].label}."), figure.note) for figure in first]
    return [(name, note, [values[f"{run.label}.{name}"] for run in runs]) for name, note in names]
