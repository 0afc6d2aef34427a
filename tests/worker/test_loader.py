from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.config import parse
from worker.loader import can_exchange_blocks

PROGRAM = """
import sys
from pathlib import Path

import pytest

from worker.config import parse
from worker.loader import can_exchange_blocks
import psutil
import torch
from worker.loader import limit_onednn_cache
from worker.model.linear import OneDnnLinear

if sys.argv[1] == "bound":
    limit_onednn_cache()
torch.set_num_threads(1)
linear = OneDnnLinear(torch.zeros(64, 64))
linear(torch.zeros(1, 64))
before = psutil.Process().memory_info().rss
for num_rows in range(2, 500):
    linear(torch.zeros(num_rows, 64))
print(psutil.Process().memory_info().rss - before)
"""


def growth(how: str) -> int:
    environment = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    command = [sys.executable, "-c", PROGRAM, how]
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def test_products_of_many_lengths_are_not_kept() -> None:
    assert growth("bound") < 0.5 * growth("free")


@pytest.mark.parametrize(
    ("options", "may"),
    [
        ([], True),
        (["--host", "0.0.0.0"], False),
        (["--host", "0.0.0.0", "--cluster-secret-file", "secret"], True),
    ],
)
def test_block_exchange_needs_a_secret_or_loopback(
    options: list[str], may: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADSTART_CLUSTER_SECRET", raising=False)
    (tmp_path / "secret").write_text("of the fleet")
    assert can_exchange_blocks(parse(options)) == may
