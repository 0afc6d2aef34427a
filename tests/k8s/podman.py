"""Run what the chart renders by podman: images from the shipped Dockerfile, pods as containers on one network.

No cluster is here, so this does a part of the kubelet's work: arguments, environment, files from Secrets and
ConfigMaps, empty volumes, uid, capabilities, read-only root, memory limit, init containers, preStop and SIGTERM. Names
of Services resolve to the containers that they would select.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.k8s.chart import Document, of_kind
from tests.k8s.tools import DEST, ROOT, call, succeed
from tests.waiting import HANG_S

BASE: Final = "localhost/python:3.11-slim"
CONF: Final = """\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
"""
UNVERIFIED: Final = ssl._create_unverified_context()
"""The kubelet's way with certificates."""
_CA: Final = "/etc/ssl/certs/ca-certificates.crt"
_BYTES: Final = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def _environment() -> dict[str, str]:
    conf = DEST / "containers.conf"
    conf.write_text(CONF)
    return {**os.environ, "CONTAINERS_CONF": str(conf)}


def podman(*words: str | Path) -> str:
    return succeed("podman", *words, env=_environment(), cwd=DEST)


def try_podman(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run podman in `DEST`: when a container is killed for its memory, conmon leaves a file in the current folder."""
    return call("podman", *words, env=_environment(), cwd=DEST)


def import_base() -> None:
    """The stand-in for python:3.11-slim, once for each base.tar."""
    stamp = str(int((DEST / "base.tar").stat().st_mtime))
    if stamp in try_podman("image", "inspect", BASE, "--format", "{{.Comment}}").stdout:
        return
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    podman("import", "--quiet", "--message", stamp, "--change", f"ENV {path}", DEST / "base.tar", BASE)


def build(target: str, *, device: str = "cpu") -> str:
    """The shipped Dockerfile, unchanged, on the stand-in base."""
    tag = f"localhost/headstart-{target}:test"
    options = ["--pull=never", "--format=docker", "--network=host", f"--target={target}", f"--tag={tag}"]
    options += [
        f"--build-arg=PYTHON_IMAGE={BASE}",
        f"--build-arg=DEVICE={device}",
        "--build-arg=PIP_FIND_LINKS=/find-links",
    ]
    options += [f"--volume={DEST / 'wheels'}:/find-links:ro"]
    if os.path.exists(_CA):
        options.append(f"--volume={_CA}:{_CA}:ro")
    podman("build", *options, ROOT)
    return tag


def image_bytes(image: str) -> int:
    return int(podman("image", "inspect", image, "--format", "{{.Size}}"))


def num_bytes(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi)", quantity)
    assert match is not None, quantity
    return int(match[1]) * _BYTES[match[2]]


@dataclass
class Container:
    """One container of a rendered pod."""

    name: str
    ip: str
    spec: Document
    pod: Document

    def exec(self, *command: str) -> subprocess.CompletedProcess[str]:
        return try_podman("exec", self.name, *command)

    def inspect(self, template: str) -> str:
        return podman("inspect", self.name, "--format", template).strip()

    @property
    def pid(self) -> int:
        return int(self.inspect("{{.State.Pid}}"))

    def logs(self) -> str:
        done = try_podman("logs", "--tail", "60", self.name)
        return done.stdout + done.stderr

    def url(self, port: str) -> str:
        number = next(p["containerPort"] for p in self.spec["ports"] if p["name"] == port)
        scheme = self.spec.get("readinessProbe", {}).get("httpGet", {}).get("scheme", "HTTP").lower()
        return f"{scheme}://{self.ip}:{number}"

    def ready(self) -> bool:
        """As the kubelet would ask."""
        probe = self.spec["readinessProbe"]
        if "exec" in probe:
            return self.exec(*probe["exec"]["command"]).returncode == 0
        try:
            url = self.url(probe["httpGet"]["port"]) + probe["httpGet"]["path"]
            with urllib.request.urlopen(url, timeout=5, context=UNVERIFIED) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait_ready(self, timeout_s: float = HANG_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.ready():
            running = self.inspect("{{.State.Running}}") == "true"
            if not running or time.monotonic() > deadline_s:
                raise AssertionError(f"{self.name} is not ready:\n{self.logs()}")
            time.sleep(0.2)

    def stop(self) -> int:
        """preStop, SIGTERM, and SIGKILL after the grace period, as the kubelet does; the exit status."""
        started_s = time.monotonic()
        pre_stop = self.spec.get("lifecycle", {}).get("preStop")
        if pre_stop is not None:
            assert self.exec(*pre_stop["exec"]["command"]).returncode == 0
        grace_s = self.pod["spec"]["terminationGracePeriodSeconds"] - (time.monotonic() - started_s)
        podman("stop", "--time", str(max(1, int(grace_s))), self.name)
        return int(self.inspect("{{.State.ExitCode}}"))

    def start(self) -> None:
        podman("start", self.name)
        self.wait_ready()


@dataclass
class Lab:
    """One network, and the pods of one render that run on it."""

    network: str
    subnet: str
    documents: list[Document]
    folder: Path
    volumes: dict[str, Path]
    """Claims that exist: their folders."""
    namespace: str = "serving"
    containers: list[Container] = field(default_factory=list)
    num_addresses: int = 0

    def run(self, pod: Document, name: str) -> Container:
        """Start the pod's init containers, then its one container."""
        ip = self._address()
        mounts = {volume["name"]: self._volume(volume, name, pod) for volume in pod["spec"].get("volumes", [])}
        for init in pod["spec"].get("initContainers", []):
            options = self._options(init, pod, name, ip, mounts)
            podman("run", "--rm", *options, init["image"], *self._command(init, name, ip))
        (spec,) = pod["spec"]["containers"]
        options = self._options(spec, pod, name, ip, mounts)
        options += [f"--network={self.network}", f"--ip={ip}", f"--name={self._unique(name)}"]
        options += [f"--network-alias={service}" for service in self._services(pod)]
        podman("run", "--detach", *options, spec["image"], *self._command(spec, name, ip))
        container = Container(self._unique(name), ip, spec, pod)
        self.containers.append(container)
        return container

    def run_to_the_end(self, pod: Document, name: str) -> str:
        """A pod such as the test's: its output. Fails when it fails."""
        (spec,) = pod["spec"]["containers"]
        mounts = {volume["name"]: self._volume(volume, name, pod) for volume in pod["spec"].get("volumes", [])}
        options = self._options(spec, pod, name, "", mounts)
        options.append(f"--network={self.network}")
        return podman("run", "--rm", *options, spec["image"], *self._command(spec, name, ""))

    def template(self, name: str) -> Document:
        """The pod template of a rendered workload."""
        (workload,) = [d for d in of_kind(self.documents, "Deployment", "StatefulSet") if d["metadata"]["name"] == name]
        template: Document = workload["spec"]["template"]
        return template

    def secret(self, name: str, key: str) -> str:
        return base64.b64decode(self._secret(name)["data"][key]).decode()

    def _secret(self, name: str) -> Document:
        (secret,) = [d for d in of_kind(self.documents, "Secret") if d["metadata"]["name"] == name]
        return secret

    def _unique(self, name: str) -> str:
        return f"{self.network}-{name}"

    def _address(self) -> str:
        self.num_addresses += 1
        return re.sub(r"\d+/\d+$", str(10 + self.num_addresses), self.subnet)

    def _services(self, pod: Document) -> list[str]:
        labels = pod["metadata"]["labels"].items()
        return [
            s["metadata"]["name"] for s in of_kind(self.documents, "Service") if s["spec"]["selector"].items() <= labels
        ]

    def _volume(self, volume: Document, pod_name: str, pod: Document) -> Path:
        if "persistentVolumeClaim" in volume:
            return self.volumes[volume["persistentVolumeClaim"]["claimName"]]
        folder = self.folder / pod_name / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, 0, pod["spec"]["securityContext"]["fsGroup"])
        folder.chmod(0o2770)
        for path, content in self._files(volume).items():
            (folder / path).write_bytes(content)
            os.chown(folder / path, 0, pod["spec"]["securityContext"]["fsGroup"])
            (folder / path).chmod(0o440)
        return folder

    def _files(self, volume: Document) -> dict[str, bytes]:
        if "secret" in volume:
            source = volume["secret"]
            keys = self._secret(source["secretName"])["data"]
            items = {item["path"]: item["key"] for item in source.get("items", [{"path": k, "key": k} for k in keys])}
            return {path: self.secret(source["secretName"], key).encode() for path, key in items.items()}
        if "configMap" in volume:
            (found,) = [
                d for d in of_kind(self.documents, "ConfigMap") if d["metadata"]["name"] == volume["configMap"]["name"]
            ]
            return {key: value.encode() for key, value in found["data"].items()}
        assert "emptyDir" in volume
        return {}

    def _options(self, spec: Document, pod: Document, name: str, ip: str, mounts: dict[str, Path]) -> list[str]:
        security, whole = spec["securityContext"], pod["spec"]["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not security["allowPrivilegeEscalation"]
        options = ["--pull=never", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--pids-limit=512"]
        options += [f"--user={whole['runAsUser']}:{whole['runAsGroup']}", f"--group-add={whole['fsGroup']}"]
        options += [f"--memory={num_bytes(spec['resources']['limits']['memory'])}"]
        if security["readOnlyRootFilesystem"]:
            options += ["--read-only", "--read-only-tmpfs=false"]
        for key, value in self._variables(spec, name, ip).items():
            options.append(f"--env={key}={value}")
        for mount in spec.get("volumeMounts", []):
            mode = "ro" if mount.get("readOnly") else "rw"
            options.append(f"--volume={mounts[mount['name']]}:{mount['mountPath']}:{mode}")
        if "command" in spec:
            options.append(f"--entrypoint={json.dumps(spec['command'])}")
        return options

    def _variables(self, spec: Document, name: str, ip: str) -> dict[str, str]:
        fields = {"metadata.name": name, "metadata.namespace": self.namespace, "status.podIP": ip}
        return {
            variable["name"]: variable.get("value") or fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            for variable in spec.get("env", [])
        }

    def _command(self, spec: Document, name: str, ip: str) -> list[str]:
        variables = self._variables(spec, name, ip)
        return [re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], argument) for argument in spec.get("args", [])]


@contextmanager
def lab(documents: list[Document], folder: Path, volumes: dict[str, Path]) -> Iterator[Lab]:
    """Removes all that it has started."""
    network = f"headstart-{os.getpid()}-{secrets.token_hex(2)}"
    podman("network", "create", network)
    subnets: Any = json.loads(podman("network", "inspect", network))[0]["subnets"]
    opened = Lab(network, subnets[0]["subnet"], documents, folder, volumes)
    try:
        yield opened
    finally:
        for container in opened.containers:
            try_podman("rm", "--force", "--time", "0", container.name)
        try_podman("network", "rm", "--force", network)
