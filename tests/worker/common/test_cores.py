"""The processors of a process: affinity and quotas, how threads wait, and other programs next to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import HANG_S
from worker.common import cores
from worker.common.cores import SPINS, bound_spinning, busy_advice, num_cores

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
ALL = len(os.sched_getaffinity(0))
NO_TORCH = [sys.executable, "-m", "worker", "--model", "/no/such/model", "--port", "0"]
COMPETE = """
import hashlib, os, threading
from worker.common.cores import busy_advice, thread_times
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
def work():
    while True:
        hashlib.sha256(bytes(1 << 20))
begun = thread_times()
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
while not busy_advice(begun):
    hashlib.sha256(bytes(1 << 20))
print("competes", flush=True)
os._exit(0)
"""


def test_the_time_to_spin_is_bounded() -> None:
    environment: dict[str, str] = {}
    bound_spinning(environment)
    assert environment == {"GOMP_SPINCOUNT": str(SPINS), "KMP_BLOCKTIME": "1"}


@pytest.mark.parametrize("name", WAITING)
def test_a_setting_of_the_user_stays(name: str) -> None:
    """Also where another variable would go before it: GOMP_SPINCOUNT goes before OMP_WAIT_POLICY."""
    environment = {name: "7"}
    bound_spinning(environment)
    assert environment == {name: "7"}


def test_the_library_of_a_worker_reads_it() -> None:
    """libgomp prints what it has read when it is loaded, so the variable was set before torch was imported."""
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    environment |= {"OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run(NO_TORCH, env=environment, capture_output=True, text=True, timeout=HANG_S)
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this torch has another OpenMP than libgomp")
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in done.stderr


def own(folder: Path, text: str) -> Path:
    (folder / "self").write_text(text)
    return folder / "self"


def set_v2(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(text)


def set_v1(folder: Path, quota: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")


def test_a_quota_of_the_own_cgroup(tmp_path: Path) -> None:
    set_v2(tmp_path, "100000 100000\n")
    assert num_cores(cgroups=tmp_path, own=own(tmp_path, "0::/\n")) == 1


def test_a_quota_of_a_cgroup_around_it(tmp_path: Path) -> None:
    set_v2(tmp_path / "user.slice", "50000 100000\n")
    set_v2(tmp_path / "user.slice/one.scope", "max 100000\n")
    assert num_cores(cgroups=tmp_path, own=own(tmp_path, "0::/user.slice/one.scope\n")) == 1


def test_a_quota_of_version_1(tmp_path: Path) -> None:
    """A container may see the path that its cgroup has on the host, and only the root is there."""
    set_v1(tmp_path / "cpu,cpuacct", 100_000)
    lines = "5:memory:/pod/7\n3:cpu,cpuacct:/pod/7\n0::/\n"
    assert num_cores(cgroups=tmp_path, own=own(tmp_path, lines)) == 1


@pytest.mark.parametrize("text", ["max 100000\n", "", "what 100000\n", "100000\n", "100000 0\n", "-1 100000\n"])
def test_without_a_quota_affinity_decides(text: str, tmp_path: Path) -> None:
    set_v2(tmp_path, text)
    assert num_cores(cgroups=tmp_path, own=own(tmp_path, "0::/\n")) == ALL
    assert num_cores(cgroups=tmp_path, own=tmp_path / "none") == ALL


@given(st.integers(1, 64))
def test_processes_that_share_never_take_more_than_there_is(num_sharing: int) -> None:
    cores = num_cores(num_sharing)
    assert cores >= 1
    assert cores == 1 or cores * num_sharing <= ALL


def test_threads_that_compete_count_their_waits() -> None:
    done = subprocess.run([sys.executable, "-c", COMPETE], capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == "competes\n", done.stderr


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_the_advice_comes_with_long_waits(ran: int, waited: int) -> None:
    with patch.object(cores, "thread_times", lambda: (ran, waited)):
        assert bool(busy_advice((0, 0))) == (waited > cores.MAX_WAIT_SHARE * (ran + waited))
        assert busy_advice((ran, waited)) == ""
