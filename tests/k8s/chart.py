"""The chart rendered by the real helm, and the sets of values over which everything is checked."""

from __future__ import annotations

import functools
import json
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any, Final

import yaml

from tests.k8s.tools import CHART, DEST, call

Document = dict[str, Any]
Values = dict[str, Any]

EXAMPLES: Final = CHART.parent / "examples"
CUSTOM_APIS: Final = ("monitoring.coreos.com/v1", "keda.sh/v1alpha1", "gateway.networking.k8s.io/v1")
_MODEL: Final = {"name": "llama", "source": "/models/llama"}
_ON: Final = {"enabled": True}
_POD: Final = {
    "priorityClassName": "serving",
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]
            }
        }
    },
}
_MORE: Final = _POD | {
    "topologySpreadConstraints": [{"topologyKey": "rack", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}],
    "podLabels": {"team": "serving"},
    "podAnnotations": {"note": "yes"},
    "extraEnv": [{"name": "LANG", "value": "C.UTF-8"}],
    "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
}

_LOGS: Final = {"log-level": "debug", "log-format": "text"}
EVERYTHING_ON: Final[Values] = {
    "nameOverride": "llm",
    "commonLabels": {"owner": "serving", "team": "platform", "app.kubernetes.io/part-of": "platform"},
    "commonAnnotations": {"contact": "serving@example"},
    "imagePullSecrets": [{"name": "pull"}],
    "apiKeys": _ON,
    "opsKey": _ON,
    "tls": {
        "gateway": {"secret": "gateway-tls", "name": "llm.example"},
        "workers": {"secret": "worker-tls", "name": "workers.example"},
    },
    "tracing": {"endpoint": "http://collector.tracing:4318"},
    "models": [
        _MODEL
        | {
            "servedName": "meta/llama",
            "replicas": 3,
            "gpu": {"count": 1},
            "runtimeClassName": "nvidia",
            "options": {
                "dtype": "bfloat16",
                "max-model-len": 8192,
                "kv-cache-memory": None,
                "kv-host-memory": "16G",
                "threads": None,
            },
            "download": False,
            "volume": {"existingClaim": "models", "readOnly": True, "subPath": "llama"},
            "shmSize": "1Gi",
            "drain": {"preStopSeconds": 5, "timeoutSeconds": 600},
        },
        {
            "name": "gated",
            "source": "example/gated",
            "huggingFaceToken": {"existingSecret": "hub"},
            "volume": {"size": "200Gi", "storageClassName": "fast", "whenDeleted": "Delete"},
            "kvDisk": {"size": "1Ti", "claim": True, "storageClassName": "local"},
            "resources": {"requests": {"cpu": 8, "memory": "64Gi"}, "limits": {"cpu": 16, "memory": "64Gi"}},
            "autoscaling": _ON
            | {
                "kind": "keda",
                "metric": "workersNeeded",
                "maxReplicas": 9,
                "prometheusAddress": "http://prometheus:9090",
            },
        },
        {
            "name": "small",
            "source": "example/small",
            "kvDisk": {"size": "100Gi"},
            "autoscaling": _ON | {"metric": "workersNeeded"},
            "gpu": {"count": 1, "resourceName": "nvidia.com/mig-1g.10gb"},
        },
        {
            "name": "foreign",
            "source": _MODEL["source"],
            "servedName": "meta/llama",
            "engine": "vllm",
            "gpu": {"count": 8},
            "huggingFaceToken": {"existingSecret": "hub"},
            "volume": {"size": "200Gi"},
            "drain": {"preStopSeconds": 5, "timeoutSeconds": 600},
            "autoscaling": _ON,
            "vllm": {
                "image": {"repository": "registry.example/vllm", "digest": "sha256:" + "0" * 64},
                "tensorParallelSize": 2,
                "pipelineParallelSize": 2,
                "dataParallelSize": 2,
                "metrics": True,
                "apiKey": {"existingSecret": "engine"},
                "extraArgs": ["--max-num-seqs=256", "--max-model-len=8192"],
                "extraEnv": [{"name": "VLLM_LOGGING_LEVEL", "value": "WARNING"}],
                "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
            },
        },
    ],
    "worker": _MORE | {"options": _LOGS},
    "gateway": _MORE
    | {
        "options": _LOGS | {"access-log": True, "worker-networks": ["100.64.0.0/10", "fd00::/8"]},
        "autoscaling": _ON,
        "service": {"type": "LoadBalancer", "port": 443, "annotations": {"lb": "internal"}},
        "ingress": _ON
        | {
            "className": "nginx",
            "hosts": ["llm.example"],
            "tls": [{"hosts": ["llm.example"], "secretName": "tls"}],
            "annotations": {"a": "b"},
        },
        "httpRoute": _ON
        | {"parentRefs": [{"name": "public"}], "hostnames": ["llm.example"], "annotations": {"a": "b"}},
    },
    "redis": {"builtin": {"tlsSecret": "redis-tls", **_POD}},
    "serviceAccount": {"annotations": {"role": "none"}},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"app": "front"}}}],
        "extraGatewayEgress": [{"ports": [{"port": 4317, "protocol": "TCP"}]}],
        "extraWorkerEgress": [{"ports": [{"port": 4317, "protocol": "TCP"}]}],
    },
    "metrics": {
        "serviceMonitor": _ON | {"labels": {"release": "prometheus"}},
        "prometheusRule": _ON | {"labels": {"release": "prometheus"}},
        "dashboard": _ON | {"annotations": {"folder": "LLM"}},
    },
    "extraObjects": [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "{{ .Release.Name }}-extra", "namespace": "{{ .Release.Namespace }}"},
            "data": {"a": "b"},
        }
    ],
}
_RESTRICTED: Final = {
    "image": "registry.example/tool:1",
    "resources": {"requests": {"cpu": "10m"}, "limits": {"memory": "16Mi"}},
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    },
}
_ASKED: Final = {f"{kind}Probe": {"exec": {"command": ["true"]}} for kind in ("startup", "readiness", "liveness")}
_HATCHES: Final = {
    "podSecurityContext": {"runAsUser": 20001, "fsGroup": None, "supplementalGroups": [30001]},
    "securityContext": {"runAsUser": 20002, "procMount": "Default"},
    "schedulerName": "volcano",
    "resourceClaims": [{"name": "gpu"}],
    "extraEnvFrom": [{"configMapRef": {"name": "proxies"}}, {"secretRef": {"name": "more", "optional": True}}],
    "initContainers": [{"name": "fetch"} | _RESTRICTED],
    "extraContainers": [{"name": "sidecar"} | _RESTRICTED | _ASKED],
    "podDisruptionBudget": {"minAvailable": "50%"},
    "readinessProbe": {"periodSeconds": 7, "timeoutSeconds": 3, "failureThreshold": 5},
}
_OFF: Final = {"enabled": False}
ENGINES: Final = {"app": "vllm"}
"""Labels of pods of another chart."""
CRON: Final = {
    "type": "cron",
    "metadata": {"timezone": "Etc/UTC", "start": "0 7 * * *", "end": "0 20 * * *", "desiredReplicas": "1"},
}
MATRIX: Final[dict[str, Values]] = {
    "defaults": {},
    "everything-on": EVERYTHING_ON,
    "everything-off": {
        "redis": {"mode": "none"},
        "networkPolicy": _OFF,
        "serviceAccount": {"create": False},
        "worker": {"podDisruptionBudget": _OFF, "volume": {"existingClaim": "models"}, "download": False},
        "gateway": {"podDisruptionBudget": _OFF},
    },
    "ipv6": {"ipFamily": "IPv6", "models": [_MODEL, {"name": "v", "source": "x/v", "engine": "vllm"}]},
    "vllm-tensor-parallel": yaml.safe_load((EXAMPLES / "vllm-tensor-parallel.yaml").read_text()),
    "existing-secrets": {
        "clusterSecret": {"existingSecret": "ours", "key": "cluster"},
        "opsKey": _ON | {"existingSecret": "ours", "key": "ops"},
        "tls": {"gateway": {"secret": "public-tls", "caKey": "", "name": "llm.example"}},
        "tracing": {"endpoint": "https://collector.example/v1/traces"},
        "apiKeys": _ON | {"existingSecret": "ours-too", "key": "who.toml", "plainKey": "one"},
        "redis": {"existingSecret": "ours", "gatewayPasswordKey": "g", "workerPasswordKey": "w"},
    },
    "sentinel": {
        "redis": {
            "mode": "external",
            "existingSecret": "redis",
            "external": {"url": "redis+sentinel://s0:26379,s1:26379/main", "ports": [26379, 6379]},
        }
    },
    "cluster-tls": {
        "redis": {
            "mode": "external",
            "shards": 8,
            "existingSecret": "redis",
            "external": {"url": "rediss+cluster://r0:6380,r1:6380", "ports": [6380], "caSecret": "redis-ca"},
        }
    },
    "open-redis": {"redis": {"mode": "external", "external": {"url": "redis://redis.other:6379"}}},
    "escape-hatches": {
        "global": {"imageRegistry": "mirror.example", "imagePullSecrets": [{"name": "parents"}]},
        "models": [_MODEL, {"name": "foreign", "source": "x/foreign", "engine": "vllm"}],
        "worker": _HATCHES | {"updateStrategy": {"rollingUpdate": {"partition": 1}}},
        "gateway": _HATCHES
        | {
            "strategy": {"rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 1}},
            "service": {"type": "NodePort", "nodePort": 30080, "externalTrafficPolicy": "Local"},
            "ingress": _ON | {"hosts": ["a.example", {"host": "b.example", "path": "/llm", "pathType": "Exact"}]},
        },
        "metrics": {
            "serviceMonitor": _ON
            | {
                "scrapeTimeout": "5s",
                "namespace": "monitoring",
                "relabelings": [{"targetLabel": "cluster", "replacement": "one"}],
                "metricRelabelings": [{"action": "drop", "sourceLabels": ["__name__"], "regex": "go_.*"}],
            }
        },
    },
    "external": {
        "models": [
            {
                "name": "llama",
                "engine": "vllm",
                "external": {"urls": ["http://vllm-0.vllm.other:8000", "https://b.example", "http://10.0.0.9:8000"]},
                "vllm": {"dataParallelSize": 2, "apiKey": {"existingSecret": "engine"}},
            },
            {"name": "small", "engine": "vllm", "source": "x/y", "external": {"selector": ENGINES}, "download": False},
            {
                "name": "third",
                "engine": "sglang",
                "replicas": 1,
                "external": {"service": "sglang.other", "port": 30000, "events": "none"},
            },
        ],
        "metrics": {"serviceMonitor": _ON},
        "worker": {"vllm": {"metrics": True}, "serviceAccountName": "adapters"},
    },
    "host-network": {
        "networkPolicy": _OFF,
        "gateway": {"hostNetwork": True, "serviceAccountName": "front"},
        "worker": {"hostNetwork": True, "download": False},
        "models": [
            _MODEL | {"volume": {"hostPath": "/srv/models", "readOnly": True}},
            {"name": "off", "source": "x/off", "replicas": 0},
            {
                "name": "nights",
                "source": "x/nights",
                "autoscaling": _ON
                | {
                    "kind": "keda",
                    "metric": "workersNeeded",
                    "minReplicas": 0,
                    "prometheusAddress": "http://prometheus:9090",
                    "triggers": [CRON],
                },
            },
        ],
    },
    "adapters": {
        "models": [{"name": "a", "source": "x/a", "engine": "vllm"}],
        "worker": {"download": False},
    },
    "keda": {
        "gateway": {"autoscaling": _ON | {"kind": "keda", "prometheusAddress": "http://prometheus:9090"}},
        "worker": {
            "autoscaling": _ON | {"kind": "keda", "prometheusAddress": "http://prometheus:9090"},
            "kvDisk": {"size": "9Gi"},
        },
        "fullnameOverride": "a-name-of-exactly-thirty-chars",
        "models": [{"name": "a-name-of-20-letters", "source": "x/y"}],
    },
}


def helm(
    version: str, values: Values, *, kube_version: str = "1.31.0", release: str = "rel", notes: bool = False
) -> subprocess.CompletedProcess[str]:
    """`helm template`, or with `notes` a client-side dry run that prints NOTES too."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        command = ["install", "--dry-run=client"] if notes else ["template", "--kube-version", kube_version]
        apis = [] if notes else [option for api in CUSTOM_APIS for option in ("--api-versions", api)]
        return call(DEST / version, *command, release, CHART, "--namespace", "serving", "-f", file.name, *apis)


def rendered(
    values: Values, version: str = "helm4", *, kube_version: str = "1.31.0", release: str = "rel"
) -> list[Document]:
    done = helm(version, values, kube_version=kube_version, release=release)
    assert done.returncode == 0, done.stderr
    return list(parse(done.stdout))


@functools.cache
def text(name: str, version: str = "helm4", kube_version: str = "1.31.0") -> str:
    """The manifests of one set of the matrix."""
    done = helm(version, MATRIX[name], kube_version=kube_version)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def _documents(name: str, version: str) -> tuple[Document, ...]:
    return tuple(parse(text(name, version)))


def render(name: str, version: str = "helm4") -> list[Document]:
    return list(_documents(name, version))


class _Strict(yaml.SafeLoader):
    """Refuses a key that stands twice, as kustomize and Flux do."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key stands twice{node.start_mark}"
        return super().construct_mapping(node, deep)


def parse(manifests: str) -> Iterator[Document]:
    return (document for document in yaml.load_all(manifests, _Strict) if document)


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def pod_templates(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """(name, pod with metadata and spec) of every workload, the test's pod included."""
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet"):
            yield document["metadata"]["name"], document["spec"]["template"]
        elif document["kind"] == "Pod":
            yield document["metadata"]["name"], document


def containers(pod: Document) -> list[Document]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def default_values() -> Values:
    values: Values = yaml.safe_load((CHART / "values.yaml").read_text())
    return values
