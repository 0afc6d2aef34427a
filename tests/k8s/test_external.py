"""Adapters of the chart for engines that run already: each engine gets one, and the rendered commands serve them."""

from __future__ import annotations

import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from tests.certificates import Authority
from tests.e2e.engine_fleet import EngineFleet, Program
from tests.e2e.serving import free_ports
from tests.faults.part import metrics
from tests.k8s.chart import CRON, Document, of_kind, pod_templates, render, rendered
from tests.k8s.test_escape_hatches import PAGE, check_schemas, one, pod
from tests.k8s.tools import CHART
from tests.tiny_model import write_tiny_model
from tests.waiting import HANG_S, wait_until

CHOOSER: Final = CHART / "files" / "choose_engine.py"


def adapters(documents: list[Document], name: str) -> list[Document]:
    found: list[Document] = pod(documents, f"-{name}")["spec"]["containers"]
    return found


def test_each_engine_of_a_list_has_its_worker() -> None:
    """Three engines of two ranks over two pods: the larger part of a pod is two engines."""
    found = adapters(render("external"), "llama")
    assert [c["name"] for c in found] == ["worker", "worker-1", "worker-2", "worker-3"]
    for container in found:
        words = container["command"]
        assert words[4:] == [
            *("$(POD_NAME)", "2", "2", "http://vllm-0.vllm.other:8000", "https://b.example", "http://10.0.0.9:8000"),
            *("--", "headstart", "worker"),
        ]
        assert {"--engine=vllm", "--events=auto", "--events-exposed"} <= {*container["args"]}
        assert "--engine-key-file=/etc/headstart/engine/key" in container["args"]
        assert container["image"].startswith("headstart-gateway:")


def test_pods_are_found_by_labels_or_by_a_service() -> None:
    documents = render("external")
    service = one(documents, "Service", "-small-engines")["spec"]
    assert (service["clusterIP"], service["selector"]) == ("None", {"app": "vllm"})
    found = adapters(documents, "small")
    assert len(found) == 4
    assert "dns:rel-headstart-small-engines:8000" in found[0]["command"]
    assert "--tokenizer=x/y" in found[0]["args"]
    (third,) = {tuple(c["command"][4:]) for c in adapters(documents, "third")}
    assert third == ("$(POD_NAME)", "1", "1", "dns:sglang.other:30000", "--", "headstart", "worker")
    assert {"--engine=sglang", "--events=none"} <= {*adapters(documents, "third")[0]["args"]}


def test_the_way_to_the_engines_is_open() -> None:
    policies = {d["metadata"]["name"]: d["spec"].get("egress") for d in of_kind(render("external"), "NetworkPolicy")}
    ports = {
        name: [{port["port"] for port in rule["ports"]} for rule in policies[f"rel-headstart-{name}"]]
        for name in ("llama", "small", "third")
    }
    assert {8000, 443, 5557, 5558} in ports["llama"]
    assert {8000, 5557, 5558} in ports["small"]
    assert {30000} in ports["third"], "without events"
    (rule,) = [r for r in policies["rel-headstart-small"] if {"port": 5557, "protocol": "TCP"} in r["ports"]]
    assert rule["to"] == [{"podSelector": {"matchLabels": {"app": "vllm"}}}]


