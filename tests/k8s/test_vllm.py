"""`engine: vllm`: the engine and the workers in front of it fit each other, and none of its ports leaves the pod."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import yaml

from tests.certificates import Authority
from tests.k8s import chart
from tests.k8s.chart import EXAMPLES, Document, of_kind, render
from tests.k8s.test_invariants import selects, servers, workloads
from tests.k8s.tools import CHART, PYTHON, call
from tests.waiting import HANG_S, wait_until
from worker import config as worker_config

NAMES: Final = ("everything-on", "ipv6", "vllm-tensor-parallel")
each_vllm = pytest.mark.parametrize("name", NAMES)


def vllm_pods(name: str) -> list[tuple[Document, Document]]:
    """(pod, container of the engine) of every workload with vLLM."""
    pods = [pod for _, pod in workloads(render(name))]
    found = [(pod, c) for pod in pods for c in pod["spec"].get("initContainers", []) if c["name"] == "engine"]
    assert found
    return found


def option(container: Document, flag: str) -> str:
    (value,) = [word.partition("=")[2] for word in container["args"] if word.startswith(f"{flag}=")]
    return str(value)


def with_vllm(**vllm: Any) -> list[Document]:
    return chart.rendered({"worker": {"engine": "vllm", "vllm": vllm}})


def engine_of(documents: list[Document]) -> Document:
    (workers,) = [d for d in of_kind(documents, "StatefulSet") if d["metadata"]["name"].endswith("-smollm2")]
    engine: Document = workers["spec"]["template"]["spec"]["initContainers"][0]
    return engine


@each_vllm
def test_the_engine_listens_on_the_loopback_address_alone(name: str) -> None:
    for _, engine in vllm_pods(name):
        assert option(engine, "--host") == "127.0.0.1"
        events = json.loads(option(engine, "--kv-events-config"))
        for endpoint in (events["endpoint"], events["replay_endpoint"]):
            assert urlsplit(endpoint)[:2] == ("tcp", f"127.0.0.1:{urlsplit(endpoint).port}")
        assert "ports" not in engine
    documents = render(name)
    inner = {8000, *range(5557, 5700)}
    for document in of_kind(documents, "Service", "NetworkPolicy"):
        if document["metadata"]["labels"]["app.kubernetes.io/component"] == "worker":
            assert not {int(n) for n in re.findall(r"'(?:port|targetPort)': (\d+)", str(document))} & inner


@each_vllm
def test_the_engine_has_what_the_workers_need(name: str) -> None:
    for pod, engine in vllm_pods(name):
        assert {"--enable-scale-out", "--enable-prefix-caching", "--enable-prompt-tokens-details"} <= {*engine["args"]}
        assert {"name": "VLLM_SERVER_DEV_MODE", "value": "1"} in engine["env"]
        for _, _, config in servers(pod):
            assert option(engine, "--served-model-name") == config.served_model_name
            assert config.engine == "vllm"
            assert config.engine_url == f"http://127.0.0.1:{option(engine, '--port')}"
            assert not config.events_exposed


@each_vllm
def test_each_rank_has_its_worker_and_no_two_share_a_port(name: str) -> None:
    for pod, engine in vllm_pods(name):
        events = json.loads(option(engine, "--kv-events-config"))
        size = int(next((w.partition("=")[2] for w in engine["args"] if w.startswith("--data-parallel-size=")), "1"))
        configs = [config for _, _, config in servers(pod)]
        assert [c.engine_rank for c in configs] == ([None] if size == 1 else [*range(size)])
        for rank, config in enumerate(configs):  # vLLM adds the rank to the ports of its events
            for ours, theirs in ((config.events, "endpoint"), (config.events_replay, "replay_endpoint")):
                address = urlsplit(events[theirs])
                assert ours == f"tcp://{address.hostname}:{(address.port or 0) + rank}"
        ports = [urlsplit(url).port for c in configs for url in (c.events, c.events_replay, c.advertise_url)]
        ports += [urlsplit(configs[0].engine_url).port]
        others = [c for c in pod["spec"]["initContainers"] if c is not engine]
        ports += [port["containerPort"] for container in others for port in container["ports"]]
        assert len(ports) == len(set(ports))
        assert all(urlsplit(c.advertise_url).port == c.port for c in configs)
        assert len({config.worker_id for config in configs}) == len(configs)


def test_the_most_ranks_fit() -> None:
    documents = with_vllm(dataParallelSize=16, metrics=True)
    (workers,) = [d for d in of_kind(documents, "StatefulSet") if d["metadata"]["name"].endswith("-smollm2")]
    configs = [config for _, _, config in servers(workers["spec"]["template"])]
    ports = [urlsplit(url).port for c in configs for url in (c.events, c.events_replay, c.advertise_url)]
    assert len({*ports, 8000, 8090}) == 3 * 16 + 2
    assert all(
        len(port["name"]) <= 15 for c in workers["spec"]["template"]["spec"]["containers"] for port in c["ports"]
    )


@each_vllm
def test_workers_have_the_gateways_image(name: str) -> None:
    """The engine next to them has the GPUs."""
    documents = render(name)
    (gateway,) = of_kind(documents, "Deployment")
    image = gateway["spec"]["template"]["spec"]["containers"][0]["image"]
    for pod, engine in vllm_pods(name):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert {"shm": "/dev/shm", "models": "/models", "engine-tmp": "/tmp"}.items() <= {
            mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]
        }.items()
        for container in pod["spec"]["containers"]:
            assert container["image"] == image
            assert container["command"] == ["headstart", "worker"]
            assert not any("gpu" in key for key in container["resources"]["limits"])
            assert "shm" not in {mount["name"] for mount in container["volumeMounts"]}


@each_vllm
def test_the_engine_starts_before_its_workers_and_outlives_them(name: str) -> None:
    """A native sidecar gets SIGTERM when every container has ended, and they end when they have drained."""
    for pod, engine in vllm_pods(name):
        assert engine["restartPolicy"] == "Always"
        assert "startupProbe" in engine
        assert engine is pod["spec"]["initContainers"][0]
        assert all(container["name"].startswith("worker") for container in pod["spec"]["containers"])


@each_vllm
def test_no_key_stands_in_arguments_or_variables(name: str) -> None:
    for pod, engine in vllm_pods(name):
        keyed = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "engine-key"]
        files = {config.engine_key_file for _, _, config in servers(pod)}
        assert files == ({"/etc/headstart/engine/key"} if keyed else {None})
        assert (engine["command"] == ["vllm", "serve"]) == (not keyed)
        assert not any("api-key" in word for word in engine["args"])
        assert not any("KEY" in variable["name"] or variable["name"] == "TOKEN" for variable in engine["env"])


def test_the_engine_gets_its_key_from_the_file(tmp_path: Path) -> None:
    engine = engine_of(with_vllm(apiKey={"existingSecret": "some"}))
    (tmp_path / "key").write_text("hush\n")
    stub = tmp_path / "vllm"
    stub.write_text(f"#!{sys.executable}\nimport os, sys\nprint(os.environ['VLLM_API_KEY'], sys.argv[1:])\n")
    stub.chmod(0o755)
    command = [word.replace("/etc/headstart/engine/key", str(tmp_path / "key")) for word in engine["command"]]
    variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run([*command, *engine["args"]], env=variables, capture_output=True, text=True, check=True).stdout
    assert said == f"hush {['serve', *engine['args']]}\n"


def test_purge_can_be_given_up() -> None:
    engine = engine_of(with_vllm(devMode=False))
    assert "VLLM_SERVER_DEV_MODE" not in {variable["name"] for variable in engine["env"]}


class Engine(HTTPServer):
    """Answers every path with `status`, and records the requested paths."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.asked: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Engine)
        self.server.asked.append(self.path)
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(b"vllm:num_requests_running 1\n")

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_the_probes_see_whether_the_engine_is_healthy(engine: Engine) -> None:
    container = engine_of(with_vllm())
    commands = {tuple(container[f"{kind}Probe"]["exec"]["command"]) for kind in ("startup", "readiness", "liveness")}
    (command,) = commands
    asked = [word.replace("127.0.0.1:8000", f"127.0.0.1:{engine.server_port}") for word in command]
    proxied = os.environ | {"http_proxy": "http://127.0.0.1:9"}
    assert subprocess.run(asked, env=proxied, check=False).returncode == 0
    assert engine.asked == ["/health"]
    engine.status = 503
    assert subprocess.run(asked, env=proxied, check=False, stderr=subprocess.DEVNULL).returncode != 0
    assert call(*command).returncode != 0  # nothing listens there


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_relay_gives_metrics_and_nothing_else(engine: Engine, tmp_path: Path, encrypted: bool) -> None:
    (relay,) = [c for pod, _ in vllm_pods("everything-on") for c in pod["spec"]["initContainers"][1:]]
    assert relay["restartPolicy"] == "Always"
    source, host, port, url = relay["args"]
    assert (host, port, url) == ("0.0.0.0", "8090", "http://127.0.0.1:8000/metrics")
    assert source.strip() == (CHART / "files" / "engine_metrics.py").read_text().strip()
    authority = Authority(tmp_path)
    if encrypted:
        authority.issue("tls", "127.0.0.1")
    assert "/etc/headstart/tls/tls.crt" in source
    source = source.replace("/etc/headstart/tls", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        free = sock.getsockname()[1]

    def get(path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", free, timeout=HANG_S)
        if encrypted:
            connection = http.client.HTTPSConnection("127.0.0.1", free, timeout=HANG_S, context=authority.trust())
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    url = f"http://127.0.0.1:{engine.server_port}/metrics"
    with subprocess.Popen([*relay["command"], source, "127.0.0.1", str(free), url]) as process:
        try:
            wait_until(lambda: connects(free))  # and leaves without a word
            assert get("/health") == (200, b"")
            assert engine.asked == []
            assert get("/metrics") == (200, b"vllm:num_requests_running 1\n")
            assert {get(path)[0] for path in ("/v1/models", "/metrics/../health", "/reset_prefix_cache")} == {404}
            engine.status = 500
            assert get("/metrics")[0] == 502
            assert engine.asked == ["/metrics", "/metrics"]
            process.terminate()
            assert process.wait(HANG_S) == 0
        finally:
            process.kill()


def connects(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S):
        return True


def test_the_engines_metrics_do_not_count_as_workers() -> None:
    """Alerts take every target with a model's label for a worker."""
    monitors = {m["metadata"]["name"]: m["spec"] for m in of_kind(render("everything-on"), "ServiceMonitor")}
    assert [e["port"] for e in monitors["rel-llm-engine"]["endpoints"]] == ["engine-metrics"]
    assert "targetLabels" not in monitors["rel-llm-engine"]
    assert [e["port"] for e in monitors["rel-llm-worker"]["endpoints"]] == ["worker", "worker-1"]
    assert monitors["rel-llm-worker"]["targetLabels"] == ["headstart/model"]


def test_only_monitoring_reaches_the_relay() -> None:
    (policy,) = [
        p for p in of_kind(render("everything-on"), "NetworkPolicy") if p["metadata"]["name"] == "rel-llm-foreign"
    ]
    (rule,) = [rule for rule in policy["spec"]["ingress"] if {"protocol": "TCP", "port": 8090} in rule["ports"]]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def test_the_example_of_a_group_fits_the_release_that_it_names(tmp_path: Path) -> None:
    group, service, policy = yaml.safe_load_all((EXAMPLES / "vllm-leaderworkerset.yaml").read_text())
    templates = group["spec"]["leaderWorkerTemplate"]
    leader, follower = templates["leaderTemplate"], templates["workerTemplate"]
    documents = chart.rendered({"metrics": {"serviceMonitor": {"enabled": True}}}, release="chat")
    (monitor,) = [d for d in of_kind(documents, "ServiceMonitor") if d["metadata"]["name"].endswith("-worker")]
    assert selects(monitor["spec"]["selector"], service)
    assert service["spec"]["selector"].items() <= leader["metadata"]["labels"].items()
    assert [port["name"] for port in service["spec"]["ports"]] == [e["port"] for e in monitor["spec"]["endpoints"]]
    assert service["metadata"]["name"] != group["metadata"]["name"], "LeaderWorkerSet makes one of that name"
    secrets = {s["metadata"]["name"]: s["data"] for s in of_kind(documents, "Secret")}
    for volume in leader["spec"]["volumes"]:
        if "secret" in volume:
            assert {item["key"] for item in volume["secret"]["items"]} <= secrets[volume["secret"]["secretName"]].keys()
    (ours,) = [c for n, pod in workloads(documents) if n.endswith("-smollm2") for _, _, c in servers(pod)]
    ((_, container, config),) = servers(leader)
    assert isinstance(config, worker_config.WorkerConfig)
    assert (config.redis, config.redis_username, config.block_size) == (
        ours.redis,
        ours.redis_username,
        ours.block_size,
    )
    assert container["ports"][0]["containerPort"] == config.port == 8100
    (engine,) = leader["spec"]["initContainers"]
    (script,) = engine["args"]
    assert f"--served-model-name={config.served_model_name}" in script
    assert "--host=127.0.0.1 --port=8000" in script
    (events,) = re.findall(r"--kv-events-config='(.*)'", script)
    assert json.loads(events)["endpoint"] == config.events
    assert json.loads(events)["replay_endpoint"] == config.events_replay
    for other in of_kind(documents, "NetworkPolicy", "PodDisruptionBudget", "StatefulSet"):
        if not other["metadata"]["name"].endswith("-default-deny"):
            selector = other["spec"].get("podSelector") or other["spec"]["selector"]
            assert not selects(selector, leader), other["metadata"]["name"]
    reached = [
        peer["podSelector"]
        for other in of_kind(documents, "NetworkPolicy")
        if other["metadata"]["labels"]["app.kubernetes.io/component"] != "worker"  # these name all workers
        for rule in [*other["spec"].get("ingress", []), *other["spec"].get("egress", [])]
        for peer in [*rule.get("from", []), *rule.get("to", [])]
        if "podSelector" in peer
    ]
    assert sum(selects(selector, leader) for selector in reached) == 2, "gateways call it, and Redis lets it in"
    assert all(selects(policy["spec"]["podSelector"], pod) for pod in (leader, follower))
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **pod["metadata"]}, "spec": pod["spec"]}
        for name, pod in (("leader", leader), ("follower", follower))
    ]
    file = tmp_path / "pods.yaml"
    file.write_text(yaml.safe_dump_all([*pods, service, policy]))
    checked = call(PYTHON.parent / "kubernetes-validate", "--strict", "-k", "1.31", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr
