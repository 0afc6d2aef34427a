from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.serving import Serve


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Serve]:
    """One worker of SmolLM2, for every client."""
    with Serve("--num-workers", "1") as serve:
        yield serve
