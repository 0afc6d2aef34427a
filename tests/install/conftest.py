"""One root for each Debian release, for the length of its tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.install.roots import Checkout, make_root, need_root_and_debootstrap

FOLDERS = {"root": "/root/headstart", "alice": "/home/alice/my models/headstart"}


@pytest.fixture(scope="session")
def pip_cache() -> Iterator[Path]:
    """pip's cache of all roots, in the folder of the roots."""
    need_root_and_debootstrap()
    folder = Path(tempfile.mkdtemp(prefix="headstart-roots-"))
    folder.chmod(0o755)  # another user goes through it
    try:
        (folder / "pip").mkdir()
        yield folder / "pip"
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session", params=["bookworm", "trixie"])
def debian(request: pytest.FixtureRequest, pip_cache: Path) -> Iterator[Path]:
    """The root of a release: Python 3.11 in bookworm, 3.13 in trixie."""
    root = pip_cache.parent / str(request.param)
    try:
        make_root(str(request.param), root)
        yield root
    finally:
        shutil.rmtree(root)


@pytest.fixture(params=["root", "alice"])
def checkout(request: pytest.FixtureRequest, debian: Path, pip_cache: Path) -> Checkout:
    """The sources as root has them, and as another user has them in a folder with a space."""
    return checkout_of(debian, pip_cache, str(request.param))


@pytest.fixture
def of_root(debian: Path, pip_cache: Path) -> Checkout:
    return checkout_of(debian, pip_cache, "root")


def checkout_of(debian: Path, pip_cache: Path, user: str) -> Checkout:
    made = Checkout(debian, pip_cache, FOLDERS[user], user)
    made.fill()
    return made
