"""`python -m benchmarks.gpu.missing`: what this host lacks for a GPU, and how to mend it.

Prints a line for each check and, last, one JSON object: {"ok", "mode": "cuda" or "interpreter", "free_bytes", ...}.
Imports torch and nothing else that Python does not bring.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

REQUIREMENTS: Final = Path(__file__).parents[2] / "requirements"
PYTHONS: Final = ((3, 11), (3, 12))
TORCH: Final = ((2, 11), (2, 14))
CUDA: Final = "13"
TRITON: Final = ((3, 6), (3, 8))
MIN_CAPABILITY: Final = (8, 0)
"""bfloat16, and flash attention."""
NEEDED: Final = {
    "worker.txt": ("numpy", "gguf", "safetensors", "transformers", "llguidance"),
    "cuda.txt": ("xformers",),
    "gateway.txt": ("msgspec", "msgpack", "redis", "tokenizers", "jinja2", "huggingface-hub", "prometheus-client"),
    "dev.txt": ("pytest", "pytest-asyncio", "hypothesis"),
}
"""The packages that the parts import, by the file that pins them. A bundle brings these and their dependencies."""
FROM_BUNDLE: Final = "run it from a bundle (`make gpu-bundle`, where there is a network), or pip install"


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    status: str
    """ok, warn or fail"""
    found: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.status:4}  {self.name:10}  {self.found}" + (f"\n{'':18}-> {self.mend}" if self.mend else "")


def version_of(text: str) -> tuple[int, int]:
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def find_python() -> Finding:
    is_tested = sys.version_info[:2] in PYTHONS
    mend = "" if is_tested else "name Python 3.11 or 3.12: make gpu-check PYTHON=python3.12"
    status = "ok" if is_tested else "fail" if sys.version_info < PYTHONS[0] else "warn"
    return Finding("python", status, f"Python {platform.python_version()}, {sys.executable}", mend)


def find_packages() -> Iterator[Finding]:
    """Check that each needed package is there; another version than the pinned one is only said."""
    missing, other = [], []
    for name, packages in NEEDED.items():
        pins = dict(line.split("==") for line in (REQUIREMENTS / name).read_text().splitlines() if "==" in line)
        for package in packages:
            try:
                found = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                missing.append(f"{package}=={pins[package]}")
            else:
                other += [f"{package} {found} (tested: {pins[package]})"] if found != pins[package] else []
    if missing:
        yield Finding("packages", "fail", f"{len(missing)} are missing", f"{FROM_BUNDLE} {' '.join(missing)}")
    else:
        yield Finding("packages", "ok", ", ".join(other) or "all that is needed, in the pinned versions")


def find_torch(torch: Any) -> Finding:
    found = f"torch {torch.__version__}, built for CUDA {torch.version.cuda}"
    oldest, newest = (".".join(map(str, version)) for version in TORCH)
    if not TORCH[0] <= version_of(torch.__version__) <= TORCH[1]:
        return Finding("torch", "fail", found, f"install torch {oldest} to {newest}")
    if torch.version.cuda is not None and torch.version.cuda.split(".")[0] != CUDA:
        return Finding("torch", "warn", found, f"only builds for CUDA {CUDA} are meant to work")
    return Finding("torch", "ok", found)


def find_triton() -> Finding:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return Finding("triton", "fail", "not installed", "install torch's own, which its CUDA build brings along")
    is_known = TRITON[0] <= version_of(version) <= TRITON[1]
    return Finding(
        "triton", "ok" if is_known else "warn", f"triton {version}", "" if is_known else "tested: 3.6 to 3.8"
    )


def find_compiler() -> Finding:
    """Check what Triton compiles its launchers with: a C compiler, and Python's headers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return Finding("compiler", "fail", "no gcc, no clang", "install gcc, or name a C compiler by CC")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return Finding("compiler", "fail", f"{compiler}, but no {header}", "install python3-dev of this Python")
    return Finding("compiler", "ok", f"{compiler}, {header}")


def find_gpu(torch: Any, index: int) -> Finding:
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    found = f"{name}, {capability[0]}.{capability[1]}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if capability < MIN_CAPABILITY:
        return Finding("gpu", "fail", found, "take one of compute capability 8.0 or newer")
    if free < total / 2:
        return Finding("gpu", "warn", found, "another process holds most of it: `nvidia-smi` names it")
    return Finding("gpu", "ok", found)


def find_flash() -> Finding:
    """Check that xformers takes the flash attention of this torch: it compares signatures when it is imported."""
    try:
        flash = importlib.import_module("xformers.ops.fmha.flash")
    except Exception as error:  # it raises what it likes
        return Finding("xformers", "fail", f"{type(error).__name__}: {error}", "install another torch of 2.11 to 2.14")
    if flash.FLASH_VERSION == "0.0.0":
        return Finding("xformers", "fail", "no flash attention in this torch", "install torch's own build for CUDA 13")
    return Finding("xformers", "ok", f"flash attention {flash.FLASH_VERSION} of torch")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.missing")
    parser.add_argument("--device", default="auto")
    device = parser.parse_args(argv).device
    findings, said = [find_python(), *find_packages()], {"mode": "none", "free_bytes": 0}

    def add(finding: Finding) -> None:
        findings.append(finding)

    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        add(Finding("torch", "fail", str(error), "install torch 2.11 to 2.14 for CUDA 13"))
    else:
        add(find_torch(torch))
        add(find_triton())
        if torch.cuda.is_available() and device != "cpu":
            index = int(device.partition(":")[2] or 0)
            said |= {"mode": "cuda", "free_bytes": torch.cuda.mem_get_info(index)[0]}
            said |= {"gpu": torch.cuda.get_device_name(index)}
            findings += [find_gpu(torch, index), find_compiler()]
            if findings[1].status == "ok":
                add(find_flash())
        elif device.startswith("cuda") or (device == "auto" and Path("/dev/nvidiactl").exists()):
            mend = "install its driver, and a torch that is built for CUDA 13; or say --device cpu"
            add(Finding("gpu", "fail", "torch cannot use a GPU", mend))
        else:
            said["mode"] = "interpreter"
            add(Finding("gpu", "warn", "none: Triton's interpreter and a tiny model, which says nothing about a GPU"))
        said["torch"] = torch.__version__
    for finding in findings:
        print(finding)
    is_ok = all(finding.status != "fail" for finding in findings)
    print(json.dumps({"ok": is_ok, "python": platform.python_version(), **said}))
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
