"""The parts of a release fit each other, over every set of values. No schema checks that."""

from __future__ import annotations

import argparse
import base64
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from server import config as gateway_config
from server.auth.identity import digest_text, parse_keys
from tests.k8s import chart
from tests.k8s.chart import Document, containers, of_kind, pod_templates, render
from tests.k8s.tools import call
from worker import config as worker_config
from worker.kv_transfer.mover import HANDOVER_S
from worker.kv_transfer.transfers import FLUSH_S

each_render = pytest.mark.parametrize("name", chart.MATRIX)

REDIS_CA = "/etc/headstart/redis-ca/ca.crt"
"""A file that the command line looks for."""
PRE_STOP = re.compile(r"time\.sleep\((\d+)\)")
EXTERNAL = {
    "everything-on": {
        "Secret/hub",
        "Secret/engine",
        "Secret/redis-tls",
        "Secret/gateway-tls",
        "Secret/worker-tls",
        "PersistentVolumeClaim/models",
    },
    "everything-off": {"PersistentVolumeClaim/models"},
    "existing-secrets": {"Secret/ours", "Secret/ours-too", "Secret/public-tls"},
    "sentinel": {"Secret/redis"},
    "cluster-tls": {"Secret/redis", "Secret/redis-ca"},
    "vllm-tensor-parallel": {"Secret/hugging-face"},
    "external": {"Secret/engine"},
}
"""Objects that a set of values expects from outside the chart."""


def selects(selector: Document, pod: Document) -> bool:
    return selector["matchLabels"].items() <= pod["metadata"]["labels"].items()


def workloads(documents: list[Document]) -> list[tuple[str, Document]]:
    return [(name, pod) for name, pod in pod_templates(documents) if not name.endswith("-test")]


def servers(pod: Document) -> Iterator[tuple[str, Document, Any]]:
    """(gateway or worker, container, parsed command line) of every Headstart process in a pod."""
    parsers = {"gateway": gateway_config.parse, "worker": worker_config.parse}
    for container in pod["spec"]["containers"]:
        kind = container["name"].partition("-")[0]
        if kind in parsers:
            # Adapters of engines that run elsewhere learn the URL when they start.
            chosen = ["--engine-url=http://10.0.0.2:8000"] if "--" in container.get("command", []) else []
            words = [*container["args"], *chosen]
            for old, here in {"[$(POD_IP)]": "[fd00::1]", "$(POD_IP)": "10.0.0.1", REDIS_CA: __file__}.items():
                words = [word.replace(old, here) for word in words]
            yield kind, container, parsers[kind](words)


@each_render
def test_workloads_select_their_own_pods_and_no_others(name: str) -> None:
    documents = render(name)
    for workload in of_kind(documents, "Deployment", "StatefulSet"):
        own = workload["metadata"]["name"]
        selected = [
            pod for pod, template in pod_templates(documents) if selects(workload["spec"]["selector"], template)
        ]
        assert selected == [own]


@each_render
def test_budgets_and_policies_select_exactly_one_workload(name: str) -> None:
    documents = render(name)
    for guard in of_kind(documents, "PodDisruptionBudget", "NetworkPolicy"):
        own = guard["metadata"]["name"]
        selector = guard["spec"]["selector" if guard["kind"] == "PodDisruptionBudget" else "podSelector"]
        selected = [pod for pod, template in pod_templates(documents) if selects(selector, template)]
        if own.endswith("-default-deny"):
            assert selected == [pod for pod, _ in pod_templates(documents)]
            assert "ingress" not in guard["spec"]
            assert "egress" not in guard["spec"]
        else:
            assert selected == [own], guard["kind"]


@each_render
def test_services_lead_to_a_port_of_exactly_one_workload(name: str) -> None:
    documents = render(name)
    for service in of_kind(documents, "Service"):
        if service["spec"]["selector"] == chart.ENGINES:
            continue
        selector = {"matchLabels": service["spec"]["selector"]}
        (pod,) = [template for _, template in workloads(documents) if selects(selector, template)]
        names = {port["name"] for container in containers(pod) for port in container.get("ports", [])}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in names
            assert len(port["name"]) <= 15


