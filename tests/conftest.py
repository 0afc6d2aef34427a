"""Settings of every test, however and wherever it is started."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.redis_server import REDIS_7, has_tls

# Threads of torch that wait for each other sleep, in every process that a test starts too: three tests run at once, and
# threads that wait in a loop would take the cores of the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No balancer is in front of the gateways of tests, but for those that give the option.
os.environ.setdefault("HEADSTART_DRAIN_NOTICE_S", "0")

# The speed of the machine decides nothing: an example has no deadline, and may be slow to draw.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
settings.register_profile("deep", settings.get_profile("tests"), max_examples=300)
settings.register_profile("mutants", settings.get_profile("tests"), max_examples=50, derandomize=True)
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Choose more examples for the long form, and undo what a shell does to its background jobs.

    They ignore Ctrl-C, and so would the servers that tests stop.
    """
    if "not deep" not in config.option.markexpr and "deep" in config.option.markexpr:
        settings.load_profile("deep")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what a folder's tests have in common: the command that runs them."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in ("benchmarks", "tools"):
            item.add_marker(pytest.mark.e2e)
        elif folder in ("browser", "clients", "faults", "k8s", "vllm"):
            item.add_marker(folder)


def pytest_report_header() -> str | None:
    if REDIS_7 and has_tls(REDIS_7):
        return None
    return "without a redis-server 7 with TLS on the PATH: tests of ACLs, TLS, Cluster and Sentinel are skipped"
