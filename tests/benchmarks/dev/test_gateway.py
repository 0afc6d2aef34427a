"""The gateway's bench measures peers next to the gateway."""

from __future__ import annotations

from pathlib import Path

from benchmarks.dev.gateway_load.peers import PEERS, installed


def test_peers_that_are_not_installed_are_named(tmp_path: Path) -> None:
    assert installed(tmp_path)[0] == []
    (tmp_path / "vllm-router").touch()
    found, missing = installed(tmp_path)
    assert [peer.name for peer in found] == ["vllm_router"]
    assert [line.split(" ")[0] for line in missing] == ["sglang-router"]


def test_a_peer_is_started_in_front_of_the_stub(tmp_path: Path) -> None:
    for peer in PEERS:
        command = peer.command(tmp_path, "http://127.0.0.1:1", 2, 3)
        assert command[0] == str(tmp_path / peer.program)
        assert command[command.index("--worker-urls") + 1] == "http://127.0.0.1:1"
        assert command[command.index("--port") + 1] == "2"
