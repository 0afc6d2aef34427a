"""Pod Security "restricted" over every set of values, and checkov with each finding fixed or explained."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.k8s import chart
from tests.k8s.chart import containers, pod_templates, render
from tests.k8s.tools import CHART, CHECKOV, ROOT, call
from worker.common.command_line import read_secret

EXPLAINED: Final = {
    "CKV_K8S_43": "digests are the operator's: image.digest of each image pins them, and values.yaml cannot know them",
    "CKV_K8S_15": "images have immutable tags; pullPolicy is a value, and Always needs the registry at every start",
    "CKV_K8S_11": "a CPU limit throttles an event loop and a model; requests are set, limits are a value",
    "CKV_K8S_8": "the pod of `helm test` runs once to its end",
    "CKV_K8S_9": "the pod of `helm test` runs once to its end",
    "CKV_DOCKER_7": "the base is a build argument with the tag 3.11-slim, which checkov does not resolve",
}
ALLOWED_VOLUMES: Final = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}


@pytest.mark.parametrize("name", chart.MATRIX)
def test_pods_are_restricted(name: str) -> None:
    for _, pod in pod_templates(render(name)):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert not any(spec.get(key) for key in ("hostPID", "hostIPC"))
        assert "hostNetwork" not in spec or name == "host-network"
        whole = spec["securityContext"]
        assert whole["runAsNonRoot"] is True
        assert min(whole["runAsUser"], whole["runAsGroup"]) >= 10000
        assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in spec.get("volumes", []):
            asked = {"hostPath"} if name == "host-network" else set()
            assert set(volume) - {"name"} <= ALLOWED_VOLUMES | asked
        for container in containers(pod):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["runAsNonRoot"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not security.get("privileged")
            assert "hostPort" not in str(container.get("ports"))
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"]["cpu"]
            assert ":" in container["image"]
            assert not container["image"].endswith(":latest")


@pytest.mark.parametrize("text", ["pw", "pw\n", " p w\t\r\n"])
def test_redis_takes_the_password_that_is_sent(text: str, tmp_path: Path) -> None:
    """A file that an editor or `openssl rand` has written ends with a line break."""
    (tmp_path / "password").write_text(text)
    script = (CHART / "files" / "redis-users.sh").read_text().partition("umask")[0] + 'digest "$1"'
    done = subprocess.run(["sh", "-c", script, "sh", tmp_path / "password"], capture_output=True, text=True, check=True)
    sent = read_secret("--redis-password-file", str(tmp_path / "password"))
    assert done.stdout == hashlib.sha256(sent).hexdigest() + "\n"


@pytest.mark.parametrize("name", [name for name, values in chart.MATRIX.items() if "networkPolicy" not in values])
def test_everything_is_denied_that_is_not_allowed(name: str) -> None:
    policies = chart.of_kind(render(name), "NetworkPolicy")
    (deny,) = [policy for policy in policies if policy["metadata"]["name"].endswith("default-deny")]
    assert deny["spec"]["policyTypes"] == ["Ingress", "Egress"]
    for policy in policies:
        for rule in policy["spec"].get("egress", []):
            assert rule["ports"], "egress to every port"
        for rule in policy["spec"].get("ingress", []):
            assert rule["ports"]
            public = {port["port"] for port in rule["ports"]} == {8000}
            assert public or rule["from"], "open to everybody"


def failed_checks(framework: str, *arguments: str | Path) -> set[tuple[str, str]]:
    options = ["--framework", framework, "--compact", "--quiet", "--skip-download", "--output", "json"]
    done = call(CHECKOV, *arguments, *options)
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 100, done.stderr
    assert report["summary"]["parsing_errors"] == 0
    return {(check["check_id"], check["resource"]) for check in report["results"]["failed_checks"]}


def test_checkov_in_the_manifests(tmp_path: Path) -> None:
    """Every finding of checkov has an explanation in `EXPLAINED`."""
    for name in ("defaults", "everything-on"):
        (tmp_path / f"{name}.yaml").write_text(chart.text(name))
    found = failed_checks("kubernetes", "-d", tmp_path)
    assert {check for check, _ in found} <= EXPLAINED.keys(), found
    assert {resource for check, resource in found if check in ("CKV_K8S_8", "CKV_K8S_9")} <= {
        "Pod.serving.rel-headstart-test",
        "Pod.serving.rel-llm-test",
    }


def test_checkov_in_the_dockerfile() -> None:
    """Every finding of checkov has an explanation in `EXPLAINED`."""
    found = failed_checks("dockerfile", "-f", ROOT / "Dockerfile")
    assert {check for check, _ in found} <= EXPLAINED.keys(), found
