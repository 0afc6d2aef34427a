"""The gateway's Prometheus metrics, all of them, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class GatewayMetrics:
    """Labels take values from our own code only, never from a client."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "headstart_requests", "Answers by route and status.", ("route", "status"), registry=self.registry
        )
        self.in_flight = Gauge("headstart_requests_in_flight", "Requests being answered.", registry=self.registry)
        self.request_s = Histogram(
            "headstart_request_seconds",
            "From the request's arrival to its last byte.",
            ("route",),
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.ttft_s = Histogram(
            "headstart_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            buckets=_LATENCY_S,
            registry=self.registry,
        )
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
        self.refusals = Counter(
            "headstart_worker_refusals", "Requests refused by a worker.", ("status",), registry=self.registry
        )
        self.lost = Counter("headstart_workers_lost", "Attempts whose worker was lost.", registry=self.registry)
        self.resumed = Counter("headstart_resumed", "Answers continued on another worker.", registry=self.registry)
        self.restarted = Counter("headstart_restarted", "Answers begun again elsewhere.", registry=self.registry)
        self.disconnects = Counter("headstart_client_disconnects", "Clients gone early.", registry=self.registry)
        self.index_events = Counter(
            "headstart_index_events",
            "Lookups that got no answer in time, and records in Redis that made no sense.",
            ("event",),
            registry=self.registry,
        )
        self._answers: dict[tuple[str, int], Counter] = {}
        self._timers: dict[str, Histogram] = {}
        self._too_much = self.broken_promises.labels("too_much")
        self._too_little = self.broken_promises.labels("too_little")

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

    def index_event(self, event: str) -> None:
        self.index_events.labels(event).inc()

    def count_prompt(self, promised: int, cached: int) -> None:
        """The index's promise against what the worker found."""
        self.promised_tokens.inc(promised)
        self.cached_tokens.inc(cached)
        if promised > cached:
            self._too_much.inc(promised - cached)
        elif cached > promised:
            self._too_little.inc(cached - promised)

    def refused(self, status: int) -> None:
        self.refusals.labels(str(status) if status in (400, 409, 429, 503) else "other").inc()
