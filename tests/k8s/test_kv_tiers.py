"""Blocks that move: the volume of the KV disk, and the way from worker to worker."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, Final

import pytest

from tests.k8s import chart
from tests.k8s.chart import Document, of_kind, pod_templates, render
from tests.k8s.test_invariants import selects, servers, workloads

_UNITS: Final = {"Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
WITHOUT_POLICIES = ("everything-off", "host-network")
with_policies = pytest.mark.parametrize("name", [name for name in chart.MATRIX if name not in WITHOUT_POLICIES])


def num_bytes(size: str) -> int:
    return int(size[:-2]) * _UNITS[size[-2:]]


def worker_sets(documents: list[Document]) -> dict[str, Document]:
    return {
        d["spec"]["template"]["metadata"]["labels"].get("headstart/model"): d for d in of_kind(documents, "StatefulSet")
    }


def volume_bytes(workers: Document) -> int:
    """The size of the volume `kv`, whichever it is."""
    for claim in workers["spec"].get("volumeClaimTemplates", []):
        if claim["metadata"]["name"] == "kv":
            return num_bytes(claim["spec"]["resources"]["requests"]["storage"])
    (volume,) = [v for v in workers["spec"]["template"]["spec"]["volumes"] if v["name"] == "kv"]
    return num_bytes(volume["emptyDir"]["sizeLimit"])


@pytest.mark.parametrize("model", ["gated", "small"])
def test_blocks_on_disk_fit_into_their_volume(model: str) -> None:
    """They are in a folder that the worker makes: a volume's root belongs to root, and its group may write there."""
    workers = worker_sets(render("everything-on"))[model]
    ((_, container, config),) = servers(workers["spec"]["template"])
    (mount,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "kv"]
    assert PurePosixPath(config.kv_disk).parent == PurePosixPath(mount)
    assert 0.85 * volume_bytes(workers) < config.kv_disk_size <= 0.9 * volume_bytes(workers)
    assert workers["spec"]["template"]["spec"]["securityContext"]["fsGroup"] == 10001


def test_a_claim_outlives_its_pods_and_is_of_its_class() -> None:
    spec = worker_sets(render("everything-on"))["gated"]["spec"]
    (claim,) = [claim for claim in spec["volumeClaimTemplates"] if claim["metadata"]["name"] == "kv"]
    assert claim["spec"]["storageClassName"] == "local"
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Delete", "whenScaled": "Retain"}


def test_only_own_engines_get_tiers() -> None:
    values = {
        "worker": {"engine": "vllm", "kvDisk": {"size": "9Gi", "claim": True}, "options": {"kv-host-memory": "8G"}}
    }
    done = chart.helm("helm4", values)
    assert done.returncode == 0, done.stderr
    for _, pod in workloads(list(chart.parse(done.stdout))):
        for kind, _, config in servers(pod):
            assert kind == "gateway" or (config.kv_disk, config.kv_host_memory) == (None, 0)
    assert "name: kv" not in done.stdout


@with_policies
def test_workers_and_gateways_alone_reach_a_worker(name: str) -> None:
    """POST /blocks and /adopt come over the port that gateways use; adapters have no blocks."""
    documents = render(name)
    pods = dict(pod_templates(documents))
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind(documents, "NetworkPolicy")}
    workers = {own: config for own, pod in pods.items() for kind, _, config in servers(pod) if kind == "worker"}
    own_engines = {own for own, config in workers.items() if config.engine == "headstart"}
    (gateway,) = [own for own in pods if own.endswith("-gateway")]
    for own in workers:
        callers = {caller for caller in pods if may_call(policies[caller], policies[own], pods[caller], pods[own])}
        assert callers == {gateway} | (own_engines if own in own_engines else set())


def may_call(caller_policy: Any, policy: Any, caller: Document, pod: Document, port: int = 8100) -> bool:
    """Return whether both policies allow a connection from one pod of the release to another's port."""
    leaves = any(
        {"protocol": "TCP", "port": port} in rule["ports"]
        and any(selects(peer["podSelector"], pod) for peer in rule.get("to", []))
        for rule in caller_policy.get("egress", [])
    )
    enters = any(
        {"protocol": "TCP", "port": port} in rule["ports"]
        and any(selects(peer["podSelector"], caller) for peer in rule["from"] if "podSelector" in peer)
        for rule in policy["ingress"]
    )
    return leaves and enters
