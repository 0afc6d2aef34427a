"""Both helm versions accept the chart and render the same; Kubernetes' own schemas accept what comes out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.k8s import chart
from tests.k8s.tools import CHART, DEST, HELM_VERSIONS, PYTHON, call, succeed

KUBERNETES: Final = ("1.29", "1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
CUSTOM_SCHEMAS: Final = Path(__file__).parent / "schemas"


@pytest.mark.parametrize("version", HELM_VERSIONS)
@pytest.mark.parametrize("name", chart.MATRIX)
def test_lints_strictly(name: str, version: str, tmp_path: Path) -> None:
    values = tmp_path / "values.json"
    values.write_text(json.dumps(chart.MATRIX[name]))
    done = call(DEST / version, "lint", "--strict", CHART, "-f", values)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", chart.MATRIX)
def test_both_versions_render_the_same(name: str) -> None:
    three, four = (_without_random(chart.render(name, version)) for version in HELM_VERSIONS)
    assert three == four


def _without_random(documents: list[chart.Document]) -> list[Any]:
    return sorted(
        json.dumps(
            {key: value for key, value in document.items() if not (key == "data" and document["kind"] == "Secret")}
        )
        for document in documents
    )


@pytest.mark.parametrize("version", HELM_VERSIONS)
def test_packages(version: str, tmp_path: Path) -> None:
    succeed(DEST / version, "package", CHART, "-d", tmp_path)
    assert list(tmp_path.glob("headstart-*.tgz"))


def test_notes_name_the_first_request_and_what_is_open() -> None:
    """Only Helm 4: a dry run of Helm 3 asks for a cluster."""
    done = chart.helm("helm4", {}, notes=True)
    assert done.returncode == 0, done.stderr
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in done.stdout
    assert '"model": "smollm2"' in done.stdout
    assert "asks for no key" in done.stdout
    assert "GATEWAY_API_KEY" not in done.stdout


def test_notes_use_the_api_key_when_there_are_keys() -> None:
    done = chart.helm("helm4", {"apiKeys": {"enabled": True, "plainKey": "one.key"}}, notes=True)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert r"get secret rel-headstart-api-keys -o jsonpath='{.data.one\.key}' | base64 -d" in notes
    assert notes.count('-H "authorization: Bearer $GATEWAY_API_KEY"') == 2
    assert "asks for no key" not in notes


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_schemas_accept_everything(version: str, tmp_path: Path) -> None:
    """Strict: an unknown field is an error, and so is a kind that is neither Kubernetes' nor checked below."""
    names = chart.MATRIX if version in (KUBERNETES[0], KUBERNETES[-1]) else ("defaults", "everything-on")
    rendered = [d for name in names for d in chart.parse(chart.text(name, kube_version=f"{version}.0"))]
    different = {json.dumps(d, sort_keys=True): d for d in rendered if not _is_custom(d)}
    assert len(different) > 30
    file = tmp_path / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(different.values()))
    done = call(PYTHON.parent / "kubernetes-validate", "--strict", "-k", version, file)
    assert done.returncode == 0, [line for line in (done.stdout + done.stderr).splitlines() if "passed" not in line]
    assert "WARN" not in done.stdout + done.stderr


