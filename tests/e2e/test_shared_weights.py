"""The workers of a machine map one file of prepared weights: in memory once."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.serving import Serve

pytestmark = pytest.mark.e2e
FIELD = re.compile(r"^(Rss|Pss|Private_Dirty): +(\d+) kB$", re.MULTILINE)


def mapped_kb(pid: int) -> Counter[str]:
    """Sum the sizes of a process's mappings of prepared weights."""
    total = Counter[str]()
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.MULTILINE):
        if "/weights-" in mapping.partition("\n")[0]:
            total.update({name: int(size) for name, size in FIELD.findall(mapping)})
    return total


def test_two_workers_have_one_copy(smollm2: Serve) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++: without its kernels weights are not in a file")
    workers = [process.pid for process in smollm2.family() if "worker" in process.cmdline()]
    one, other = (mapped_kb(pid) for pid in workers)
    size_kb = one["Rss"]
    assert size_kb > 200_000, "the packed weights of SmolLM2, and its embeddings"
    assert abs(size_kb - other["Rss"]) < 0.05 * size_kb
    assert one["Pss"] + other["Pss"] < 1.05 * size_kb
    assert one["Private_Dirty"] + other["Private_Dirty"] < 1000
