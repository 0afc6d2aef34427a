"""tools/try_cluster.sh without a cluster: its values, its helm options, its report.

Small programs stand in for kind, kubectl, helm, docker and curl. They write down each call, and print an answer.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.k8s import chart
from tests.k8s.chart import containers, of_kind, pod_templates
from tests.k8s.tools import HELM_VERSIONS, ROOT, call, succeed

SCRIPT: Final = ROOT / "tools" / "try_cluster.sh"
IMAGES: Final = ("registry.example:5000/gateway:1", "registry.example:5000/worker:2")
STEPS: Final = (
    "the programs it needs are there",
    "a cluster starts",
    "the cluster has the images",
    "a namespace enforces restricted pods",
    "an unrestricted pod is refused there",
    "the chart installs",
    "all pods are ready",
    "helm test passes",
    "a chat is answered",
    "an upgrade changes the gateways",
    "a chat is answered after it",
    "workers scale from 2 to 3",
    "workers scale from 3 to 1",
    "a chat is answered by one worker",
    "the chart is uninstalled",
    "nothing of it is left",
)
ANSWERS: Final = {
    "kind": "",
    "docker": "",
    "helm": """case "$*" in *worker.replicas=*) echo "${*##*worker.replicas=}" >"$STATE";; esac""",
    "kubectl": """case "$*" in
      *"run unrestricted"*) echo 'pods "unrestricted" is forbidden: violates PodSecurity'; exit 1 ;;
      *api-keys*) echo a2V5 | tr -d '\\n' ;;
      *port-forward*) echo $$ >>"$CALLS.forwards"; echo "Forwarding from 127.0.0.1:1234 -> 8000"; exec sleep 60 ;;
      *containers*args*) echo '["--access-log"]' ;;
      *headstart/model*) n=$(cat "$STATE"); for i in $(seq "$n"); do echo "pod/$i"; done ;;
    esac""",
    "curl": """while [ "$1" != --output ]; do shift; done
      echo '{"usage": {"completion_tokens": 8}}' >"$2"; echo 200""",
}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Return a folder of programs that write their words into calls.log, and then answer by `ANSWERS`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, answer in ANSWERS.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >>"$CALLS"\n{answer}\n')
        program.chmod(0o755)
    return folder


def tried(programs: Path, *arguments: str, **more: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script, and return its result and how it called the programs."""
    folder = programs.parent
    calls = folder / "calls.log"
    env = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "TMPDIR": str(folder),
        "CALLS": str(calls),
        "STATE": str(folder / "workers"),
        **more,
    }
    done = call(SCRIPT, *arguments, env=env)
    return done, calls.read_text().splitlines()


def report(output: str) -> list[tuple[str, str]]:
    return re.findall(r"^(ok|failed) +\d+ s  (.*)$", output, re.MULTILINE)


def test_every_step_is_reported_and_the_cluster_goes(programs: Path) -> None:
    done, calls = tried(programs, *IMAGES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert report(done.stdout) == [("ok", name) for name in STEPS]
    assert f"kind load docker-image --name headstart-try {' '.join(IMAGES)}" in calls
    assert calls[-1] == "kind delete cluster --name headstart-try"
    labelled = next(line for line in calls if "label namespace" in line)
    assert "pod-security.kubernetes.io/enforce=restricted" in labelled
    assert not list(programs.parent.glob("tmp.*"))
    forwards = (programs.parent / "calls.log.forwards").read_text().split()
    assert len(forwards) == 3
    assert not [pid for pid in forwards if Path("/proc", pid).exists()]


def test_a_cluster_that_does_not_start_ends_it(programs: Path) -> None:
    (programs / "kind").write_text('#!/bin/sh\necho "kind $*" >>"$CALLS"\necho "no space"; test "$1" != create\n')
    done, calls = tried(programs, *IMAGES)
    assert done.returncode == 1
    assert report(done.stdout) == [("ok", STEPS[0]), ("failed", f"{STEPS[1]}: no space")]
    assert not any("helm" in line for line in calls)
    assert calls[-1] == "kind delete cluster --name headstart-try"


def test_a_later_failure_does_not_hide_the_other_steps(programs: Path) -> None:
    (programs / "curl").write_text("#!/bin/sh\necho refused; exit 7\n")
    done, calls = tried(programs, *IMAGES, KEEP="1")
    assert done.returncode == 1
    failed = [name for verdict, name in report(done.stdout) if verdict == "failed"]
    assert [name.partition(":")[0] for name in failed] == [name for name in STEPS if "chat" in name]
    assert report(done.stdout)[-1] == ("ok", STEPS[-1])
    assert "kind delete cluster" not in " ".join(calls)
    assert "The output of each step is in" in done.stdout


@pytest.mark.parametrize("version", HELM_VERSIONS)
def test_its_values_render_restricted_pods(version: str) -> None:
    values = yaml.safe_load(succeed(SCRIPT, "values"))
    documents = chart.rendered(values, version, release="try")
    workloads = {d["metadata"]["name"]: d["spec"] for d in of_kind(documents, "Deployment", "StatefulSet")}
    assert workloads.keys() == {"try-headstart-gateway", "try-headstart-tiny", "try-headstart-redis"}
    labels = workloads["try-headstart-tiny"]["template"]["metadata"]["labels"]
    assert {*re.findall(r'--selector "?([\w./-]+)=', SCRIPT.read_text())} <= labels.keys(), "it finds its pods"
    assert "try-headstart-api-keys" in {d["metadata"]["name"] for d in of_kind(documents, "Secret")}
    images = {c["image"] for _, pod in pod_templates(documents) for c in containers(pod)}
    assert {"headstart-gateway:try", "headstart-worker:try"} < images