@each_render
def test_routes_scalers_and_monitors_lead_somewhere(name: str) -> None:
    documents = render(name)
    services = {service["metadata"]["name"]: service for service in of_kind(documents, "Service")}
    for route in of_kind(documents, "Ingress"):
        for rule in route["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                backend = path["backend"]["service"]
                assert backend["port"]["name"] in {p["name"] for p in services[backend["name"]]["spec"]["ports"]}
    for route in of_kind(documents, "HTTPRoute"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                assert backend["port"] in {p["port"] for p in services[backend["name"]]["spec"]["ports"]}
    for monitor in of_kind(documents, "ServiceMonitor"):
        selected = [s for s in services.values() if selects(monitor["spec"]["selector"], s)]
        component = monitor["metadata"]["labels"]["app.kubernetes.io/component"]
        assert len(selected) == len([p for _, p in workloads(documents) if _component(p) == component])
        scraped = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
        offered = [{port["name"] for port in service["spec"]["ports"]} for service in selected]
        assert scraped <= set().union(*offered)
        if not monitor["metadata"]["name"].endswith("-engine"):
            assert all(names - {"engine-metrics"} <= scraped for names in offered)
    for workload in of_kind(documents, "StatefulSet"):
        assert workload["spec"]["serviceName"] in services


def _component(pod: Document) -> str:
    return str(pod["metadata"]["labels"]["app.kubernetes.io/component"])


@each_render
def test_network_policies_open_the_used_ports(name: str) -> None:
    """Each policy opens the ports that its pod serves and those that it calls."""
    documents = render(name)
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind(documents, "NetworkPolicy")}
    if not policies:
        return
    for own, pod in workloads(documents):
        served = {port["containerPort"] for container in containers(pod) for port in container.get("ports", [])}
        opened = {port["port"] for rule in policies[own].get("ingress", []) for port in rule["ports"]}
        assert opened == served
    workers = {own for own, pod in workloads(documents) if _component(pod) == "worker"}  # they call no adapter
    for own, policy in policies.items():
        for rule in policy.get("egress", []):
            for peer in rule.get("to", []):
                if peer == {"podSelector": {"matchLabels": chart.ENGINES}}:
                    continue
                targets = [pod for _, pod in workloads(documents) if selects(peer["podSelector"], pod)]
                assert targets, (own, peer)
                served = {port["containerPort"] for t in targets for c in containers(t) for port in c.get("ports", [])}
                assert {port["port"] for port in rule["ports"]} == served - (
                    {8001} if own.endswith("-test") else {8090, 8101} if own in workers else {8090}
                )
        for rule in policy.get("ingress", []):
            for peer in rule.get("from", []):
                if "podSelector" in peer:
                    assert any(selects(peer["podSelector"], pod) for _, pod in pod_templates(documents)), (own, peer)


@each_render
def test_probes_ask_ports_that_exist(name: str) -> None:
    for _, pod in workloads(render(name)):
        sidecars = [c for c in pod["spec"].get("initContainers", []) if c.get("restartPolicy") == "Always"]
        for container in [*sidecars, *pod["spec"]["containers"]]:
            ports = {port["name"] for port in container.get("ports", [])}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container[kind]
                assert "initialDelaySeconds" not in probe
                assert "exec" in probe or probe["httpGet"]["port"] in ports


@each_render
def test_a_scaled_workload_names_no_replicas(name: str) -> None:
    documents = render(name)
    scaled = {
        (target["kind"], target["name"])
        for scaler in of_kind(documents, "HorizontalPodAutoscaler", "ScaledObject")
        for target in [scaler["spec"]["scaleTargetRef"]]
    }
    for workload in of_kind(documents, "Deployment", "StatefulSet"):
        key = (workload["kind"], workload["metadata"]["name"])
        assert ("replicas" not in workload["spec"]) == (key in scaled)
        scaled.discard(key)
    assert not scaled, "a scaler without a target"


@each_render
def test_what_pods_refer_to_exists_or_is_said_to(name: str) -> None:
    documents = render(name)
    keys = {
        f"{document['kind']}/{document['metadata']['name']}": document.get("data", {}).keys()
        for document in of_kind(documents, "Secret", "ConfigMap")
    }
    external = set(EXTERNAL.get(name, ()))
    used = set()
    for _, pod in pod_templates(documents):
        for reference, items in _references(pod):
            if reference in external:
                used.add(reference)
            else:
                assert set(items) <= keys[reference]
    assert used == external


def _references(pod: Document) -> Iterator[tuple[str, list[str]]]:
    for volume in pod["spec"].get("volumes", []):
        if "secret" in volume:
            items = [item["key"] for item in volume["secret"].get("items", [])]
            yield f"Secret/{volume['secret']['secretName']}", items
        elif "configMap" in volume:
            yield f"ConfigMap/{volume['configMap']['name']}", []
        elif "persistentVolumeClaim" in volume:
            yield f"PersistentVolumeClaim/{volume['persistentVolumeClaim']['claimName']}", []
    for container in containers(pod):
        for variable in container.get("env", []):
            assert "secretKeyRef" not in variable.get("valueFrom", {}), "secrets come as files"


@each_render
def test_mounts_have_volumes(name: str) -> None:
    documents = render(name)
    claims = {
        d["metadata"]["name"]: [c["metadata"]["name"] for c in d["spec"].get("volumeClaimTemplates", [])]
        for d in of_kind(documents, "StatefulSet")
    }
    for own, pod in pod_templates(documents):
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])} | set(claims.get(own, []))
        mounted = [mount for container in containers(pod) for mount in container.get("volumeMounts", [])]
        assert {mount["name"] for mount in mounted} == volumes


