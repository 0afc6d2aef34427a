"""Pages of metrics added up."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from server.processes.summing import counted, read_page, summed, written


def page(num_requests: int, in_flight: float, num_workers: float, seconds: float) -> str:
    registry = CollectorRegistry()
    Counter("headstart_requests", "Answers.", ("route",), registry=registry).labels("chat").inc(num_requests)
    Gauge("headstart_requests_in_flight", "Open.", registry=registry).set(in_flight)
    Gauge("headstart_workers", "Live.", ("state",), registry=registry).labels("serving").set(num_workers)
    Histogram("headstart_request_seconds", "Took.", buckets=(1.0, 2.0), registry=registry).observe(seconds)
    return generate_latest(registry).decode()


def test_counts_are_added_and_views_are_not() -> None:
    whole = written(summed([read_page(page(2, 1, 4, 0.5)), read_page(page(3, 2, 4, 1.5))])).decode()
    assert 'headstart_requests_total{route="chat"} 5.0' in whole
    assert "headstart_requests_in_flight 3.0" in whole
    assert 'headstart_workers{state="serving"} 4.0' in whole
    assert 'headstart_request_seconds_bucket{le="1.0"} 1.0' in whole
    assert 'headstart_request_seconds_bucket{le="+Inf"} 2.0' in whole
    assert "headstart_request_seconds_sum 2.0" in whole
    for kind in ("headstart_requests_total counter", "headstart_request_seconds histogram"):
        assert whole.count(f"# TYPE {kind}") == 1


def test_of_a_dead_process_its_counts_stay() -> None:
    gone = counted(read_page(page(2, 7, 4, 0.5)))
    whole = written(summed([read_page(page(1, 0, 4, 0.5)), gone])).decode()
    assert 'headstart_requests_total{route="chat"} 3.0' in whole
    assert "headstart_requests_in_flight 0.0" in whole
