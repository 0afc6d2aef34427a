"""The commands of README on a bare Debian, with only the plain package index."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.serving import READY, free_ports
from tests.install.roots import CHECKOUT, README, Checkout, Done
from tests.waiting import HANG_S

pytestmark = pytest.mark.deep

SUBSET = "tests/cache tests/server/cli/test_strange_folder.py tests/worker/test_doctor.py tests/e2e/test_taken_ports.py"
TORCH_WHEELS = "TORCH_WHEELS"
"""Names a folder with a CPU wheel of torch for Python 3.11, where pip is not configured to find one."""
ABOUT_TORCH = (
    ".venv/bin/python -c 'import ctypes, torch; print(torch.__version__, torch.version.cuda); "
    'torch.version.cuda and ctypes.CDLL("libcublasLt.so.%s" % torch.version.cuda.split(".")[0])\''
)
GPP = "there is no g++"


def report(checkout: Checkout, what: str, took_s: float) -> None:
    """Print a row of the table of times and disks; -s or -rP shows it."""
    gb = checkout.used_bytes() / 1e9
    print(f"{checkout.root.name}, {checkout.user} in {checkout.folder}: {what}: {took_s:.0f} s, .venv {gb:.1f} GB")


def serve_and_ask(checkout: Checkout, **variables: str) -> tuple[str, str]:
    """Run README's first command and its curl. Return what the server printed and answered."""
    port, ops_port = free_ports(2)
    ask = README.partition("\ncurl http://127.0.0.1:8000/")[2].partition("\n```")[0]
    curl = shlex.split("curl http://127.0.0.1:8000/" + ask.replace("\\\n", " "))
    curl[1] = curl[1].replace(":8000/", f":{port}/")
    with checkout.start(f"make serve ARGS='--port {port} --ops-port {ops_port}'", **variables) as serving:
        serving.wait_for(READY.pattern)
        done = subprocess.run([*curl, "--silent", "--fail"], capture_output=True, text=True, timeout=HANG_S, check=True)
        printed = serving.interrupt()
    assert "headstart: stopped" in printed, printed
    assert "Traceback" not in printed, printed
    return printed, json.loads(done.stdout)["choices"][0]["message"]["content"]


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def simple_index(folder: Path) -> Iterator[str]:
    """Serve a folder of folders, one for each package, as a package index."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(folder), str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def cpu_index(tmp_path: Path) -> Iterator[str]:
    """An index with nothing but torch's CPU wheel for Python 3.11."""
    pins = (CHECKOUT / "requirements" / "worker.txt").read_text().splitlines()
    (torch,) = [line for line in pins if line.startswith("torch==")]
    folder = tmp_path / "torch"
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version=3.11"]
    named = [f"--find-links={os.environ[TORCH_WHEELS]}"] if TORCH_WHEELS in os.environ else []
    done = subprocess.run(
        [*command, *named, f"--dest={folder}", f"{torch}+cpu"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"pip finds no {torch}+cpu for Python 3.11: name a folder with its wheel in {TORCH_WHEELS}")
    with simple_index(tmp_path) as url:
        yield url


def succeeded(done: Done) -> Done:
    assert done.code == 0, done.text[-6000:]
    return done


def test_an_index_that_cannot_be_reached_is_one_line(of_root: Checkout) -> None:
    fresh = Checkout(of_root.root, of_root.cache, "/root/unreachable", "root")
    fresh.fill()
    done = fresh.run("make serve", PIP_INDEX_URL=f"http://127.0.0.1:{closed_port()}/simple")
    assert done.code != 0
    lines = [line for line in done.text.splitlines() if line.startswith("Headstart is not installed")]
    assert len(lines) == 1, done.text
    assert "the package index at 127.0.0.1" in lines[0]
    assert "cannot be reached" in lines[0]
    assert "PIP_INDEX_URL" in lines[0]
    assert "Traceback" not in done.text
    assert not list((fresh.path / ".venv").glob(".installed-*"))


def test_make_serve_answers(checkout: Checkout) -> None:
    done = succeeded(checkout.run("make serving"))
    report(checkout, "make serve installs", done.took_s)
    printed, answer = serve_and_ask(checkout)
    assert "Paris" in answer
    assert GPP not in printed, printed
    version = succeeded(checkout.run(ABOUT_TORCH)).text
    print(f"torch {version}", end="")


def test_torch_comes_with_its_cuda_libraries(of_root: Checkout) -> None:
    """Where there is no CPU build, the plain build is installed."""
    done = succeeded(of_root.run("make serving", TORCH_INDEX=f"http://127.0.0.1:{closed_port()}/"))
    report(of_root, "make serve without an index of CPU builds", done.took_s)
    version, cuda = succeeded(of_root.run(ABOUT_TORCH)).text.split()
    assert "+cpu" not in version
    assert cuda != "None"


def test_make_test_runs(checkout: Checkout) -> None:
    done = succeeded(checkout.run("make dev"))
    report(checkout, "make test installs", done.took_s)
    done = succeeded(checkout.run(f"make test ARGS='{SUBSET}'"))
    report(checkout, f"make test, {done.text.splitlines()[-1].strip('= ')}", done.took_s)


def test_without_gpp_it_is_named_and_its_installation_is_enough(of_root: Checkout) -> None:
    """There is only a C compiler. README names g++, too."""
    assert "g++" in README.partition("make serve")[0]
    succeeded(of_root.run("make serving && apt-get remove --yes g++ 'g++-[0-9]*' && gcc --version"))
    of_root.run("rm -rf ~/.cache/headstart")
    try:
        printed, answer = serve_and_ask(of_root)
        assert "Paris" in answer
        start_screen = printed[printed.index("ready in") :]
        assert [line for line in start_screen.splitlines() if GPP in line and "apt-get install g++" in line], printed
        seen = of_root.run(".venv/bin/headstart doctor --port 0 --ops-port 0")
        assert GPP in seen.text, seen.text
        remedy = "apt-get install g++"
        assert remedy in seen.text
    finally:
        succeeded(of_root.run("apt-get install --yes g++"))
    assert "compiled for this processor" in of_root.run(".venv/bin/headstart doctor --port 0 --ops-port 0").text
    printed, _ = serve_and_ask(of_root)
    assert GPP not in printed


@pytest.mark.parametrize("debian", ["bookworm"], indirect=True)
def test_torch_index_gives_the_cpu_build(of_root: Checkout, cpu_index: str) -> None:
    """TORCH_INDEX names the index of the CPU build."""
    fresh = Checkout(of_root.root, of_root.cache, "/root/cpu", "root")
    fresh.fill()
    done = succeeded(fresh.run("make serving", TORCH_INDEX=cpu_index))
    report(fresh, "make serve with the CPU build of TORCH_INDEX", done.took_s)
    assert succeeded(fresh.run(ABOUT_TORCH)).text.split()[0].endswith("+cpu")
    _, answer = serve_and_ask(fresh, TORCH_INDEX=cpu_index)
    assert "Paris" in answer


def test_a_package_that_doctor_misses_is_there_after_its_remedy(of_root: Checkout) -> None:
    doctor = ".venv/bin/headstart doctor --gateway-only --port 0 --ops-port 0"
    succeeded(of_root.run("make serving && rm -r .venv/lib/python3*/site-packages/h11*"))
    seen = of_root.run(doctor)
    assert (seen.code, "h11 is missing" in seen.text, "make install" in seen.text) == (1, True, True), seen.text
    succeeded(of_root.run("make install"))
    assert of_root.run(doctor).code == 0


def test_the_whole_suite_passes(checkout: Checkout) -> None:
    done = succeeded(checkout.run("make test"))
    report(checkout, f"make test, {done.text.splitlines()[-1].strip('= ')}", done.took_s)
