from __future__ import annotations

from pathlib import Path

import pytest

from cache.redis_index import WriterSettings
from worker.common.options import num_bytes
from worker.config import WorkerConfig, parse


def test_limits_are_those_of_the_options() -> None:
    own = ["--waiting-served-ratio=1.2", "--max-waiting-tokens=9", "--max-num-seqs=3"]
    config = parse([*own, "--max-batch-prefill-tokens=11", "--max-batch-total-tokens=12"])
    limits = config.limits((2, None))
    assert (limits.waiting_served_ratio, limits.max_waiting_tokens) == (1.2, 9)
    assert (limits.max_batch_prefill_tokens, limits.max_batch_total_tokens) == (11, 12)
    assert limits.max_num_batched_tokens == 3  # a token for every running choice


def test_defaults_are_those_of_the_dataclass() -> None:
    assert parse([]) == WorkerConfig()


def test_solo_prefill_tokens_default_to_the_device() -> None:
    defaults = (128, 2048)
    assert WorkerConfig().limits(defaults).max_solo_prefill_tokens == 2048
    assert WorkerConfig(max_num_batched_tokens=64).limits(defaults).max_solo_prefill_tokens is None
    assert WorkerConfig().limits((128, None)).max_solo_prefill_tokens is None


def test_waiting_for_a_prefix_needs_a_prefix_cache() -> None:
    assert WorkerConfig().limits((64, None)).await_prefixes
    off = WorkerConfig(prefix_cache="off")
    assert not off.limits((64, None)).await_prefixes


@pytest.mark.parametrize(("text", "expected"), [("512", 512), ("2K", 2048), ("1.5G", 3 << 29), ("4GiB", 4 << 30)])
def test_sizes(text: str, expected: int) -> None:
    assert num_bytes(text) == expected


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        ("--port 70000", "--port"),
        ("--num-blocks 0", "--num-blocks"),
        ("--threads 0", "--threads"),
        ("--max-num-seqs 0", "--max-num-seqs"),
        ("--max-batch-prefill-tokens 0", "--max-batch-prefill-tokens"),
        ("--waiting-served-ratio -0.1", "--waiting-served-ratio"),
        ("--max-queue-s nan", "--max-queue-s"),
        ("--local-rank 2 --local-world-size 2", "--local-rank"),
        ("--drain-grace-s -1", "--drain-grace-s"),
        ("--redis nowhere", "--redis: .* use redis://"),
        ("--redis redis://h:99999", "--redis: Port"),
        ("--redis redis://h?foo=1", "--redis: .*argument 'foo'"),
        ("--redis redis://h?retry=3", "--redis: Redis URL"),
        ("--redis rediss://h?ssl_cert_reqs=some", "--redis: .*Flag: some"),
        (f"--redis rediss://h?ssl_ca_certs=/{'n' * 256}", "--redis: .* there is no file /n"),
        ("--redis redis://h --redis-prefix {x}", "--redis-prefix"),
        ("--num-blocks 9 --kv-cache-memory 1G", "--kv-cache-memory"),
        ("--task embed --engine vllm --engine-url http://h", "--task"),
        ("--model x --engine vllm --engine-url http://h", "--model"),
        ("--advertise-url h:8100", "--advertise-url must begin with http:// or https://"),
        ("--engine vllm --engine-url http://", "--engine-url must begin"),
        ("--engine vllm --engine-url http://h:99999", "--engine-url must begin"),
        ("--engine vllm --engine-url http://[::1", "--engine-url must begin"),
        ("--model a/b --revision 1", "--revision are for other engines: give --model FOLDER, or ID@REVISION"),
        ("--model a/b --tokenizer c/d", "--tokenizer and"),
        ("--drain-grace-s inf", "--drain-grace-s must be finite"),
    ],
)
def test_invalid_options_are_named(argv: str, option: str) -> None:
    with pytest.raises(ValueError, match=option):
        parse(argv.split())


@pytest.mark.parametrize("argv", ["--kv-cache-memory lots", "--prefix-cache magic", "--bogus", "--num-block 3"])
def test_argparse_errors_exit_with_status_two(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv.split())
    assert caught.value.code == 2
    assert "headstart worker: error: " in capsys.readouterr().err


def test_a_missing_password_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--redis-password-file {tmp_path}.*: No such file"):
        WorkerConfig(redis_password_file=str(tmp_path / "none")).index_settings(WriterSettings)


def test_the_secret_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADSTART_CLUSTER_SECRET", raising=False)
    assert WorkerConfig().cluster_secret() == b""
    monkeypatch.setenv("HEADSTART_CLUSTER_SECRET", "from-env")
    assert WorkerConfig().cluster_secret() == b"from-env"
    (tmp_path / "secret").write_text("from-file\n")
    config = WorkerConfig(cluster_secret_file=str(tmp_path / "secret"))
    assert config.cluster_secret() == b"from-file"
    (tmp_path / "secret").write_text("\n")
    with pytest.raises(ValueError, match=r"--cluster-secret-file .* is empty"):
        config.cluster_secret()


@pytest.mark.parametrize(
    ("options", "may"),
    [
        ([], True),
        (["--host", "0.0.0.0"], False),
        (["--host", "0.0.0.0", "--cluster-secret-file", "secret"], True),
    ],
)
def test_an_exchange_needs_a_secret_or_loopback(
    options: list[str], may: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADSTART_CLUSTER_SECRET", raising=False)
    (tmp_path / "secret").write_text("of the fleet")
    assert parse(options).may_exchange() == may