@each_render
def test_container_arguments_parse_with_the_real_command_lines(name: str) -> None:
    parsed = set()
    for _, pod in workloads(render(name)):
        for kind, container, config in servers(pod):
            parsed.add(kind)
            assert config.cluster_secret_file == "/etc/headstart/cluster/secret"
            ports = {port["containerPort"] for port in container["ports"]}
            assert ports == ({config.port, config.ops_port} if kind == "gateway" else {config.port})
    assert parsed == {"gateway", "worker"}


def test_the_command_line_can_refuse() -> None:
    with pytest.raises((SystemExit, ValueError, argparse.ArgumentError)):
        worker_config.parse(["--tensor-parallel-size=2"])


def test_the_generated_key_is_the_one_that_the_key_file_lets_in() -> None:
    documents = render("everything-on")
    (secret,) = [d for d in of_kind(documents, "Secret") if d["metadata"]["name"].endswith("-api-keys")]
    data = {key: base64.b64decode(value) for key, value in secret["data"].items()}
    (entry,) = parse_keys(data["keys.toml"].decode()).keys
    assert len(data["api-key"]) > 40
    assert entry.digest == digest_text(data["api-key"])
    assert data["api-key"] not in data["keys.toml"]


@pytest.mark.parametrize("name", ["everything-on", "existing-secrets"])
def test_gateways_are_given_the_key_file_and_the_test_a_key(name: str) -> None:
    items = {
        own: {item["path"]: (volume["secret"]["secretName"], item["key"])
              for volume in pod["spec"].get("volumes", []) if volume["name"] in ("api-keys", "api-key")
              for item in volume["secret"]["items"]}
        for own, pod in pod_templates(render(name))
    }  # fmt: skip
    secret, file, plain = {
        "everything-on": ("rel-llm-api-keys", "keys.toml", "api-key"),
        "existing-secrets": ("ours-too", "who.toml", "one"),
    }[name]
    (gateway,) = [own for own in items if own.endswith("-gateway")]
    (test,) = [own for own in items if own.endswith("-test")]
    assert items.pop(gateway) == {"keys.toml": (secret, file)}
    assert items.pop(test) == {"api-key": (secret, plain)}
    assert not any(items.values())
    (pod,) = [pod for own, pod in pod_templates(render(name)) if own == gateway]
    ((_, _, config),) = servers(pod)
    assert config.api_keys == "/etc/headstart/api-keys/keys.toml"


