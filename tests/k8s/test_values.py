"""Every value is used, checked and explained; what would not work is refused with its name."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from server import config as gateway_config
from tests.k8s import chart
from tests.k8s.tools import CHART, HELM_VERSIONS
from tests.worker.test_command_line import sample
from tools.values import SET_BY_THE_CHART
from worker import config as worker_config
from worker.common.command_line import known_options

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())


def resolved(node: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = SCHEMA["definitions"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    return found


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every value of the schema by its path, groups included."""
    for key, child in node["properties"].items():
        child = resolved(child)
        yield f"{path}{key}", child
        if "properties" in child:
            yield from nodes(child, f"{path}{key}.")


NODES = dict(nodes(SCHEMA))
OPTIONS = [path for path in NODES if ".options." in path]
LEAVES = [path for path, node in NODES.items() if "properties" not in node and path not in OPTIONS]


def default_of(path: str) -> Any:
    """None: the value does not stand in values.yaml."""
    value: Any = chart.default_values()
    for word in path.split("."):
        value = value.get(word) if isinstance(value, dict) else None
    return value


def strangers(values: dict[str, Any], path: str = "") -> Iterator[str]:
    """Return the keys of values.yaml that the schema lacks: they have no comment."""
    for key, value in values.items():
        here = f"{path}{key}"
        if here not in NODES:
            yield here
        elif "properties" in NODES[here]:
            yield from strangers(value, f"{here}.")


def test_every_value_has_a_comment() -> None:
    assert list(strangers(chart.default_values())) == []


CHANGES: dict[str, Any] = {
    "nameOverride": "other",
    "fullnameOverride": "other",
    "gateway.podDisruptionBudget.maxUnavailable": "50%",
    "gateway.podDisruptionBudget.minAvailable": 1,
    "worker.podDisruptionBudget.minAvailable": "50%",
    "gateway.ingress.hosts": [{"host": "llm.example", "path": "/llm"}],
    "gateway.service.loadBalancerIP": "192.0.2.7",
    "gateway.service.loadBalancerSourceRanges": ["192.0.2.0/24"],
    "gateway.resources.claims": [{"name": "gpu"}],
    "worker.external.urls": ["http://a:8000"],
    "worker.volume.hostPath": "/srv/models",
    "worker.autoscaling.triggers": [chart.CRON],
    "worker.resources.claims": [{"name": "gpu", "request": "one"}],
}
CHANGES |= {
    f"{part}.{key}": {field: None}
    for part in ("gateway", "worker", "redis.builtin")
    for key, field in (("podSecurityContext", "runAsUser"), ("securityContext", "readOnlyRootFilesystem"))
}
"""Values that the general rule of `changed` cannot guess."""


def changed(path: str, default: Any, node: dict[str, Any]) -> Any:
    """Another legal value."""
    if path in CHANGES:
        return CHANGES[path]
    if "enum" in node:
        return next(value for value in node["enum"] if value not in (default, ""))
    kinds = node["type"]
    match default:
        case bool():
            return not default
        case int():
            return default + 1 if default + 1 <= node.get("maximum", default + 1) else default - 1
        case _ if path.endswith(("memory", "ephemeral-storage", "size", "shmSize")):
            return "7Gi"
        case _ if path.endswith(("Request", ".cpu")):
            return "700m"
        case str():
            samples = ("other", "x/other", "7G", "sha256:" + "0" * 64, "redis://other:1", "http://other:9090", "7s")
            pattern = node.get("pattern", "")
            return next(sample for sample in samples if re.search(pattern, sample))
        case dict():
            sample: Any = {"changed": "yes"}
            if path.endswith("affinity"):
                sample = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
            return sample
        case list():
            items = resolved(node.get("items", {}))
            sample = {"name": "other", "mountPath": "/other", "emptyDir": {}, "value": "x", "image": "x:1"}
            if path.endswith("elabelings"):
                sample = {"targetLabel": "rack"}
            elif items.get("type") in ("string", "integer"):
                sample = {"string": "--other", "integer": 7}[items["type"]]
            elif "properties" in items:
                sample = {"name": "other"}
            elif "topologyKey" in items.get("required", []):
                sample = {"topologyKey": "rack", "maxSkew": 3, "whenUnsatisfiable": "DoNotSchedule"}
            return [sample]
    raise AssertionError(f"{path}: no sample for {kinds}")