def test_the_schemas_can_refuse(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    text = chart.text("defaults")
    assert "automountServiceAccountToken" in text
    wrong.write_text(text.replace("automountServiceAccountToken", "automountToken"))
    assert call(PYTHON.parent / "kubernetes-validate", "--strict", "-k", "1.31", wrong).returncode != 0


def _is_custom(document: chart.Document) -> bool:
    return document["apiVersion"] in chart.CUSTOM_APIS


CHECK_CUSTOM: Final = """
import json, sys, jsonschema
schemas, documents = json.load(sys.stdin)
for document in documents:
    validator = jsonschema.Draft202012Validator(schemas[document["kind"]])
    for error in validator.iter_errors(document):
        print(document["kind"], document["metadata"]["name"], error.json_path, error.message)
"""


def custom_errors(documents: list[chart.Document]) -> str:
    schemas = {path.stem: json.loads(path.read_text()) for path in CUSTOM_SCHEMAS.glob("*.json")}
    return succeed(PYTHON, "-c", CHECK_CUSTOM, input=json.dumps([schemas, documents]))


def test_custom_kinds_fit_their_schemas() -> None:
    documents = [document for name in chart.MATRIX for document in chart.render(name) if _is_custom(document)]
    kinds = {document["kind"] for document in documents}
    assert kinds == {"ServiceMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute"}
    assert custom_errors(documents) == ""


def test_the_schemas_of_custom_kinds_can_refuse() -> None:
    for kind in ("ServiceMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute"):
        document = next(d for name in chart.MATRIX for d in chart.render(name) if d["kind"] == kind)
        changed = json.loads(json.dumps(document))
        changed["spec"]["surprise"] = True
        assert "surprise" in custom_errors([changed]), kind


@pytest.mark.parametrize("example", ["keda-prefill-seconds", "keda-workers-needed"])
def test_the_example_of_keda_scales_a_workload_of_the_chart(example: str) -> None:
    (scaler,) = chart.parse((chart.EXAMPLES / f"{example}.yaml").read_text())
    assert custom_errors([scaler]) == ""
    target = scaler["spec"]["scaleTargetRef"]
    names = {(d["kind"], d["metadata"]["name"]) for d in chart.rendered({})}
    release = {name.removesuffix("-gateway") for kind, name in names if kind == "Deployment"}
    assert (target["kind"], target["name"].replace("chat-headstart", min(release))) in names


def scaled_by_need(kind: str, **more: Any) -> dict[str, Any]:
    scaling = {"enabled": True, "kind": kind, "metric": "workersNeeded", "prometheusAddress": "http://prometheus:9090"}
    values = {"models": [{"name": "a", "source": "x/y", "servedName": "meta/llama", "autoscaling": scaling} | more]}
    wanted = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[kind]
    (scaler,) = chart.of_kind(chart.rendered(values), wanted)
    spec: dict[str, Any] = scaler["spec"]
    return spec


def test_keda_scales_to_the_workers_that_the_model_needs() -> None:
    (trigger,) = scaled_by_need("keda")["triggers"]
    assert trigger["metricType"] == "AverageValue"
    metadata = trigger["metadata"]
    labels = 'namespace="serving",pod=~"rel-headstart-gateway-.+",model="meta/llama"'
    assert metadata["query"] == f"max(headstart_workers_needed{{{labels}}})", "another release has its own fleet"
    assert metadata["threshold"] == "1"
    assert metadata["ignoreNullValues"] == "false", "no number is not 0 workers"
    (example,) = chart.parse((chart.EXAMPLES / "keda-workers-needed.yaml").read_text())
    (shown,) = example["spec"]["triggers"]
    own = {"query": "", "serverAddress": ""}
    assert shown["metadata"] | own == metadata | own


def test_an_hpa_scales_to_the_workers_that_the_model_needs() -> None:
    (metric,) = scaled_by_need("hpa")["metrics"]
    assert metric["external"] == {
        "metric": {"name": "headstart_workers_needed", "selector": {"matchLabels": {"model": "meta/llama"}}},
        "target": {"type": "AverageValue", "averageValue": "1"},
    }


def test_a_pod_of_several_ranks_counts_as_that_many_workers() -> None:
    ranks = {"engine": "vllm", "vllm": {"dataParallelSize": 2}}
    assert scaled_by_need("keda", **ranks)["triggers"][0]["metadata"]["threshold"] == "2"
    assert scaled_by_need("hpa", **ranks)["metrics"][0]["external"]["target"]["averageValue"] == "2"


def test_labels_of_the_values_never_replace_those_of_a_selector() -> None:
    labels = {"app.kubernetes.io/component": "mine", "app.kubernetes.io/part-of": "platform"}
    documents = chart.rendered({"commonLabels": labels, "gateway": {"podLabels": {"app.kubernetes.io/name": "mine"}}})
    for workload in chart.of_kind(documents, "Deployment", "StatefulSet"):
        own, selected = workload["spec"]["template"]["metadata"]["labels"], workload["spec"]["selector"]["matchLabels"]
        assert own | selected == own, workload["metadata"]["name"]
        assert own["app.kubernetes.io/part-of"] == "platform"


def test_no_trace_of_a_registry_or_of_a_withdrawn_image() -> None:
    for path in sorted(CHART.rglob("*")):
        if path.is_file():
            assert not re.search(r"bitnami|docker\.io|ghcr\.io|quay\.io", path.read_text(), re.IGNORECASE), path