@each_render
def test_tls_is_spoken_by_all_or_by_none(name: str) -> None:
    """Ports, probes, addresses and monitors agree; a gateway gets the workers' CA and never their key."""
    documents = render(name)
    parsed: dict[str, list[Any]] = {"gateway": [], "worker": []}
    for _, pod in workloads(documents):
        for kind, container, config in servers(pod):
            parsed[kind].append(config)
            schemes = {
                container[probe]["httpGet"].get("scheme", "HTTP")
                for probe in ("startupProbe", "readinessProbe", "livenessProbe")
            }
            assert schemes == {"HTTP" if config.tls_cert is None else "HTTPS"}
            if config.worker_ca is not None:
                (ca,) = [v["secret"]["items"] for v in pod["spec"]["volumes"] if v["name"] == "worker-ca"]
                assert [item["path"] for item in ca] == ["ca.crt"]
    (gateway,) = parsed["gateway"]
    for worker in parsed["worker"]:
        assert (worker.tls_cert is None) == (gateway.worker_ca is None)
        if worker.engine == "headstart":
            assert (worker.worker_ca, worker.worker_tls_name) == (gateway.worker_ca, gateway.worker_tls_name)
        assert str(worker.advertise_url).startswith("http:" if worker.tls_cert is None else "https:")
    for monitor in of_kind(documents, "ServiceMonitor"):
        component = monitor["metadata"]["labels"]["app.kubernetes.io/component"]
        plain = parsed[component][0].tls_cert is None
        for endpoint in monitor["spec"]["endpoints"]:
            assert endpoint.get("scheme", "http") == ("http" if plain else "https")
            assert plain or endpoint["tlsConfig"]["serverName"]
    (test,) = [pod for own, pod in pod_templates(documents) if own.endswith("-test")]
    address = test["spec"]["containers"][0]["args"][1]
    assert address.startswith("http:" if gateway.tls_cert is None else "https:")


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://collector.tracing:4318", 4318),
        ("https://collector.example/v1/traces", 443),
        ("http://collector", 80),
        ("http://[fd00::1]:4318/v1/traces", 4318),
    ],
)
def test_the_way_to_the_collector_is_open(endpoint: str, port: int) -> None:
    for policy in of_kind(chart.rendered({"tracing": {"endpoint": endpoint}}), "NetworkPolicy"):
        own = policy["metadata"]["name"]
        opened = [rule["ports"][0]["port"] for rule in policy["spec"].get("egress", []) if "to" not in rule]
        assert (port in opened) == (own.endswith(("-gateway", "-smollm2"))), own


def test_the_settings_of_the_values_reach_the_command_lines() -> None:
    for _, pod in workloads(render("everything-on")):
        for kind, _, config in servers(pod):
            assert config.otlp_endpoint == "http://collector.tracing:4318"
            assert kind == "worker" or config.ops_key_file == "/etc/headstart/ops/key"


@each_render
def test_variables_in_arguments_are_set(name: str) -> None:
    for _, pod in workloads(render(name)):
        for container in containers(pod):
            variables = {variable["name"] for variable in container.get("env", [])}
            for argument in container.get("args", []):
                assert set(re.findall(r"\$\((\w+)\)", argument)) <= variables


@each_render
def test_the_grace_period_is_longer_than_pre_stop_and_drain(name: str) -> None:
    for _, pod in workloads(render(name)):
        grace_s = pod["spec"]["terminationGracePeriodSeconds"]
        for kind, container, config in servers(pod):
            command = (
                container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["time.sleep(0)"])
            )
            match = PRE_STOP.search(command[-1])
            assert match is not None
            then_s = HANDOVER_S + FLUSH_S + 3 if kind == "worker" else 10
            before_s = int(match[1]) if kind == "worker" else config.drain_notice_s
            assert grace_s >= before_s + config.drain_grace_s + then_s


@each_render
def test_gateways_know_every_model_and_the_registry(name: str) -> None:
    documents = render(name)
    (gateway,) = [pod for _, pod in workloads(documents) if _component(pod) == "gateway"]
    ((_, _, config),) = servers(gateway)
    services = {service["metadata"]["name"] for service in of_kind(documents, "Service")}
    workers = [(own, c) for own, pod in workloads(documents) for kind, _, c in servers(pod) if kind == "worker"]
    assert sorted(config.workers) == sorted(f"dns:{own}:{worker.port}" for own, worker in workers)
    assert {own for own, _ in workers} <= services
    for own, worker in workers:
        assert (worker.redis, worker.redis_prefix, worker.redis_shards) == (
            config.redis,
            config.redis_prefix,
            config.redis_shards,
        ), own


@each_render
def test_names_leave_room_for_what_kubernetes_appends(name: str) -> None:
    for document in render(name):
        limit = 52 if document["kind"] == "StatefulSet" else 63
        assert len(document["metadata"]["name"]) <= limit
        for value in document["metadata"].get("labels", {}).values():
            assert len(value) <= 63


def test_a_plain_upgrade_does_not_restart_pods() -> None:
    """Nothing in a pod's template names the chart's version, except the image's tag."""
    for _, pod in workloads(render("defaults")):
        labels = pod["metadata"]["labels"]
        assert "helm.sh/chart" not in labels
        assert "app.kubernetes.io/version" not in labels


def test_a_worker_rollout_needs_no_spare_gpu() -> None:
    for workload in of_kind(render("everything-on"), "StatefulSet"):
        assert workload["spec"].get("updateStrategy", {"type": "RollingUpdate"})["type"] == "RollingUpdate"
    (gateway,) = of_kind(render("everything-on"), "Deployment")
    assert gateway["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_gpus_are_requested_as_they_are_limited() -> None:
    pods = {
        pod["metadata"]["labels"]["headstart/model"]: pod
        for _, pod in workloads(render("everything-on"))
        if _component(pod) == "worker"
    }
    resources = {model: containers(pod)[0]["resources"] for model, pod in pods.items()}
    assert resources["foreign"]["limits"]["nvidia.com/gpu"] == resources["foreign"]["requests"]["nvidia.com/gpu"] == 8
    assert resources["llama"]["limits"]["nvidia.com/gpu"] == resources["llama"]["requests"]["nvidia.com/gpu"] == 1
    assert resources["small"]["limits"]["nvidia.com/mig-1g.10gb"] == 1
    assert not any("nvidia" in key for key in resources["gated"]["limits"])


def test_a_renewed_certificate_restarts_redis(tmp_path: Path) -> None:
    """Redis reads its certificate only when it starts."""
    (redis,) = [p["spec"]["containers"][0] for n, p in workloads(render("everything-on")) if n.endswith("-redis")]
    changes = {"/run/redis/": f"{tmp_path}/run-", "/tls/": f"{tmp_path}/", "redis-server": "true", "redis-cli": "true"}

    def runs(*command: str) -> bool:
        words = [reduce(lambda word, change: word.replace(*change), changes.items(), word) for word in command]
        return call(*words).returncode == 0

    lives = []
    for certificate in ("old", "new"):
        (tmp_path / "tls.crt").write_text(certificate)
        lives.append(runs(*redis["livenessProbe"]["exec"]["command"]))
        assert runs(*redis["command"])
        lives.append(runs(*redis["livenessProbe"]["exec"]["command"]))
    assert lives == [False, True, False, True]