BLOCKS: Final = [
    block
    for page in ("vllm", "scaling")
    for block in re.findall(r"^```yaml\n(.*?)^```", (PAGE.parent / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    if block.startswith(("models:", "worker:"))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_examples_of_pages_render(block: str, tmp_path: Path) -> None:
    documents = rendered(yaml.safe_load(block))
    check_schemas([d for d in documents if d["kind"] in ("StatefulSet", "Service")], tmp_path, "1.31")


def test_models_of_a_folder_of_the_node_or_of_an_image(tmp_path: Path) -> None:
    """An image volume is mounted at /models, read only by its kind; Kubernetes has it from 1.33 on."""
    model = {"name": "a", "source": "/models/a", "download": False}
    volumes = [{"hostPath": "/srv/models", "readOnly": True}, {"image": "registry.example/models:1"}]
    documents = rendered({"models": [model | {"name": n, "volume": v} for n, v in zip("ab", volumes, strict=True)]})
    folder, image = (pod(documents, f"-{name}")["spec"] for name in "ab")
    assert {"name": "models", "hostPath": {"path": "/srv/models", "type": "Directory"}} in folder["volumes"]
    assert {"name": "models", "image": {"reference": "registry.example/models:1"}} in image["volumes"]
    for spec in (folder, image):
        (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "models"]
        assert mount["mountPath"] == "/models"
    check_schemas(documents, tmp_path, "1.33")


def test_a_schedule_may_take_the_last_worker() -> None:
    """One worker, which a model always needs, does not keep it up; more do."""
    scaling = {"enabled": True, "kind": "keda", "metric": "workersNeeded", "prometheusAddress": "http://p:9090"}
    model = {"name": "a", "source": "x/y", "autoscaling": scaling | {"minReplicas": 0, "triggers": [CRON]}}
    scaler = one(rendered({"models": [model]}), "ScaledObject", "-a")["spec"]
    assert scaler["minReplicaCount"] == 0
    needed, schedule = scaler["triggers"]
    assert needed["metadata"]["activationThreshold"] == needed["metadata"]["threshold"] == "1"
    assert schedule == CRON


def test_every_object_has_the_common_annotations() -> None:
    service = {"annotations": {"lb": "ours"}}
    values = {"commonAnnotations": {"contact": "us", "lb": "other"}, "gateway": {"service": service}}
    documents = rendered(values | {"metrics": {"dashboard": {"enabled": True, "annotations": {"folder": "LLM"}}}})
    assert all(d["metadata"]["annotations"]["contact"] == "us" for d in documents)
    assert one(documents, "Service", "-gateway")["metadata"]["annotations"]["lb"] == "ours"
    assert one(documents, "ConfigMap", "-dashboard")["metadata"]["annotations"]["folder"] == "LLM"
    for _, template in pod_templates(documents):
        assert "contact" not in template["metadata"].get("annotations", {}) or template["kind"] == "Pod"


def test_parts_may_have_accounts_and_the_network_of_the_node() -> None:
    documents = render("host-network")
    for suffix, account in (("-gateway", "front"), ("-llama", "rel-headstart"), ("-redis", "rel-headstart")):
        spec = pod(documents, suffix)["spec"]
        assert spec["serviceAccountName"] == account
        assert spec.get("hostNetwork", False) == (suffix != "-redis")
        assert (spec.get("dnsPolicy") == "ClusterFirstWithHostNet") == (suffix != "-redis")


def test_gateways_alone_render(tmp_path: Path) -> None:
    documents = rendered({"models": []})
    assert [name for name, _ in pod_templates(documents)] == [
        *("rel-headstart-gateway", "rel-headstart-redis", "rel-headstart-test")
    ]
    assert "--workers" not in pod(documents, "-gateway")["spec"]["containers"][0]["args"]
    check_schemas(documents, tmp_path, "1.31")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFleet]:
    """A gateway, and two engines whose events are open to their network, without adapters."""
    folder = tmp_path_factory.mktemp("external")
    model = write_tiny_model(folder / "tiny-llama")
    (folder / "secret").write_text(secrets.token_hex(16))
    fleet = EngineFleet(folder, "--cluster-secret-file", str(folder / "secret"))
    for name in ("first", "second"):
        engine = fleet.add_engine(name, model)
        engine.command = [re.sub(r"^tcp://127.0.0.1:", "tcp://*:", word) for word in engine.command]
    with fleet:
        yield fleet


class Container(Program):
    """A container of the pod `adapters-0`, as the chart renders it."""

    def __init__(self, container: Document, fleet: EngineFleet, port: int) -> None:
        name = str(container["name"])
        super().__init__(name, port, fleet.folder / f"{name}.log")
        own = container["ports"][0]["containerPort"]
        changes = {
            "$(POD_NAME)": "adapters-0",
            "$(POD_NAMESPACE)": "serving",
            "$(POD_IP)": "127.0.0.1",
            "0.0.0.0": "127.0.0.1",
            f"--port={own}": f"--port={port}",
            f"127.0.0.1:{own}": f"127.0.0.1:{port}",
            "redis://r:6379": fleet.redis.url,
            "/etc/headstart/cluster": str(fleet.folder),
        }
        python, *options, code = container["command"][:4]
        words = [*container["command"][4:], *container["args"]]
        for old, new in changes.items():
            words = [word.replace(old, new) for word in words]
        words[words.index("headstart")] = str(Path(sys.executable).with_name("headstart"))
        assert python == "python3"
        self.command = [sys.executable, *options, code, *words]

    def taken(self) -> list[str]:
        return re.findall(r"takes the engine (\S+),", self.log.read_text())


def test_the_rendered_commands_serve_engines_that_run(fleet: EngineFleet) -> None:
    """Each of two workers takes an engine, again after its end; a third waits, and its pod is ready."""
    urls = [engine.url for engine in fleet.engines.values()]
    values = {
        "models": [
            {"name": "adapters", "servedName": "tiny", "engine": "vllm", "replicas": 1, "external": {"urls": urls}}
        ],
        "redis": {"mode": "external", "external": {"url": "redis://r:6379"}},
        "worker": {"options": {"log-format": "text"}},
    }
    found = adapters(rendered(values), "adapters")
    ports = free_ports(3)
    parts = [Container(each, fleet, port) for each, port in zip(found, ports, strict=False)]
    spare = Container(found[0] | {"name": "spare"}, fleet, ports[2])
    try:
        for part in parts:
            part.start()
        fleet.wait_for(2)
        assert sorted(part.taken()[0] for part in parts) == sorted(urls)
        prompt = [1000 + position % 500 for position in range(330)]
        answers = [fleet.post({"model": "tiny", "prompt": prompt, "max_tokens": 4}).json() for _ in range(2)]
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 320
        wait_until(lambda: any(metrics(part.url)["headstart_worker_kv_cached_blocks"] >= 10 for part in parts))
        spare.start()
        wait_until(lambda: connects(spare.port))
        assert httpx.get(f"{spare.url}/health/ready").status_code == 200
        parts[0].stop()
        wait_until(lambda: spare.taken() == parts[0].taken())
        fleet.wait_for(2)
    finally:
        for part in (*parts, spare):
            part.stop()


def connects(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("targets", [("dns:engines:8000",), tuple(f"http://engine-{n}:8000" for n in range(30))])
def test_each_engine_belongs_to_one_pod(targets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-c", "pod-0", "1", "1", *targets, "--", "x", "--host=::"])
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (f"10.0.0.{n}", 0)) for n in range(30)] * 2
    )
    names: dict[str, Any] = {}
    exec(CHOOSER.read_text().partition("\nsignal.signal")[0], names)
    for pods in range(1, 5):
        parts = [names["engines"](number, pods) for number in range(pods)]
        assert len({url for part in parts for url in part}) == sum(map(len, parts)) == 30
        assert all(parts)


def test_a_worker_without_an_engine_answers_probes_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("tls", "127.0.0.1")
    source = CHOOSER.read_text()
    assert "/etc/headstart/tls/tls.crt" in source
    (port,) = free_ports(1)
    words = ["pod-0", "1", "1", "dns:localhost:1", "--", "headstart", "--host=127.0.0.1", f"--port={port}"]
    code = source.replace("/etc/headstart/tls", str(tmp_path))
    with subprocess.Popen([sys.executable, "-I", "-c", code, *words]) as process:
        try:
            wait_until(lambda: connects(port))
            with httpx.Client(verify=authority.trust(), base_url=f"https://127.0.0.1:{port}") as client:
                assert client.get("/health/live").status_code == 200
                assert client.get("/v1/state").status_code == 503
                assert client.get("/metrics").text == "headstart_worker_engine_problem 1\n", "it is not down"
            process.terminate()
            assert process.wait(HANG_S) == 0
        finally:
            process.kill()
