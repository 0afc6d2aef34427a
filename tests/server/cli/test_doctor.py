"""`headstart doctor`: each check against a real Redis, port or package, good and bad."""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import socket
from pathlib import Path

import pytest
from redis.asyncio import Redis

from server import cli
from server.cli import doctor
from tests.redis_server import RedisServer, newest_redis, redis_binaries
from tests.server.cli.commands import status_of
from worker.common.folders import cache_folder


@pytest.mark.parametrize(
    ("name", "bounds", "problem"),
    [
        ("msgpack", ">=1.1", None),
        ("msgpack", ">=1.1,<2", None),
        ("msgpack", ">=99", "msgpack 1."),
        ("no-such-package-anywhere", "", "no-such-package-anywhere is missing"),
        ("no-such-package-anywhere", "; extra == 'worker'", None),
    ],
)
def test_a_package_that_is_too_old_or_missing_is_named(name: str, bounds: str, problem: str | None) -> None:
    found = doctor.requirement_problem(name + bounds)
    assert found is None if problem is None else found is not None and found.startswith(problem)


@pytest.mark.parametrize("binary", redis_binaries().values())
async def test_a_redis_that_is_started_answers(tmp_path: Path, binary: str) -> None:
    redis = RedisServer(tmp_path, binary)
    seen = await doctor.redis_at(redis.url, None, None)
    assert (seen.status, "start it there" in seen.fix) == ("fail", True)
    with redis:
        check = await doctor.redis_at(redis.url, None, None)
    assert "PING" in check.found
    assert check.status == ("warn" if " 6.2" in check.found else "ok"), check


async def test_a_redis_that_never_evicts(tmp_path: Path) -> None:
    evicting = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with RedisServer(tmp_path, newest_redis(), *evicting) as redis:
        seen = await doctor.redis_at(redis.url, None, None)
        assert seen.status == "warn"
        (option, value) = re.findall(r"set (maxmemory-policy) (\w+)", seen.fix)[0]
        async with Redis(unix_socket_path=str(redis.socket)) as client:
            await client.config_set(option, value)
        after = await doctor.redis_at(redis.url, None, None)
    assert "evicts by" not in after.found


@pytest.mark.parametrize(
    ("info", "fix"), [({"role": "slave"}, "name its primary"), ({"redis_mode": "cluster"}, "give redis+cluster://")]
)
async def test_a_redis_that_takes_no_writes(info: dict[str, str], fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_: object) -> tuple[float, dict[str, str]]:
        return 0.0, {"redis_version": "7.2.4", **info}

    monkeypatch.setattr(doctor, "diagnose", answer)
    check = await doctor.redis_at("redis://here", None, None)
    assert (check.status, fix in check.fix) == ("fail", True)
    assert (await doctor.redis_at("redis+cluster://here", None, None)).status == ("fail" if "role" in info else "ok")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a uid of its own."""
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert cache_folder() is None
    assert [check.name for check in doctor.disks()] == ["tmp", "models"]


def test_a_folder_that_may_not_be_read_ends_no_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of another user, as HF_HOME may name them."""
    real = os.stat

    def stat(path: str, **options: object) -> os.stat_result:
        if str(path) == str(tmp_path / "hub"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(os, "stat", stat)
    assert f"free in {tmp_path}" in list(doctor.disks())[1].found


async def test_a_url_of_no_redis() -> None:
    check = await doctor.redis_at("http://u:secret@here", None, None)
    assert (check.status, "secret" in check.found) == ("fail", False)


async def test_a_port_is_free_or_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TIMEOUT_S", 0.2)  # of the question whether it is ours, to one who never answers
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        seen = await doctor.port("port", "127.0.0.1", number, "--port")
        assert (seen.status, "Choose another --port" in seen.found) == ("fail", True)
    assert (await doctor.port("port", "127.0.0.1", number, "--port")).status == "ok"


def test_a_gateway_only_machine_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["doctor", "--gateway-only", "--json", "--port", port, "--ops-port", "0"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is False
    assert [each["name"] for each in printed["checks"] if each["status"] == "fail"] == ["port"]


@pytest.mark.parametrize("argv", [["--port", "70000"], ["--num-workers", "0"], ["--redis-password-file", "/nowhere"]])
def test_wrong_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("doctor", *argv) == 2
    assert argv[0] in capsys.readouterr().err


async def test_wrong_options_of_an_engine_are_a_failed_check() -> None:
    args = doctor.parser().parse_args(["--engine-url", "ftp://engine"])
    (check,) = await doctor.engine_checks(args, "ftp://engine")
    assert (check.status, "--engine-url must begin with http" in check.found) == ("fail", True), check


@pytest.mark.parametrize(
    ("options", "variables", "status"),
    [
        ((), {}, "ok"),
        (("--host", "0.0.0.0"), {}, "warn"),
        ((), {"HEADSTART_HOST": "0.0.0.0"}, "warn"),
        ((), {"HEADSTART_OPS_HOST": "0.0.0.0"}, "warn"),
        ((), {"HEADSTART_GATEWAY_ARGS": "--ops-host 0.0.0.0"}, "warn"),
        (("--host", "0.0.0.0"), {"HEADSTART_API_KEYS": "keys.toml"}, "ok"),
        (("--host", "0.0.0.0"), {"HEADSTART_GATEWAY_ARGS": "--api-keys keys.toml"}, "ok"),
        (("--host", "0.0.0.0", "--api-keys", "none.toml"), {}, "fail"),
        (("--host", "0.0.0.0", "--api-keys", "empty.toml"), {}, "warn"),
    ],
)
def test_a_gateway_that_others_reach_needs_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], variables: dict[str, str], status: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys.toml").write_text(f'[[keys]]\ndigest = "sha256:{"0" * 64}"\ntenant = "a"\n')
    (tmp_path / "empty.toml").write_text("")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    args = doctor.parser().parse_args(options)
    doctor.what_gateways_read(args, [])
    assert doctor.api_keys(args.hosts, args.api_keys).status == status