def with_value(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(values))
    node = copy
    *parents, last = path.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return copy


def stable(manifests: str) -> str:
    """Without the generated secrets."""
    return re.sub(r"^  \S+: \"[A-Za-z0-9+/=]{64}\"$", "", manifests, flags=re.MULTILINE)


@pytest.mark.parametrize("path", [path for path in LEAVES if path not in ("models", "redis.external.url")])
def test_every_value_changes_what_is_rendered(path: str) -> None:
    """No value is without effect: in one of the sets, setting it does something."""
    for name in ("defaults", "everything-on", "keda", *chart.MATRIX):
        values = chart.MATRIX[name]
        own = reduce(lambda node, word: node.get(word, {}) if isinstance(node, dict) else {}, path.split("."), values)
        default = default_of(path) if own == {} else own
        value = "none" if path == "redis.mode" else changed(path, default, NODES[path])
        done = chart.helm("helm4", with_value(values, path, value))
        if done.returncode == 0 and stable(done.stdout) != stable(chart.text(name)):
            return
    raise AssertionError(f"{path}: no effect")


MODEL = {"name": "a", "source": "x/y"}
VLLM = MODEL | {"engine": "vllm"}
EXTERNAL = {"name": "a", "engine": "vllm", "external": {"urls": ["http://a:8000", "http://b:8000"]}}
REFUSED = [
    ({"replicaCount": 3}, "replicaCount: there is no such value; did you mean gateway.replicas or worker.replicas?"),
    ({"gateway": {"replicas": "two"}}, "gateway.replicas"),
    ({"gateway": {"options": {"policy": "best"}}}, "gateway.options.policy"),
    ({"gateway": {"resources": {"limits": {"memory": "lots"}}}}, "gateway.resources.limits.memory"),
    ({"gateway": {"service": {"port": 0}}}, "gateway.service.port"),
    ({"worker": {"gpu": {"count": 0.5}}}, "worker.gpu.count"),
    ({"worker": {"gpu": {"count": 2}}}, "gpu.count"),
    ({"worker": {"engine": "sglang"}}, "models.smollm2.engine: the chart starts no SGLang"),
    ({"worker": {"engine": "vllm", "gpu": {"count": 2}}}, "tensorParallelSize"),
    ({"worker": {"vllm": {"dataParallelSize": 0}}}, "worker.vllm.dataParallelSize"),
    ({"worker": {"vllm": {"dataParallelSize": 17}}}, "worker.vllm.dataParallelSize"),
    ({"worker": {"vllm": {"quantization": "fp8"}}}, "quantization"),
    ({"models": [{"name": "a", "source": "x/y", "vllm": {"devMode": False}}]}, "models.a.vllm"),
    ({"models": [VLLM | {"options": {"max-num-seqs": 9}}]}, "models.a.options.max-num-seqs: it is for Headstart's own"),
    ({"models": [{"name": "a", "source": "x/y", "engine": "vllm", "image": {"tag": "b"}}]}, "models.a.image"),
    ({"worker": {"engine": "vllm", "vllm": {"extraArgs": ["--host=0.0.0.0"]}}}, "--host is the chart's"),
    ({"worker": {"engine": "vllm", "vllm": {"extraArgs": ["--api_key=hush"]}}}, "--api_key is the chart's"),
    ({"worker": {"engine": "vllm", "vllm": {"extraArgs": ["-tp", "8"]}}}, "-tp is the chart's"),
    ({"worker": {"resources": {"limits": {"nvidia.com/gpu": 0.5}}}}, "nvidia.com/gpu"),
    ({"worker": {"options": {"kv-cache-memory": "most"}}}, "worker.options.kv-cache-memory"),
    ({"worker": {"kvDisk": {"size": "100G"}}}, "worker.kvDisk.size"),
    ({"worker": {"kvDisk": {"size": "0Gi"}}}, "worker.kvDisk.size"),
    ({"worker": {"kvDisk": {"claim": True}}}, "kvDisk.size"),
    ({"models": [{"name": "a", "source": "x/y", "engine": "vllm", "kvDisk": {"size": "9Gi"}}]}, "models.a.kvDisk"),
    ({"worker": {"replicas": -1}}, "worker.replicas"),
    ({"worker": {"autoscaling": {"enabled": True, "minReplicas": 0}}}, "autoscaling.minReplicas: 0 needs kind: keda"),
    ({"worker": {"autoscaling": {"triggers": [chart.CRON]}}}, "autoscaling.triggers"),
    ({"gateway": {"autoscaling": {"minReplicas": 0}}}, "gateway.autoscaling.minReplicas"),
    ({"worker": {"autoscaling": {"metric": "cpu"}}}, "worker.autoscaling.metric"),
    ({"gateway": {"options": {"scale-objective-s": 0}}}, "gateway.options.scale-objective-s"),
    ({"models": [], "redis": {"mode": "none"}}, "models: without any"),
    ({"models": None}, "models"),
    ({"models": [{"name": "a"}]}, "source"),
    ({"models": [{"name": "Llama", "source": "x/y"}]}, "models.0.name"),
    (
        {"models": [MODEL | {"gpus": 1}]},
        "models.a.gpus: there is no such value; did you mean models.a.gpu (count, resourceName)?",
    ),
    ({"models": [{"name": "a", "source": "x/y", "gpu": {"count": 0.5}}]}, "models.0.gpu.count"),
    ({"models": [{"name": "a", "source": "x"}, {"name": "a", "source": "y"}]}, "models: the name"),
    ({"models": [{"name": "redis", "source": "x"}]}, "models: the name"),
    ({"redis": {"mode": "bitnami"}}, "redis.mode"),
    ({"redis": {"mode": "external"}}, "redis.external.url"),
    ({"redis": {"external": {"url": "redis://r:6379"}}}, "redis.external.url"),
    ({"redis": {"mode": "external", "external": {"url": "redis://u:p@r:6379"}}}, "redis.external.url"),
    ({"redis": {"mode": "external", "external": {"url": "http://r"}}}, "redis.external.url"),
    ({"redis": {"mode": "external", "external": {"url": "redis://a,r:6380/0"}}}, "would close port 6380"),
    ({"redis": {"workerUsername": ""}}, "redis.gatewayUsername"),
    ({"redis": {"workerUsername": "headstart-gateway"}}, "redis.gatewayUsername"),
    ({"gateway": {"ingress": {"enabled": True}}}, "gateway.ingress.hosts"),
    ({"gateway": {"httpRoute": {"enabled": True}}}, "gateway.httpRoute.parentRefs"),
    ({"gateway": {"autoscaling": {"enabled": True, "kind": "keda"}}}, "gateway.autoscaling.prometheusAddress"),
    ({"gateway": {"autoscaling": {"enabled": True, "minReplicas": 11}}}, "gateway.autoscaling.minReplicas"),
    ({"worker": {"autoscaling": {"enabled": True, "kind": "keda"}}}, "autoscaling.prometheusAddress"),
    ({"worker": {"volume": {"existingClaim": "a", "size": "1Gi"}}}, "volume: existingClaim"),
    ({"worker": {"volume": {"hostPath": "/m", "size": "1Gi"}}}, "volume: existingClaim"),
    ({"worker": {"volume": {"hostPath": "models"}}}, "worker.volume.hostPath"),
    ({"worker": {"volume": {"image": "registry.example/m:1"}}}, "download: the volume is read only"),
    ({"worker": {"hostNetwork": True}}, "networkPolicy.enabled: false"),
    ({"gateway": {"hostNetwork": True}}, "gateway.hostNetwork"),
    ({"networkPolicy": {"enabled": False}, "worker": {"engine": "vllm", "hostNetwork": True}}, "the ports of vLLM"),
    ({"models": [EXTERNAL | {"engine": "headstart"}]}, "models.a.external: set engine"),
    ({"models": [EXTERNAL | {"gpu": {"count": 1}}]}, "models.a.external: adapters need no gpu.count"),
    ({"models": [EXTERNAL | {"autoscaling": {"enabled": True}}]}, "models.a.external: adapters need no gpu.count"),
    ({"models": [EXTERNAL | {"vllm": {"devMode": False}}]}, "models.a.vllm.devMode"),
    ({"models": [EXTERNAL | {"replicas": 1, "vllm": {"dataParallelSize": 16}}]}, "models.a.replicas"),
    ({"models": [EXTERNAL | {"external": {"urls": ["http://a"], "service": "b"}}]}, "external: urls, service"),
    ({"models": [EXTERNAL | {"external": {"urls": ["http://a/v1"]}}]}, "models.0.external.urls.0"),
    ({"models": [EXTERNAL | {"external": {"urls": ["http://a"], "events": "tcp://*:1"}}]}, "models.0.external.events"),
    ({"models": [{"name": "a", "engine": "vllm"}]}, "models.a.source: name the model"),
    ({"worker": {"volume": {"readOnly": True}}}, "volume.readOnly"),
    ({"worker": {"volume": {"existingClaim": "a", "readOnly": True}}}, "download"),
    ({"worker": {"image": {"digest": "latest"}}}, "worker.image.digest"),
    ({"apiKeys": {"plainKey": "keys.toml"}}, "apiKeys.plainKey"),
    ({"tls": {"gateway": {"secret": "a"}}}, "tls.gateway.name"),
    ({"tls": {"workers": {"name": "a"}}}, "tls.workers.secret"),
    ({"tls": {"workers": {"secret": "a", "name": "not a name"}}}, "tls.workers.name"),
    ({"gateway": {"options": {"log-format": "xml"}}}, "gateway.options.log-format"),
    ({"tracing": {"endpoint": "collector:4318"}}, "tracing.endpoint"),
    ({"gateway": {"options": {"max-queue": 9}}}, "did you mean gateway.options.max-queued-tokens?"),
    ({"gateway": {"processes": 2}}, "processes"),
    ({"opsKey": {"key": ""}}, "opsKey.key"),
    ({"ipFamily": "both"}, "ipFamily"),
    ({"models": [MODEL | {"gpu": 1}]}, "models.a.gpu: it has the keys count, resourceName"),
    ({"worker": {"gpuCount": 1}}, "did you mean worker.gpu.count?"),
    ({"dashboard": {"enabled": True}}, "did you mean metrics.dashboard (enabled, labels, annotations)?"),
    ({"metrics": {"dashboard": True}}, "metrics.dashboard: it has the keys"),
    ({"worker": {"autoscaling": {"min": 1}}}, "worker.autoscaling.min: there is no such value; it is none of enabled,"),
    ({"models": [MODEL | {"maxModelLen": 4096}]}, "did you mean models.a.options.max-model-len?"),
    ({"models": [MODEL | {"options": {"max-model-length": 1}}]}, "did you mean models.a.options.max-model-len?"),
    ({"gateway": {"scaleObjectiveSeconds": 5}}, "use gateway.options.scale-objective-s"),
    ({"logging": {"level": "debug"}}, "logging: use log-level and log-format in gateway.options and worker.options"),
    ({"worker": {"extraArgs": ["--threads=2"]}}, "worker.extraArgs: use each option in options"),
    ({"models": [VLLM | {"vllm": {"blockSize": 32}}]}, "use --block-size in vllm.extraArgs"),
    ({"worker": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}, "use gpu.count and gpu.resourceName"),
    ({"worker": {"options": {"max-num-seqs": 0}}}, "worker.options.max-num-seqs"),
    ({"worker": {"options": {"num-blocks": 1.5}}}, "worker.options.num-blocks"),
    ({"worker": {"options": {"dtype": 16}}}, "worker.options.dtype"),
    ({"gateway": {"options": {"access-log": "yes"}}}, "gateway.options.access-log"),
    ({"models": [MODEL, MODEL | {"name": "b", "source": "x/z", "servedName": "a"}]}, "models.b.servedName: another"),
    ({"worker": {"securityContext": {"fsGroup": 1}}}, "fsGroup"),
    ({"redis": {"builtin": {"podSecurityContext": 1}}}, "redis.builtin.podSecurityContext"),
    ({"gateway": {"initContainers": [{"name": "a"}]}}, "gateway.initContainers.0"),
    ({"worker": {"extraContainers": {"name": "a", "image": "b"}}}, "worker.extraContainers"),
    ({"worker": {"extraEnvFrom": "secret"}}, "worker.extraEnvFrom"),
    ({"gateway": {"strategy": {"type": "OnDelete"}}}, "gateway.strategy.type"),
    ({"gateway": {"strategy": {"rollingUpdate": {"maxSurge": 0}}}}, "gateway.strategy.rollingUpdate"),
    ({"gateway": {"strategy": {"rollingUpdate": {"maxSurge": "lots"}}}}, "gateway.strategy.rollingUpdate.maxSurge"),
    ({"worker": {"updateStrategy": {"rollingUpdate": {"partition": -1}}}}, "worker.updateStrategy.rollingUpdate"),
    ({"worker": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": {"partition": 1}}}}, "updateStrategy"),
    ({"gateway": {"schedulerName": "no such name"}}, "gateway.schedulerName"),
    ({"gateway": {"service": {"nodePort": 30080}}}, "gateway.service.nodePort"),
    ({"gateway": {"service": {"type": "NodePort", "nodePort": 70000}}}, "gateway.service.nodePort"),
    ({"gateway": {"service": {"externalTrafficPolicy": "Local"}}}, "gateway.service.externalTrafficPolicy"),
    ({"gateway": {"service": {"type": "NodePort", "loadBalancerIP": "192.0.2.7"}}}, "gateway.service.loadBalancerIP"),
    ({"gateway": {"service": {"loadBalancerClass": "nlb.example/class"}}}, "gateway.service.loadBalancerClass"),
    ({"gateway": {"service": {"loadBalancerSourceRanges": ["192.0.2.0/24"]}}}, "service.loadBalancerSourceRanges"),
    ({"models": [{"name": "m", "source": "s3://bucket/model"}]}, "models.m.source: workers load nothing from s3:"),
    ({"worker": {"resources": {"claims": [{"name": "gpu"}]}}}, "resources.claims"),
    ({"gateway": {"resources": {"claims": [{"name": "nic"}]}}}, "gateway.resources.claims"),
    ({"worker": {"vllm": {"adapterResources": {"claims": []}}}}, "claims"),
    ({"worker": {"readinessProbe": {"periodSeconds": 0}}}, "worker.readinessProbe.periodSeconds"),
    ({"metrics": {"serviceMonitor": {"scrapeTimeout": "20s"}}}, "metrics.serviceMonitor.scrapeTimeout"),
    ({"metrics": {"serviceMonitor": {"scrapeTimeout": "soon"}}}, "metrics.serviceMonitor.scrapeTimeout"),
    ({"metrics": {"serviceMonitor": {"relabelings": {}}}}, "metrics.serviceMonitor.relabelings"),
    ({"gateway": {"ingress": {"hosts": [{"path": "/v1"}]}}}, "host"),
    ({"gateway": {"ingress": {"hosts": [{"host": "a", "path": "v1"}]}}}, "gateway.ingress.hosts.0.path"),
    ({"gateway": {"ingress": {"hosts": [{"host": "a", "pathType": "Regex"}]}}}, "gateway.ingress.hosts.0.pathType"),
    ({"worker": {"podDisruptionBudget": {"minAvailable": "most"}}}, "worker.podDisruptionBudget.minAvailable"),
    ({"global": {"imageRegistry": "https registry"}}, "global.imageRegistry"),
    ({"global": {"imagePullSecrets": ["pull"]}}, "global.imagePullSecrets.0"),
]


@pytest.mark.parametrize("version", HELM_VERSIONS)
@pytest.mark.parametrize(("values", "key"), REFUSED, ids=[json.dumps(values)[:60] for values, _ in REFUSED])
def test_what_would_not_work_is_refused_by_name(values: dict[str, Any], key: str, version: str) -> None:
    done = chart.helm(version, values)
    assert done.returncode != 0
    assert key in done.stderr.replace("/", ".") or key in done.stderr, done.stderr


def option_value(action: argparse.Action, node: dict[str, Any]) -> Any:
    """A value of an option, as YAML has it."""
    if action.nargs == 0:
        return True
    kinds = node.get("type", [])
    value = sample(action)
    return [value] if "array" in kinds else int(value) if {"integer", "number"} & {*kinds} else value


@pytest.mark.parametrize(("part", "config"), [("gateway", gateway_config), ("worker", worker_config)])
def test_every_option_reaches_its_process(part: str, config: Any, tmp_path: Path) -> None:
    """As from a file of options, whose spelling values have too."""
    actions = {action.option_strings[-1]: action for action in config.parser()._actions if action.option_strings}
    names = [path.split(".")[-1] for path in OPTIONS if path.startswith(part)]
    options = {name: option_value(actions[f"--{name}"], NODES[f"{part}.options.{name}"]) for name in names}
    file = tmp_path / "options.toml"
    file.write_text("\n".join([f"[{part}]", *(f"{name} = {json.dumps(value)}" for name, value in options.items())]))
    read = config.parser().parse_args
    wanted, plain = vars(read(["--config", str(file)])), vars(read([]))
    given = {field: value for field, value in wanted.items() if value != plain.get(field)}
    assert len(given) == len(options)
    found = vars(read(arguments_of({part: {"options": options}}, part)))
    for field, value in given.items():  # the chart's own items of a list come first
        assert found[field][-len(value) :] == value if isinstance(value, list) else found[field] == value, field


def arguments_of(values: dict[str, Any], part: str) -> list[str]:
    """Return the arguments of the first container of a part, without what needs files."""
    suffix = {"gateway": "-gateway", "worker": "-smollm2"}[part]
    (pod,) = [pod for name, pod in chart.pod_templates(chart.rendered(values)) if name.endswith(suffix)]
    arguments: list[str] = pod["spec"]["containers"][0]["args"]
    return arguments


def test_null_is_the_default_of_the_process() -> None:
    assert "--threads=2" in arguments_of({}, "worker")
    assert not any("threads" in word for word in arguments_of({"worker": {"options": {"threads": None}}}, "worker"))
    models = [{"name": "smollm2", "source": "x/y", "options": {"threads": None, "max-queued-tokens": 8388608}}]
    words = arguments_of({"models": models}, "worker")
    assert not any("threads" in word for word in words)
    assert "--max-queued-tokens=8388608" in words, "no exponent"


TAKEN = [f"{part}.{name}" for part, names in SET_BY_THE_CHART.items() for name in names]


@pytest.mark.parametrize("option", TAKEN)
def test_what_the_chart_sets_is_refused_in_options(option: str) -> None:
    part, _, name = option.partition(".")
    assert name in known_options()[part]
    done = chart.helm("helm4", {part: {"options": {name: "x"}}})
    assert done.returncode != 0
    assert f"{part}.options.{name}: use {SET_BY_THE_CHART[part][name]}" in done.stderr


def test_the_chart_sets_nothing_that_options_may_set() -> None:
    """But what adds to a list."""
    adds = {"gateway.options.workers", "gateway.options.ops-hosts"}
    for name in chart.MATRIX:
        for _, pod in chart.pod_templates(chart.render(name)):
            for container in pod["spec"]["containers"]:
                part = container["name"].partition("-")[0]
                flags = [word.partition("=")[0][2:] for word in container.get("args", []) if word.startswith("--")]
                given = {f"{part}.options.{flag}" for flag in flags if f"{part}.options.{flag}" in OPTIONS}
                assert len(flags) == len(set(flags)) or adds & given, (name, container["args"])
