"""API keys: a TOML file of digests, reloaded whenever it changes.

    [[keys]]
    digest = "sha256:..."          # of the key: what is stored cannot be sent
    tenant = "research"            # several keys may share one; each tenant has a cache of its own
    name = "notebook"              # for logs
    models = ["smollm2"]           # those it may use; absent: all
    requests_per_minute = 600      # absent: no limit, as for the next two
    tokens_per_minute = 200000
    max_streams = 32               # requests at a time
    may_prioritise = true          # may set `priority`

TOML, because an entry is appended to the file as it is printed, with comments that say who has the key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from server.auth.identity import DIGEST_PREFIX, Identity
from server.auth.limits import KeyEntry
from worker.common.tls import WatchedFiles

log = logging.getLogger(__name__)

MAX_KEYS: Final = 4096
"""Every presented key is compared with all of them, a tenth of a microsecond each."""
MAX_FILE_BYTES: Final = 4 << 20


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: Annotated[tuple[KeyEntry, ...], Meta(max_length=MAX_KEYS)] = ()


def digest_of(key: bytes) -> bytes:
    """Hash plainly, without a salt or stretching: keys are 256 random bits."""
    return hashlib.sha256(key).digest()


def digest_text(key: bytes) -> str:
    return DIGEST_PREFIX + digest_of(key).hex()


def parse_keys(text: str) -> tuple[KeyEntry, ...]:
    """Parse a key file. Raises ValueError that names the field."""
    try:
        entries = msgspec.convert(tomllib.loads(text), _File).keys
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    if len({entry.digest for entry in entries}) < len(entries):
        raise ValueError("a digest is given twice: which of its entries counts?")
    return entries


def load_keys(path: Path) -> tuple[KeyEntry, ...]:
    """Read a key file. Raises ValueError that names the file and the field."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
        return parse_keys(data.decode())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


class KeyFile(WatchedFiles):
    """The keys in force. One task calls `follow`; the authenticator reads."""

    interval_s = 1.0

    def __init__(
        self, path: Path, cluster_secret: bytes, *, on_reload: Callable[[str], None] = lambda outcome: None
    ) -> None:
        """Raises ValueError. `on_reload` receives "loaded" or "rejected"."""
        super().__init__([path])
        self._cluster_secret = cluster_secret
        self._on_reload = on_reload
        self._identities: list[tuple[bytes, Identity]] = []
        self._load()

    def _load(self) -> None:
        """Raises ValueError."""
        usage = {identity.key.digest: identity.usage for _, identity in self._identities}
        self._identities = [
            (
                bytes.fromhex(entry.digest.removeprefix(DIGEST_PREFIX)),
                Identity(self._cluster_secret, entry, usage.get(entry.digest)),
            )
            for entry in load_keys(self.paths[0])
        ]

    def __len__(self) -> int:
        return len(self._identities)

    def find(self, key: bytes) -> Identity | None:
        """Compare with every digest, whether or not one has matched, in constant time each."""
        presented = digest_of(key)
        found = None
        for digest, identity in self._identities:
            if hmac.compare_digest(digest, presented):
                found = identity
        return found

    def reload(self) -> None:
        """Read the file. One that cannot be used changes nothing: the keys in force stay, and the log says why."""
        try:
            self._load()
        except ValueError as error:
            log.error("the API keys were NOT reloaded, the %d old ones still count: %s", len(self), error)
            self._on_reload("rejected")
        else:
            log.info("%d API keys reloaded from %s", len(self), self.paths[0])
            self._on_reload("loaded")
