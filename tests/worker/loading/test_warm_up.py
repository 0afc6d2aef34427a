from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path

import psutil
import torch
from worker.loading.warm_up import limit_onednn_cache
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


@pytest.mark.e2e
def test_products_of_many_lengths_are_not_kept() -> None:
    assert growth("bound") < 0.5 * growth("free")
