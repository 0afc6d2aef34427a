"""Pack what `make gpu-check` needs on a host that has torch and no network: `python tools/gpu_bundle.py FILE`.

    headstart-gpu/                      the committed sources
    headstart-gpu/packages/any/         unpacked wheels, for every Python
    headstart-gpu/packages/cp311/ ...   those that are compiled for one

There: `tar xf FILE && make -C headstart-gpu gpu-check`. torch, and what torch itself needs, are the host's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.metadata import requires
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu.missing import NEEDED, PYTHONS

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = "headstart-gpu"
MAX_BYTES: Final = 60_000_000
HOST: Final = {"torch", "triton"}
"""The host brings these, with their own dependencies."""
INSTEAD: Final = {"numpy": "2.3.5"}
"""Other versions than those pinned: Triton's interpreter of torch 2.11 fails with a newer numpy."""
GLIBC: Final = (17, 24, 26, 27, 28, 31)
"""Platforms manylinux_2_N of the wheels that are taken."""


def pins() -> dict[str, str]:
    """Return name to version of all that is pinned for workers, gateways and tests."""
    files = (*NEEDED, "build.txt")  # pytest and the build of our wheel share some packages
    lines = [line for name in files for line in (ROOT / "requirements" / name).read_text().splitlines()]
    found = [line.split("==") for line in lines if "==" in line]
    return {canonicalize_name(name): version for name, version in found} | INSTEAD


def closure() -> list[str]:
    """Return the pins of the needed packages and of all that they require here, without the host's."""
    pinned, left, found = pins(), [package for packages in NEEDED.values() for package in packages], set[str]()
    while left:
        name = canonicalize_name(left.pop())
        if name in found or name in HOST:
            continue
        found.add(name)
        if name != "xformers":  # it requires only torch, and is not installed here
            wanted = map(Requirement, requires(name) or ())
            left += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [f"{name}=={pinned[name]}" for name in sorted(found)]


def download(packages: list[str], python: str, folder: Path) -> list[Path]:
    """Return the wheels for this Python, such as 312."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    platforms = [f"manylinux_2_{version}_x86_64" for version in GLIBC] + ["manylinux2014_x86_64"]
    for platform in platforms:
        command += ["--platform", platform]
    subprocess.run([*command, *packages], check=True)
    return sorted(folder.glob("*.whl"))


def unpack(wheels: list[Path], python: str, folder: Path) -> None:
    """Unpack wheels into the folder of this Python, or into that of all."""
    for wheel in wheels:
        is_for_one = f"-cp{python}-cp{python}-" in wheel.name
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / (f"cp{python}" if is_for_one else "any"))


def pack(target: Path) -> int:
    """Write the bundle and return its size in bytes."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / FOLDER
        sources = subprocess.run(["git", "-C", str(ROOT), "archive", "HEAD"], check=True, capture_output=True).stdout
        folder.mkdir()
        subprocess.run(["tar", "x", "-C", str(folder)], input=sources, check=True)
        for major, minor in PYTHONS:
            python = f"{major}{minor}"
            wheels = Path(temporary) / python
            unpack(download(closure(), python, wheels), python, folder / "packages")
        commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], check=True, capture_output=True).stdout
        (folder / "packages" / "commit.txt").write_bytes(commit)
        with tarfile.open(target, "w:xz", preset=4) as bundle:
            bundle.add(folder, FOLDER)
    return target.stat().st_size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    target = parser.parse_args().file
    num_bytes = pack(target)
    print(f"{target}: {num_bytes / 1e6:.1f} MB; there: tar xf {target.name} && make -C {FOLDER} gpu-check")
    if num_bytes > MAX_BYTES:
        print(f"it is larger than {MAX_BYTES / 1e6:.0f} MB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
