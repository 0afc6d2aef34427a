"""An admin may change pods, Services, monitors and budgets: `REFUSED` in test_values.py has the mistakes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.k8s import chart
from tests.k8s.chart import Document, containers, of_kind, pod_templates, rendered
from tests.k8s.tools import HELM_VERSIONS, PYTHON, ROOT, call

OPENSHIFT: Final = {
    "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
    "securityContext": {"readOnlyRootFilesystem": False},
}
SIDECAR: Final = {"name": "proxy", "image": "registry.example/proxy:1"}
FIRST: Final = {"name": "fetch", "image": "registry.example/fetch:1"}
MODEL: Final = {"name": "llama", "source": "x/llama"}
VLLM: Final = MODEL | {"engine": "vllm", "vllm": {"metrics": True}}


def pod(documents: list[Document], suffix: str) -> Document:
    (found,) = [spec for name, spec in pod_templates(documents) if name.endswith(suffix)]
    return found


def one(documents: list[Document], kind: str, suffix: str) -> Document:
    (found,) = [d for d in of_kind(documents, kind) if d["metadata"]["name"].endswith(suffix)]
    return found


@pytest.mark.parametrize("version", HELM_VERSIONS)
def test_null_removes_a_field_of_a_security_context(version: str) -> None:
    """OpenShift gives each namespace its own uids and refuses others; what is not named stays restricted."""
    models = [MODEL, VLLM | {"name": "other"}]
    values = {"gateway": OPENSHIFT, "worker": OPENSHIFT, "redis": {"builtin": OPENSHIFT}, "models": models}
    for name, template in pod_templates(rendered(values, version)):
        assert template["spec"]["securityContext"] == {
            "runAsNonRoot": True,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }, name
        for container in containers(template):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": False,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            }, (name, container["name"])


@pytest.mark.parametrize("version", HELM_VERSIONS)
def test_one_model_may_differ_in_its_security_context(version: str) -> None:
    """Helm removes no null from a list, and writes large uids as whole numbers."""
    own = {"podSecurityContext": {"runAsUser": 1000660000, "fsGroup": None}}
    documents = rendered({"models": [MODEL | own, MODEL | {"name": "other"}]}, version)
    changed, plain = (pod(documents, name)["spec"]["securityContext"] for name in ("-llama", "-other"))
    assert changed["runAsUser"] == 1000660000
    assert "fsGroup" not in changed
    assert plain["runAsUser"] == plain["fsGroup"] == 10001


def test_a_whole_security_context_can_be_left_out() -> None:
    documents = rendered({"gateway": {"podSecurityContext": None, "securityContext": None}})
    spec = pod(documents, "-gateway")["spec"]
    assert not spec["securityContext"]
    assert not spec["containers"][0]["securityContext"]


@pytest.mark.parametrize("part", ["gateway", "worker"])
def test_containers_of_the_admin_are_rendered_as_given(part: str) -> None:
    more = {"initContainers": [FIRST], "extraContainers": [SIDECAR]}
    spec = pod(rendered({part: more, "models": [MODEL]}), {"gateway": "-gateway", "worker": "-llama"}[part])["spec"]
    assert spec["initContainers"] == [FIRST]
    assert [c["name"] for c in spec["containers"]] == [part, "proxy"]
    assert spec["containers"][-1] == SIDECAR


def test_init_containers_end_before_vllm_starts() -> None:
    spec = pod(rendered({"models": [VLLM | {"initContainers": [FIRST]}]}), "-llama")["spec"]
    assert [c["name"] for c in spec["initContainers"]] == ["fetch", "engine", "engine-metrics"]


def test_variables_of_whole_secrets_reach_their_containers() -> None:
    def source(name: str) -> list[dict[str, Any]]:
        return [{"secretRef": {"name": name}, "prefix": "A_"}]

    values = {
        "gateway": {"extraEnvFrom": source("front")},
        "models": [VLLM | {"extraEnvFrom": source("adapter"), "vllm": {"extraEnvFrom": source("engine")}}],
    }
    documents = rendered(values)
    assert pod(documents, "-gateway")["spec"]["containers"][0]["envFrom"] == source("front")
    spec = pod(documents, "-llama")["spec"]
    assert spec["containers"][0]["envFrom"] == source("adapter")
    assert spec["initContainers"][0]["envFrom"] == source("engine")


def test_strategies_of_gateways_and_workers() -> None:
    values = {
        "gateway": {"strategy": {"type": "Recreate"}, "schedulerName": "volcano"},
        "worker": {"updateStrategy": {"rollingUpdate": {"partition": 3}}},
        "models": [
            MODEL,
            MODEL | {"name": "by-hand", "updateStrategy": {"type": "OnDelete", "rollingUpdate": {"partition": 0}}},
        ],
    }
    documents = rendered(values)
    gateway = one(documents, "Deployment", "-gateway")["spec"]
    assert gateway["strategy"] == {"type": "Recreate"}
    assert gateway["template"]["spec"]["schedulerName"] == "volcano"
    workers = {name: one(documents, "StatefulSet", name)["spec"]["updateStrategy"] for name in ("-llama", "-by-hand")}
    assert workers["-llama"] == {"type": "RollingUpdate", "rollingUpdate": {"partition": 3}}
    assert workers["-by-hand"] == {"type": "OnDelete"}


def test_the_gateways_service_is_reachable_from_outside() -> None:
    service = {"type": "NodePort", "nodePort": 30080, "externalTrafficPolicy": "Local"}
    spec = one(rendered({"gateway": {"service": service}}), "Service", "-gateway")["spec"]
    assert (spec["type"], spec["externalTrafficPolicy"]) == ("NodePort", "Local")
    assert spec["ports"] == [{"name": "http", "port": 80, "targetPort": "http", "nodePort": 30080}]


def test_the_load_balancer_of_the_gateways() -> None:
    service = {
        "type": "LoadBalancer",
        "loadBalancerClass": "lb.example/nlb",
        "loadBalancerSourceRanges": ["192.0.2.0/24"],
    }
    spec = one(rendered({"gateway": {"service": service}}), "Service", "-gateway")["spec"]
    assert service.items() <= spec.items()


def test_dynamic_resources_go_to_the_engine(tmp_path: Path) -> None:
    """Its container uses the pod's claim, and Headstart's own engine takes it for a GPU."""
    claim = {
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
        "resources": {"claims": [{"name": "gpu"}]},
    }
    documents = rendered({"models": [MODEL | claim, VLLM | claim | {"name": "foreign"}]}, kube_version="1.34.0")
    own, foreign = (pod(documents, name)["spec"] for name in ("-llama", "-foreign"))
    assert own["resourceClaims"] == foreign["resourceClaims"] == claim["resourceClaims"]
    worker, engine = own["containers"][0], foreign["initContainers"][0]
    assert worker["resources"]["claims"] == engine["resources"]["claims"] == [{"name": "gpu"}]
    assert "claims" not in foreign["containers"][0]["resources"]
    assert "--device=cuda" in worker["args"]
    assert worker["image"].endswith("-cuda")
    check_schemas(documents, tmp_path, "1.34")


def check_schemas(documents: list[Document], folder: Path, version: str) -> None:
    file = folder / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(d for d in documents if d["apiVersion"] not in chart.CUSTOM_APIS))
    done = call(PYTHON.parent / "kubernetes-validate", "--strict", "-k", version, file)
    assert done.returncode == 0, done.stdout + done.stderr


def timings(container: Document) -> dict[str, tuple[int, int, int]]:
    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    return {k: (p["periodSeconds"], p["timeoutSeconds"], p["failureThreshold"]) for k, p in probes.items()}


def test_timings_of_probes_change_and_their_paths_stay() -> None:
    slow = {"periodSeconds": 20, "timeoutSeconds": 15, "failureThreshold": 9}
    loading = {"periodSeconds": 20, "timeoutSeconds": 15}
    all_slow = {"startupProbe": slow, "readinessProbe": slow, "livenessProbe": slow}
    worker = all_slow | {"startupProbe": loading, "startupTimeoutSeconds": 600}
    values = {"gateway": all_slow, "models": [VLLM | worker | {"vllm": all_slow | {"startupProbe": loading}}]}
    documents, plain = rendered(values), rendered({"models": [VLLM]})
    gateway, adapter = (pod(documents, name)["spec"]["containers"][0] for name in ("-gateway", "-llama"))
    assert set(timings(gateway).values()) == {(20, 15, 9)}
    engine = pod(documents, "-llama")["spec"]["initContainers"][0]
    for container in (adapter, engine):
        assert timings(container) == {"startup": (20, 15, 30), "readiness": (20, 15, 9), "liveness": (20, 15, 9)}
    before = pod(plain, "-llama")["spec"]["containers"][0]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert adapter[kind]["httpGet"] == before[kind]["httpGet"]


def test_service_monitors_in_the_namespace_of_prometheus() -> None:
    rule = [{"action": "drop", "sourceLabels": ["__name__"], "regex": "go_.*"}]
    scrape = {
        "enabled": True,
        "scrapeTimeout": "10s",
        "namespace": "monitoring",
        "relabelings": [{"targetLabel": "cluster", "replacement": "one"}],
        "metricRelabelings": rule,
    }
    monitors = of_kind(rendered({"metrics": {"serviceMonitor": scrape}}), "ServiceMonitor")
    assert len(monitors) == 2
    for monitor in monitors:
        assert monitor["metadata"]["namespace"] == "monitoring"
        assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["serving"]}
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["scrapeTimeout"] == "10s"
        assert endpoint["relabelings"] == scrape["relabelings"]
        assert endpoint["metricRelabelings"] == rule


def test_an_ingress_may_have_paths_of_its_own() -> None:
    hosts = ["plain.example", {"host": "ai.example", "path": "/llm", "pathType": "ImplementationSpecific"}]
    ingress = one(rendered({"gateway": {"ingress": {"enabled": True, "hosts": hosts}}}), "Ingress", "-gateway")
    found = [(r["host"], p["path"], p["pathType"]) for r in ingress["spec"]["rules"] for p in r["http"]["paths"]]
    assert found == [("plain.example", "/v1", "Prefix"), ("ai.example", "/llm", "ImplementationSpecific")]


def test_a_budget_may_name_the_pods_that_stay() -> None:
    values = {
        "gateway": {"podDisruptionBudget": {"minAvailable": 1}},
        "models": [MODEL | {"podDisruptionBudget": {"minAvailable": "75%"}}, MODEL | {"name": "other"}],
    }
    budgets = {
        d["metadata"]["name"].removeprefix("rel-headstart-"): {
            key: value for key, value in d["spec"].items() if key.endswith("vailable")
        }
        for d in of_kind(rendered(values), "PodDisruptionBudget")
    }
    assert budgets == {"gateway": {"minAvailable": 1}, "llama": {"minAvailable": "75%"}, "other": {"maxUnavailable": 1}}


def test_a_parent_chart_sets_registry_and_pull_secrets() -> None:
    values = {
        "global": {"imageRegistry": "mirror.example:5000/", "imagePullSecrets": [{"name": "parents"}]},
        "imagePullSecrets": [{"name": "ours"}],
        "worker": {"image": {"repository": "registry.example/team/worker"}},
        "models": [MODEL, VLLM | {"name": "other"}],
    }
    for name, template in pod_templates(rendered(values)):
        assert template["spec"]["imagePullSecrets"] == [{"name": "parents"}, {"name": "ours"}], name
        for container in containers(template):
            own = container["name"] == "worker" and name.endswith("-llama")
            host = "registry.example/team/worker:" if own else "mirror.example:5000/"
            assert container["image"].startswith(host), container["image"]


def test_the_test_runs_on_the_nodes_of_gateways() -> None:
    placement = {"nodeSelector": {"pool": "serving"}, "tolerations": [{"operator": "Exists"}]}
    assert placement.items() <= pod(rendered({"gateway": placement}), "-test")["spec"].items()


def test_an_image_may_have_a_digest_alone() -> None:
    image = {"tag": "", "digest": "sha256:" + "0" * 64}
    (container,) = pod(rendered({"redis": {"builtin": {"image": image}}}), "-redis")["spec"]["containers"]
    assert container["image"] == f"redis@{image['digest']}"


@pytest.mark.parametrize("kind", ["NodePort", "LoadBalancer"])
def test_notes_name_the_address_from_outside(kind: str) -> None:
    done = chart.helm("helm4", {"gateway": {"service": {"type": kind}}}, notes=True)
    assert done.returncode == 0, done.stderr
    field = {"NodePort": ".spec.ports[0].nodePort", "LoadBalancer": ".status.loadBalancer.ingress[0]"}[kind]
    assert f"get svc rel-headstart-gateway -o jsonpath='{{{field}}}'" in done.stdout.partition("NOTES:")[2]


def test_notes_name_the_paths_of_the_ingress() -> None:
    hosts = ["plain.example", {"host": "ai.example", "path": "/llm"}]
    done = chart.helm("helm4", {"gateway": {"ingress": {"enabled": True, "hosts": hosts}}}, notes=True)
    assert "  plain.example/v1\n  ai.example/llm\n" in done.stdout.partition("NOTES:")[2], done.stderr


PAGE: Final = ROOT / "docs" / "kubernetes" / "pods.md"


@pytest.mark.parametrize("block", re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
def test_the_examples_of_the_page_render(block: str) -> None:
    """Each block is a file of values, and has an effect."""
    changed, plain = ([d for d in rendered(values) if d["kind"] != "Secret"] for values in (yaml.safe_load(block), {}))
    assert changed != plain
