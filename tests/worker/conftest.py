from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and threads that wait for each other on busy cores are very slow."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small_heap() -> Iterator[None]:
    """For tests that collect garbage often: a pass sees only their objects, not those of torch, which take 0.3 s."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
