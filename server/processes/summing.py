"""One /metrics page of several processes: what they counted is added up, and what was counted once is never lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from server.metrics import SUMMED_GAUGES

Labels = tuple[tuple[str, str], ...]
Values = dict[tuple[str, Labels], float]
"""By a sample's name and labels."""
_COUNTED = ("counter", "histogram", "summary")


@dataclass(slots=True, eq=False)
class Family:
    """One metric with all its samples."""

    kind: str
    help: str
    values: Values = field(default_factory=dict)


Page = dict[str, Family]


def read_page(text: str) -> Page:
    """A page in the text format. Raises ValueError."""
    page: Page = {}
    for metric in text_string_to_metric_families(text):
        family = page[metric.name] = Family(metric.type, metric.documentation)
        for sample in metric.samples:
            family.values[sample.name, tuple(sample.labels.items())] = sample.value
    return page


def counted(page: Mapping[str, Family]) -> Page:
    """What of a page stays true when its process is gone."""
    return {name: family for name, family in page.items() if family.kind in _COUNTED}


def summed(pages: Iterable[Mapping[str, Family]]) -> Page:
    """Counters, histograms and `SUMMED_GAUGES` are added; of other gauges, which all processes see alike, the highest
    is taken, and of times of creation the first."""
    whole: Page = {}
    for page in pages:
        for name, family in page.items():
            total = whole.setdefault(name, Family(family.kind, family.help))
            for key, value in family.values.items():
                held = total.values.get(key)
                total.values[key] = value if held is None else _joined(name, family.kind, held, value)
    return whole


def _joined(name: str, kind: str, one: float, other: float) -> float:
    if kind in _COUNTED or name in SUMMED_GAUGES:
        return one + other
    return min(one, other) if name.endswith("_created") else max(one, other)


def written(page: Mapping[str, Family]) -> bytes:
    """In the text format."""
    return generate_latest(_Fixed(page))


class _Fixed(Collector):
    """A registry, as far as `generate_latest` looks at one."""

    def __init__(self, page: Mapping[str, Family]) -> None:
        self._page = page

    def collect(self) -> Sequence[Metric]:
        metrics = []
        for name, family in self._page.items():
            metric = Metric(name, family.help, family.kind)
            for (sample, labels), value in family.values.items():
                metric.add_sample(sample, dict(labels), value)
            metrics.append(metric)
        return metrics
