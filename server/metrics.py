"""The gateway's Prometheus metrics. Names and labels are a contract with dashboards and alerts.

Label values never come from a client. Counters and histograms are plain numbers of the event loop, exported at the
scrape. Those of prometheus_client take a lock for each change, and a request changes many.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cache.types import Place

_ROUTE_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25)
_TOKEN_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5)
_DELAY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_RATIO = (0.1, 0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0, 10.0)
_SIZES = (1.0, 10.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)
LATENCY_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0),
    *(7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 3600.0),
)

PLACES: Final = ("pool", *get_args(Place))
"""The places from which a worker may take cached blocks."""


def known_places(counts: Mapping[str, int]) -> dict[str, int]:
    """Return a worker's fetched tokens by place, without places unknown to this gateway."""
    return {place: counts[place] for place in PLACES[1:] if counts.get(place, 0) > 0}


class Metric(Collector):
    """A counter, or a histogram if it has `bounds`. Owned by the event loop."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        documentation: str,
        *labels: str,
        bounds: tuple[float, ...] = (),
        total: str = "",
    ) -> None:
        """`total`: the name under which the sum over all label values is exported, too."""
        self.bounds = (*bounds, math.inf)
        self._documentation = documentation
        self._labels = labels
        self._name = name
        self._total = total
        self._created_s = time.time()
        # Per combination: when it began, the sum, and for a histogram the count of each bucket.
        self._series = defaultdict[tuple[object, ...], list[float]](
            lambda: [time.time(), 0.0] + [0.0] * (len(bounds) + 1)
        )
        if not labels:
            self._series[()]
        registry.register(self)

    def start(self, *values: object) -> None:
        """Begin with 0 for these values of the only label: an alert on the first increase needs it."""
        for value in values:
            self._series[value,]

    def inc(self, *values: object, by: float = 1.0) -> None:
        self._series[values][1] += by

    def observe(self, amount: float, *values: object, times: int = 1) -> None:
        series = self._series[values]
        series[1] += amount * times
        series[2 + bisect_left(self.bounds, amount)] += times

    def sum(self, *values: object) -> float:
        """Return the total for these label values; without any, of all series."""
        return self._row(values)[1]

    def cumulative(self, *values: object) -> tuple[float, ...]:
        """Return the number of observations up to each bound, of these label values or of all."""
        return tuple(accumulate(self._row(values)[2:]))

    def _row(self, values: tuple[object, ...]) -> list[float]:
        """Return the series of these label values, or the sum of all series."""
        if values or not self._labels:
            return self._series[values]
        zeros = [0.0] * (len(self.bounds) + 1)
        return [self._created_s, *map(sum, zip(zeros, *(row[1:] for row in self._series.values()), strict=True))]

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        yield self._family(self._name, self._labels, self._series)
        if self._total:
            yield self._family(self._total, (), {(): self._row(())})

    def _family(
        self, name: str, labels: tuple[str, ...], rows: Mapping[tuple[object, ...], list[float]]
    ) -> CounterMetricFamily | HistogramMetricFamily:
        if len(self.bounds) == 1:
            counter = CounterMetricFamily(name, self._documentation, labels=labels)
            for values, (created_s, total, _) in rows.items():
                counter.add_metric(list(map(str, values)), total, created_s)
            return counter
        histogram = HistogramMetricFamily(name, self._documentation, labels=labels)
        for values, (created_s, total, *counts) in rows.items():
            texts = list(map(str, values))
            buckets = zip(map(floatToGoString, self.bounds), accumulate(counts), strict=True)
            histogram.add_metric(texts, list(buckets), total)
            histogram.add_sample(f"{name}_created", dict(zip(labels, texts, strict=True)), created_s)
        return histogram


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.num_in_flight = 0
        gauge = partial(Gauge, registry=self.registry)

        def metric(name: str, text: str, *labels: str, bounds: tuple[float, ...] = ()) -> Metric:
            return Metric(self.registry, f"headstart_{name}", text, *labels, bounds=bounds)

        def by_model(name: str, text: str, *labels: str, bounds: tuple[float, ...] = (), total: str = "") -> Metric:
            """Make a metric under the name that vLLM 0.32 has for it: dashboards made for vLLM find it."""
            labels, total = ("model_name", *labels), total and f"headstart_{total}"
            return Metric(self.registry, f"vllm:{name}", text, *labels, bounds=bounds, total=total)

        in_flight = gauge("headstart_requests_in_flight", "Requests being answered.")
        in_flight.set_function(lambda: self.num_in_flight)
        self.answers = metric("requests", "Answers by route and status.", "route", "status")
        """A `status` of 0: the response never began."""
        self.request_s = metric(
            "request_seconds", "From the arrival of a request to its last byte.", "route", bounds=LATENCY_S
        )
        self.ttft_s = by_model(
            "time_to_first_token_seconds",
            "From the arrival of a request for a stream to its first token.",
            total="time_to_first_token_seconds",
            bounds=LATENCY_S,
        )
        self._token_s = by_model(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of a streamed answer, one observation per answer.",
            total="time_per_output_token_seconds",
            bounds=_TOKEN_S,
        )
        self._gap_s = by_model(
            "inter_token_latency_seconds",
            "Time between tokens of a stream: each token counts, at the mean of its stream.",
            bounds=_TOKEN_S,
        )
        self._answer_s = by_model("e2e_request_latency_seconds", "From arrival to the last token.", bounds=LATENCY_S)
        self._successes = by_model("request_success", "Choices that ended, by reason.", "finished_reason")
        self._prompt_sizes = by_model("request_prompt_tokens", "Tokens of a prompt.", bounds=_SIZES)
        self._answer_sizes = by_model("request_generation_tokens", "Tokens of an answer.", bounds=_SIZES)
        self.route_s = metric(
            "route_seconds", "A routing decision by stage: the index lookup, and the choice.", "stage", bounds=_ROUTE_S
        )
        self.route_s.start("lookup", "choose")
        self.predicted_over_actual_ttft = metric(
            "predicted_over_actual_ttft",
            "Predicted over actual time from the choice of a worker to the first token.",
            bounds=_RATIO,
        )
        # Tokens of prompts and answers are counted together, at the end of a request.
        self.prompt_tokens = by_model("prompt_tokens", "Prompt tokens prefilled, or cached.", total="prompt_tokens")
        self.output_tokens = by_model("generation_tokens", "Tokens generated.", total="output_tokens")
        self._promised_tokens = metric("promised_cached_tokens", "Cached prompt tokens that the index promised.")
        self.cached_tokens = metric("cached_tokens", "Prompt tokens that workers found cached.")
        self._placed_tokens = metric(
            "cached_tokens_by_place", "Cached prompt tokens by where the worker had them from.", "place"
        )
        self._placed_tokens.start(*PLACES)
        self.planned_fetches = metric("planned_fetches", "Requests that workers began with a peer to fetch from.")
        self.copies = metric("chain_copies", "Copies of hot prefixes to other workers.", "end")
        self.copies.start("made", "failed")
        self._promise_errors = metric(
            "promise_error_tokens", "Cached tokens promised too many or too few.", "direction"
        )
        self._promise_errors.start("too_much", "too_little")
        self.removed_lines = metric(
            "client_lines_removed", "Prompts from which a known client line was removed.", "rule"
        )
        self.repairs = metric("repaired_prompts", "Prompts with a shape that their template does not take.", "shape")
        self.refusals = metric("worker_refusals", "Requests refused by a worker.", "status")
        self.lost = metric("workers_lost", "Attempts whose worker was lost.")
        self.resumed = metric("resumed", "Answers continued on another worker.")
        self.restarted = metric("restarted", "Answers restarted on another worker.")
        self.quarantined = metric("quarantined", "Poison requests, which are refused for a while.")
        self.disconnects = metric("client_disconnects", "Clients that left before the end of their answer.")
        self.index_events = metric(
            "index_events", "Index lookups that timed out, and invalid records in Redis.", "event"
        )
        self.drops = metric("requests_dropped", "Requests that were refused or ended early, by error code.", "reason")
        self.task_failures = metric("task_failures", "Background tasks that failed and were started again.", "task")
        self.loop_delay_s = metric(
            "event_loop_delay_seconds",
            "How late the event loop woke a task that sleeps for 10 ms, one observation per sleep.",
            bounds=_DELAY_S,
        )
        self.key_reloads = metric("api_key_reloads", "Times the key file changed.", "outcome")
        self.key_reloads.start("loaded", "rejected")
        self.usage_log_lines = metric("usage_log_lines", "Lines of the usage log.", "outcome")
        self.usage_log_lines.start("written", "lost")
        self.usage_log_failures = metric("usage_log_failures", "Batches of the usage log that could not be written.")
        self._longest_delay_s = 0.0
        longest = gauge(
            "headstart_event_loop_longest_delay_seconds", "The longest event loop delay since the last scrape."
        )
        longest.set_function(self._take_longest_delay)
        self.tasks = gauge("headstart_asyncio_tasks", "Tasks of the event loop.")

    def delayed(self, delay_s: float) -> None:
        """Observe how late the loop woke a task."""
        self.loop_delay_s.observe(delay_s)
        self._longest_delay_s = max(self._longest_delay_s, delay_s)

    def _take_longest_delay(self) -> float:
        longest_s, self._longest_delay_s = self._longest_delay_s, 0.0
        return longest_s

    def count_gaps(self, model: str, gap_s: float, num_gaps: int) -> None:
        """Count the gaps between the tokens of one stream, each with their mean `gap_s`."""
        self._token_s.observe(gap_s, model)
        self._gap_s.observe(gap_s, model, times=num_gaps)

    def count_answer(
        self, model: str, sizes: Iterable[tuple[int, int]], reasons: Mapping[str, int], elapsed_s: float
    ) -> None:
        """Count a complete answer. `sizes`: tokens of each prompt and of its choices. `reasons`: choices by reason."""
        self._answer_s.observe(elapsed_s, model)
        for reason, count in reasons.items():
            self._successes.inc(model, reason, by=count)
        for num_prompt_tokens, num_output_tokens in sizes:
            self._prompt_sizes.observe(num_prompt_tokens, model)
            self._answer_sizes.observe(num_output_tokens, model)

    def count_use(self, model: str, prompt_tokens: int, cached_tokens: Mapping[str, int], output_tokens: int) -> None:
        """Count the tokens of a request that has ended. `cached_tokens`: by place."""
        self.prompt_tokens.inc(model, by=prompt_tokens)
        self.output_tokens.inc(model, by=output_tokens)
        for place, num_tokens in cached_tokens.items():
            self.cached_tokens.inc(by=num_tokens)
            self._placed_tokens.inc(place, by=num_tokens)

    def count_promise(self, promised: int, cached: int) -> None:
        """Count the cached tokens that the index promised, and by how many the worker found more or fewer."""
        self._promised_tokens.inc(by=promised)
        self.correct_promise(promised, cached)

    def correct_promise(self, promised: int, cached: int) -> None:
        """Count by how many cached tokens a promise, or the guess of an adapter, was wrong."""
        if promised != cached:
            self._promise_errors.inc("too_much" if promised > cached else "too_little", by=abs(promised - cached))
