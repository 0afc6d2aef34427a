"""Our top-level packages have common names: find a package of others that shares one, or has overwritten it."""

from __future__ import annotations

import hashlib
import importlib.metadata
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Final

NAMES: Final = ("benchmarks", "cache", "server", "worker")
_INITS: Final = {f"{name}/__init__.py" for name in NAMES}
OWN_ENVIRONMENT: Final = "install Headstart into an environment of its own: python3 -m venv headstart-venv"


def shared() -> dict[str, list[str]]:
    """Return the other distributions that have a package of one of our names."""
    providers = importlib.metadata.packages_distributions()
    others = {name: sorted({each for each in providers.get(name, ()) if each != "headstart"}) for name in NAMES}
    return {name: found for name, found in others.items() if found}


def problem() -> str | None:
    """Return in a line which of our `__init__.py` a package of others has overwritten, or None, as in a checkout."""
    try:
        files = importlib.metadata.files("headstart") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    wrong = [str(file) for file in files if str(file) in _INITS and file.hash is not None and _differs(file)]
    return f"another package has overwritten {', '.join(wrong)}: {OWN_ENVIRONMENT}" if wrong else None


def _differs(file: importlib.metadata.PackagePath) -> bool:
    assert file.hash is not None
    try:
        digest = hashlib.new(file.hash.mode, Path(file.locate()).read_bytes()).digest()
    except FileNotFoundError:
        return True
    return urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value
