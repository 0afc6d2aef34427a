"""Other people's routers in front of the same stub: started from a virtual environment that holds them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    """As figures begin with it."""
    program: str
    options: tuple[str, ...]

    def command(self, folder: Path, stub: str, port: int, metrics_port: int) -> list[str]:
        addresses = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", stub]
        return [
            str(folder / self.program),
            *self.options,
            *addresses,
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        ]


PEERS: Final = (
    Peer("sglang_router", "sglang-router", ("launch", "--log-level", "error")),
    Peer("vllm_router", "vllm-router", ("--log-level", "error")),
)


def installed(folder: Path) -> tuple[list[Peer], list[str]]:
    """The peers whose programs are there, and what to do about those that are not."""
    found = [peer for peer in PEERS if (folder / peer.program).exists()]
    missing = [
        f"{peer.program} is not in {folder}: not measured (python -m venv DIR; DIR/bin/pip install {peer.program}; "
        "--peers DIR/bin)"
        for peer in PEERS
        if peer not in found
    ]
    return found, missing
