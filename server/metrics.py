"""The gateway's Prometheus metrics. Names and labels are a contract with dashboards and alerts."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_ROUTE_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
_TOKEN_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5)
_DELAY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class GatewayMetrics:
    """Labels take values from our own code only, never from a client."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "headstart_requests", "Answers by route and status.", ("route", "status"), registry=self.registry
        )
        self.num_in_flight = 0
        in_flight = Gauge("headstart_requests_in_flight", "Requests being answered.", registry=self.registry)
        in_flight.set_function(lambda: self.num_in_flight)
        self.request_s = Histogram(
            "headstart_request_seconds",
            "From the request's arrival to its last byte.",
            ("route",),
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.ttft_s = Histogram(
            "headstart_time_to_first_token_seconds",
            "From the arrival of a request for a stream to its first token.",
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.token_s = Histogram(
            "headstart_time_per_output_token_seconds",
            "Mean time between the tokens of a streamed answer, one observation an answer.",
            buckets=_TOKEN_S,
            registry=self.registry,
        )
        self._route_s = Histogram(
            "headstart_route_seconds",
            "A routing decision by stage: the index's lookup, and the choice.",
            ("stage",),
            buckets=_ROUTE_S,
            registry=self.registry,
        )
        self._route_stages = {stage: self._route_s.labels(stage) for stage in ("lookup", "choose")}
        self.prompt_tokens = Counter("headstart_prompt_tokens", "Prompt tokens accepted.", registry=self.registry)
        self.output_tokens = Counter("headstart_output_tokens", "Tokens generated.", registry=self.registry)
        self.promised_tokens = Counter(
            "headstart_promised_cached_tokens", "Prompt tokens that the index promised.", registry=self.registry
        )
        self.cached_tokens = Counter(
            "headstart_cached_tokens", "Prompt tokens that workers found cached.", registry=self.registry
        )
        self.broken_promises = Counter(
            "headstart_promise_error_tokens",
            "Cached tokens promised too many or too few.",
            ("direction",),
            registry=self.registry,
        )
        self._continued = Counter(
            "headstart_continued_turns",
            "Turns that bring back an answer of this gateway, as the tokens it had or as others.",
            ("answer",),
            registry=self.registry,
        )
        self._same_answer = self._continued.labels("same")
        self._other_answer = self._continued.labels("other")
        self.refusals = Counter(
            "headstart_worker_refusals", "Requests refused by a worker.", ("status",), registry=self.registry
        )
        self.lost = Counter("headstart_workers_lost", "Attempts whose worker was lost.", registry=self.registry)
        self.resumed = Counter("headstart_resumed", "Answers continued on another worker.", registry=self.registry)
        self.restarted = Counter("headstart_restarted", "Answers begun again elsewhere.", registry=self.registry)
        self.quarantined = Counter(
            "headstart_quarantined", "Requests that broke a worker and are refused for a while.", registry=self.registry
        )
        self.disconnects = Counter("headstart_client_disconnects", "Clients gone early.", registry=self.registry)
        self.index_events = Counter(
            "headstart_index_events",
            "Lookups that got no answer in time, and records in Redis that made no sense.",
            ("event",),
            registry=self.registry,
        )
        self._drops = Counter(
            "headstart_requests_dropped",
            "Requests that were refused or broke off, by the error's code.",
            ("reason",),
            registry=self.registry,
        )
        self.tasks = Gauge("headstart_asyncio_tasks", "Tasks of the event loop.", registry=self.registry)
        self._task_failures = Counter(
            "headstart_task_failures",
            "Times a background task failed and was started again, by task.",
            ("task",),
            registry=self.registry,
        )
        self.loop_delay_s = Histogram(
            "headstart_event_loop_delay_seconds",
            "How late the event loop woke a task that sleeps for 10 ms, one observation a sleep.",
            buckets=_DELAY_S,
            registry=self.registry,
        )
        self._longest_delay = Gauge(
            "headstart_event_loop_longest_delay_seconds",
            "The longest of those delays since the last scrape.",
            registry=self.registry,
        )
        self._longest_delay_s = 0.0
        self._longest_delay.set_function(self._take_longest_delay)
        self._key_reloads = Counter(
            "headstart_api_key_reloads", "Times the key file changed.", ("outcome",), registry=self.registry
        )
        for outcome in ("loaded", "rejected"):  # from zero on: an alert on the first increase needs it
            self._key_reloads.labels(outcome)
        self._answers: dict[tuple[str, int], Counter] = {}
        self._timers: dict[str, Histogram] = {}
        self._too_much = self.broken_promises.labels("too_much")
        self._too_little = self.broken_promises.labels("too_little")

    def follow_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count the loop's tasks at every scrape."""
        self.tasks.set_function(lambda: len(asyncio.all_tasks(loop)))

    def delayed(self, delay_s: float) -> None:
        """The loop woke a sleeper so much too late."""
        self.loop_delay_s.observe(delay_s)
        self._longest_delay_s = max(self._longest_delay_s, delay_s)

    def _take_longest_delay(self) -> float:
        longest_s, self._longest_delay_s = self._longest_delay_s, 0.0
        return longest_s

    def answered(self, route: str, status: int, elapsed_s: float) -> None:
        """`status` 0: the response never began."""
        key = (route, status)
        counter = self._answers.get(key)
        if counter is None:
            counter = self._answers[key] = self.requests.labels(route, str(status))
        counter.inc()
        timer = self._timers.get(route)
        if timer is None:
            timer = self._timers[route] = self.request_s.labels(route)
        timer.observe(elapsed_s)

    def dropped(self, reason: str) -> None:
        """`reason`: the code of an error of ours, or its type where it has none."""
        self._drops.labels(reason).inc()

    def routed(self, stage: str, elapsed_s: float) -> None:
        """`stage`: lookup or choose."""
        self._route_stages[stage].observe(elapsed_s)

    def index_event(self, event: str) -> None:
        self.index_events.labels(event).inc()

    def task_failed(self, task: str) -> None:
        self._task_failures.labels(task).inc()

    def keys_reloaded(self, ok: bool) -> None:
        self._key_reloads.labels("loaded" if ok else "rejected").inc()

    def count_prompt(self, promised: int, cached: int) -> None:
        """The index's promise against what the worker found."""
        self.promised_tokens.inc(promised)
        self.cached_tokens.inc(cached)
        if promised > cached:
            self._too_much.inc(promised - cached)
        elif cached > promised:
            self._too_little.inc(cached - promised)

    def continued(self, *, same: bool) -> None:
        """A turn that holds an answer: only the same tokens are found in a cache."""
        (self._same_answer if same else self._other_answer).inc()

    def refused(self, status: int) -> None:
        self.refusals.labels(str(status) if status in (400, 409, 429, 503) else "other").inc()
