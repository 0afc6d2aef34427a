"""Run tests while their processes stand still at random: `python -m tools.pauses [PYTEST OPTIONS]`.

Every few seconds one process of the run stops for `STILL_S`, with its children, as on a busy machine. That is longer
than the leases and deadlines of the product: a test that fails here has one of them as a hidden time limit.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import psutil

STILL_S: Final = 7.0
BETWEEN_S: Final = (3.0, 9.0)


def pause(process: psutil.Process) -> None:
    """Stop a process and its children for a while."""
    family = [process, *process.children(recursive=True)]
    try:
        for each in family:
            each.suspend()
        time.sleep(STILL_S)
    finally:
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.resume()


def main(argv: Sequence[str]) -> int:
    seed = random.SystemRandom().randrange(1 << 32)
    chance, num_pauses = random.Random(seed), 0
    tests = subprocess.Popen([sys.executable, "-m", "pytest", *argv])
    while tests.poll() is None:
        time.sleep(chance.uniform(*BETWEEN_S))
        with suppress(psutil.NoSuchProcess):
            if family := psutil.Process(tests.pid).children(recursive=True):
                pause(chance.choice(family))
                num_pauses += 1
    print(f"{num_pauses} pauses of {STILL_S:g} s, seed {seed}")
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
