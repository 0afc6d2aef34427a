"""Write the hash-pinned locks of the images: `python tools/lock.py [--uv PROGRAM]`.

    build.lock         Headstart's wheel            gateway.lock       the gateway's image
    worker-cpu.lock    gateway + worker             worker-cuda.lock   the same, cuda.txt, and what torch needs on CUDA

The versions are those of requirements/*.txt; only the CUDA lock is resolved: torch's libraries stand nowhere else.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from typing import Final

REQUIREMENTS: Final = Path(__file__).parent.parent / "requirements"
LOCKS: Final = {
    "build.lock": ("build.txt",),
    "gateway.lock": ("gateway.txt",),
    "worker-cpu.lock": ("gateway.txt", "worker.txt"),
    "worker-cuda.lock": ("gateway.txt", "worker.txt", "cuda.txt"),
}
TORCH_CPU: Final = (
    "torch==2.13.0+cpu \\\n    --hash=sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
)
"""The cp311 manylinux_2_28_x86_64 wheel of PyTorch's own index; PyPI has only the CUDA build."""


def compile_lock(uv: str, name: str) -> str:
    sources = [str(REQUIREMENTS / source) for source in LOCKS[name]]
    command = [uv, "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate", "--no-config"]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    if name != "worker-cuda.lock":
        command.append("--no-deps")
    text = subprocess.run([*command, *sources], check=True, capture_output=True, text=True).stdout
    if name == "worker-cpu.lock":
        text, count = re.subn(r"torch==2\.13\.0 \\\n(    --hash=\S+( \\)?\n)+", f"{TORCH_CPU}\n", text)
        assert count == 1, "worker.txt pins another torch: put its CPU wheel into TORCH_CPU"
    return f"# Written by tools/lock.py from {', '.join(LOCKS[name])}. Do not edit.\n{text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", default="uv")
    uv = parser.parse_args().uv
    for name in LOCKS:
        (REQUIREMENTS / name).write_text(compile_lock(uv, name))


if __name__ == "__main__":
    main()
