"""The gateway's Prometheus metrics. Names and labels are a contract with dashboards and alerts."""

from __future__ import annotations

import asyncio
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_ROUTE_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
_TOKEN_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5)
_DELAY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class GatewayMetrics:
    """Labels take values from our own code only, never from a client. Children of labels are looked up once."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)

        self.num_in_flight = 0
        gauge("headstart_requests_in_flight", "Requests being answered.").set_function(lambda: self.num_in_flight)
        requests = counter("headstart_requests", "Answers by route and status.", ("route", "status"))
        self._answers = cache(requests.labels)
        request_s = histogram(
            "headstart_request_seconds",
            "From the arrival of a request to its last byte.",
            ("route",),
            buckets=_LATENCY_S,
        )
        self._request_s = cache(request_s.labels)
        self.ttft_s = histogram(
            "headstart_time_to_first_token_seconds",
            "From the arrival of a request for a stream to its first token.",
            buckets=_LATENCY_S,
        )
        self.token_s = histogram(
            "headstart_time_per_output_token_seconds",
            "Mean time between the tokens of a streamed answer, one observation per answer.",
            buckets=_TOKEN_S,
        )
        route_s = histogram(
            "headstart_route_seconds",
            "A routing decision by stage: the index lookup, and the choice.",
            ("stage",),
            buckets=_ROUTE_S,
        )
        self._route_stages = {stage: route_s.labels(stage) for stage in ("lookup", "choose")}
        self.prompt_tokens = counter("headstart_prompt_tokens", "Prompt tokens accepted.")
        self.output_tokens = counter("headstart_output_tokens", "Tokens generated.")
        self._promised_tokens = counter(
            "headstart_promised_cached_tokens", "Cached prompt tokens that the index promised."
        )
        self.cached_tokens = counter("headstart_cached_tokens", "Prompt tokens that workers found cached.")
        promise_errors = counter(
            "headstart_promise_error_tokens", "Cached tokens promised too many or too few.", ("direction",)
        )
        self._promised_too_much = promise_errors.labels("too_much")
        self._promised_too_little = promise_errors.labels("too_little")
        continued = counter(
            "headstart_continued_turns",
            "Turns that bring back an answer of this gateway, as its own tokens or as others.",
            ("answer",),
        )
        self._continued = {True: continued.labels("same"), False: continued.labels("other")}
        self._refusals = counter("headstart_worker_refusals", "Requests refused by a worker.", ("status",))
        self.lost = counter("headstart_workers_lost", "Attempts whose worker was lost.")
        self.resumed = counter("headstart_resumed", "Answers continued on another worker.")
        self.restarted = counter("headstart_restarted", "Answers restarted on another worker.")
        self.quarantined = counter("headstart_quarantined", "Poison requests, which are refused for a while.")
        self.disconnects = counter("headstart_client_disconnects", "Clients that left before the end of their answer.")
        self._index_events = counter(
            "headstart_index_events", "Lookups without an answer in time, and invalid records in Redis.", ("event",)
        )
        self._drops = counter(
            "headstart_requests_dropped", "Requests that were refused or broke off, by error code.", ("reason",)
        )
        self._tasks = gauge("headstart_asyncio_tasks", "Tasks of the event loop.")
        self._task_failures = counter(
            "headstart_task_failures", "Background tasks that failed and were started again.", ("task",)
        )
        self._loop_delay_s = histogram(
            "headstart_event_loop_delay_seconds",
            "How late the event loop woke a task that sleeps for 10 ms, one observation per sleep.",
            buckets=_DELAY_S,
        )
        self._longest_delay_s = 0.0
        gauge(
            "headstart_event_loop_longest_delay_seconds", "The longest of those delays since the last scrape."
        ).set_function(self._take_longest_delay)
        self._key_reloads = counter("headstart_api_key_reloads", "Times the key file changed.", ("outcome",))
        for outcome in ("loaded", "rejected"):  # from zero on: an alert on the first increase needs it
            self._key_reloads.labels(outcome)

    def follow_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count the loop's tasks at every scrape."""
        self._tasks.set_function(lambda: len(asyncio.all_tasks(loop)))

    def delayed(self, delay_s: float) -> None:
        """Observe how late the loop woke a task."""
        self._loop_delay_s.observe(delay_s)
        self._longest_delay_s = max(self._longest_delay_s, delay_s)

    def _take_longest_delay(self) -> float:
        longest_s, self._longest_delay_s = self._longest_delay_s, 0.0
        return longest_s

    def answered(self, route: str, status: int, elapsed_s: float) -> None:
        """Count an answer. `status` 0: the response never began."""
        self._answers(route, status).inc()
        self._request_s(route).observe(elapsed_s)

    def dropped(self, reason: str) -> None:
        """Count a request that ended with an error, by its code, or by its type where it has none."""
        self._drops.labels(reason).inc()

    def routed(self, stage: str, elapsed_s: float) -> None:
        """Observe a stage of a routing decision: lookup or choose."""
        self._route_stages[stage].observe(elapsed_s)

    def index_event(self, event: str) -> None:
        self._index_events.labels(event).inc()

    def task_failed(self, task: str) -> None:
        self._task_failures.labels(task).inc()

    def keys_reloaded(self, ok: bool) -> None:
        self._key_reloads.labels("loaded" if ok else "rejected").inc()

    def count_prompt(self, promised: int, cached: int) -> None:
        """Compare the index's promise with what the worker found."""
        self._promised_tokens.inc(promised)
        self.cached_tokens.inc(cached)
        if promised > cached:
            self._promised_too_much.inc(promised - cached)
        elif cached > promised:
            self._promised_too_little.inc(cached - promised)

    def continued(self, *, same: bool) -> None:
        """Count a turn that holds an answer: only the same tokens are found in a cache."""
        self._continued[same].inc()

    def refused(self, status: int) -> None:
        self._refusals.labels(str(status) if status in (400, 409, 429, 503) else "other").inc()
