"""`python -m benchmarks.gpu.missing`: checks what this host lacks for a GPU.

Prints a line for each check and, last, one JSON object: {"ok", "mode": "cuda" or "interpreter", "free_bytes", ...}.
Apart from torch, it imports only the standard library.
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
from pathlib import Path
from typing import Any, Final

from worker.common.checks import Check, judge, judge_gpu

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
"""The packages that the parts import, by the file that pins them. A bundle has these and their dependencies."""
FROM_BUNDLE: Final = "run it from a bundle (`make gpu-bundle`, where there is a network), or pip install"


def version_of(text: str) -> tuple[int, int]:
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def find_python() -> Check:
    found = f"Python {platform.python_version()}, {sys.executable}"
    fix = "name Python 3.11 or 3.12: make gpu-check PYTHON=python3.12"
    is_tested = sys.version_info[:2] in PYTHONS
    return judge("python", found, (sys.version_info < PYTHONS[0], "fail", fix), (not is_tested, "warn", fix))


def find_packages() -> Check:
    """Check that each needed package is installed. Versions other than the pinned ones are listed."""
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
        return Check("packages", "fail", f"{len(missing)} are missing", f"{FROM_BUNDLE} {' '.join(missing)}")
    return Check("packages", "ok", ", ".join(other) or "all that is needed, in the pinned versions")


def find_torch(torch: Any) -> Check:
    found = f"torch {torch.__version__}, built for CUDA {torch.version.cuda}"
    oldest, newest = (".".join(map(str, version)) for version in TORCH)
    is_other_cuda = torch.version.cuda is not None and torch.version.cuda.split(".")[0] != CUDA
    return judge(
        "torch",
        found,
        (not TORCH[0] <= version_of(torch.__version__) <= TORCH[1], "fail", f"install torch {oldest} to {newest}"),
        (is_other_cuda, "warn", f"only builds for CUDA {CUDA} are meant to work"),
    )


def find_triton() -> Check:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return Check("triton", "fail", "not installed", "install torch's own, which its CUDA build brings along")
    is_known = TRITON[0] <= version_of(version) <= TRITON[1]
    return judge("triton", f"triton {version}", (not is_known, "warn", "tested: 3.6 to 3.8"))


def find_compiler() -> Check:
    """Check what Triton compiles its launchers with: a C compiler, and Python's headers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return Check("compiler", "fail", "no gcc, no clang", "install gcc, or name a C compiler by CC")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return Check("compiler", "fail", f"{compiler}, but no {header}", "install python3-dev of this Python")
    return Check("compiler", "ok", f"{compiler}, {header}")


def find_gpu(torch: Any, index: int) -> Check:
    major, minor = torch.cuda.get_device_capability(index)
    is_old = (major, minor) < MIN_CAPABILITY
    return judge_gpu(
        f"{torch.cuda.get_device_name(index)}, {major}.{minor}",
        *torch.cuda.mem_get_info(index),
        (is_old, "fail", "take one of compute capability 8.0 or newer"),
    )


def find_flash() -> Check:
    """Check that xformers accepts the flash attention of this torch. It compares signatures at import."""
    try:
        flash = importlib.import_module("xformers.ops.fmha.flash")
    except Exception as error:  # its import may raise anything
        return Check("xformers", "fail", f"{type(error).__name__}: {error}", "install another torch of 2.11 to 2.14")
    if flash.FLASH_VERSION == "0.0.0":
        return Check("xformers", "fail", "no flash attention in this torch", "install torch's own build for CUDA 13")
    return Check("xformers", "ok", f"flash attention {flash.FLASH_VERSION} of torch")


def find_machine(torch: Any, device: str) -> tuple[list[Check], dict[str, Any]]:
    """Return the checks of the GPU, and what it is for the parts that follow."""
    if torch.cuda.is_available() and device != "cpu":
        index = int(device.partition(":")[2] or 0)
        facts = {"free_bytes": torch.cuda.mem_get_info(index)[0], "gpu": torch.cuda.get_device_name(index)}
        return [find_gpu(torch, index), find_compiler()], {"mode": "cuda", **facts}
    if device.startswith("cuda") or (device == "auto" and Path("/dev/nvidiactl").exists()):
        fix = "install its driver, and a torch that is built for CUDA 13; or give --device cpu"
        return [Check("gpu", "fail", "torch cannot use a GPU", fix)], {}
    found = "none: Triton's interpreter and a tiny model, which cannot test a GPU"
    return [Check("gpu", "warn", found)], {"mode": "interpreter"}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.missing")
    parser.add_argument("--device", default="auto")
    device = parser.parse_args(argv).device
    packages = find_packages()
    checks, facts = [find_python(), packages], {"mode": "none", "free_bytes": 0}
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        checks.append(Check("torch", "fail", str(error), "install torch 2.11 to 2.14 for CUDA 13"))
    else:
        of_machine, found = find_machine(torch, device)
        checks += [find_torch(torch), find_triton(), *of_machine]
        if found.get("mode") == "cuda" and packages.status == "ok":
            checks.append(find_flash())
        facts |= found | {"torch": torch.__version__}
    print(*checks, sep="\n")
    is_ok = all(check.status != "fail" for check in checks)
    print(json.dumps({"ok": is_ok, "python": platform.python_version(), **facts}))
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
