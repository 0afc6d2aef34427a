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

from tests.certificates import Authority
from tests.e2e.engine_fleet import EngineFleet, Program
from tests.e2e.serving import free_ports
from tests.faults.part import metrics
from tests.k8s.chart import Document, of_kind, pod_templates, render
from tests.k8s.test_escape_hatches import check_schemas, one, pod, rendered
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
        engine.adapters.clear()
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
        "logging": {"format": "text"},
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
            process.terminate()
            assert process.wait(HANG_S) == 0
        finally:
            process.kill()
