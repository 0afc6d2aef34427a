"""The chart's pods as a fleet on a podman network: two gateways, two workers with a tiny random model, Redis."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from openai import OpenAI

from tests.k8s import chart, podman
from tests.k8s.podman import Container, Lab
from tests.waiting import HANG_S

BASE_REPOSITORY, BASE_TAG = podman.BASE.rsplit(":", 1)
VALUES: chart.Values = {
    "models": [
        {
            "name": "tiny",
            "source": "/models/tiny",
            "download": False,
            "volume": {"existingClaim": "models", "readOnly": True},
            "options": {"threads": 1, "kv-cache-memory": "32M"},
            "resources": {"limits": {"memory": "2Gi"}},
            "drain": {"timeoutSeconds": 60},
        }
    ],
    "worker": {"image": {"repository": "localhost/headstart-worker", "tag": "test"}},
    "gateway": {
        "image": {"repository": "localhost/headstart-gateway", "tag": "test"},
        "drain": {"noticeSeconds": 2, "timeoutSeconds": 60},
        "resources": {"limits": {"memory": "512Mi"}},
    },
    "redis": {"builtin": {"image": {"repository": BASE_REPOSITORY, "tag": BASE_TAG}, "memoryMiB": 64}},
}


@dataclass
class Fleet:
    lab: Lab
    redis: Container
    workers: list[Container]
    gateways: list[Container]
    in_rotation: list[Container] = field(default_factory=list)

    def client(self, gateway: Container | None = None) -> OpenAI:
        url = (gateway or self.gateways[0]).url("http") + "/v1"
        return OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=HANG_S)


@contextmanager
def running_fleet(models: Path, folder: Path) -> Iterator[Fleet]:
    """Every pod ready, and the workers known to both gateways. `folder`: for the pods' files."""
    documents = chart.rendered(VALUES)
    with podman.lab(documents, folder, {"models": models}) as lab:
        redis = lab.run(lab.template("rel-headstart-redis"), "rel-headstart-redis-0")
        worker, gateway = lab.template("rel-headstart-tiny"), lab.template("rel-headstart-gateway")
        workers = [lab.run(worker, f"rel-headstart-tiny-{i}") for i in range(2)]
        gateways = [lab.run(gateway, f"rel-headstart-gateway-{i}") for i in range(2)]
        for container in (redis, *workers, *gateways):
            container.wait_ready()
        fleet = Fleet(lab, redis, workers, gateways, list(gateways))
        for container in gateways:
            wait_for_workers(container, 2)
        yield fleet


def scrape(container: Container, port: str) -> str:
    with urllib.request.urlopen(container.url(port) + "/metrics", timeout=HANG_S, context=podman.UNVERIFIED) as answer:
        return str(answer.read().decode())


def wait_for_workers(gateway: Container, count: int, timeout_s: float = HANG_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    body = ""
    while f'"workers":{count}' not in body.replace(" ", ""):
        assert time.monotonic() < deadline_s, f"{body}\n{gateway.logs()}"
        time.sleep(0.1)
        try:
            with urllib.request.urlopen(gateway.url("http") + "/health/ready", timeout=HANG_S) as answer:
                body = answer.read().decode()
        except OSError as error:
            body = str(error)
