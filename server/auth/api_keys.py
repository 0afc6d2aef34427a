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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from worker.common.tls import WatchedFiles

log = logging.getLogger(__name__)

MAX_KEYS: Final = 4096
"""Every presented key is compared with all of them, a tenth of a microsecond each."""
MAX_FILE_BYTES: Final = 4 << 20
_DIGEST_PREFIX: Final = "sha256:"

_Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@ -]{0,63}$")]
_Limit = Annotated[int, Meta(ge=1, le=10**12)]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[keys]]` table of the file."""

    digest: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
    tenant: _Label
    name: _Label | None = None
    models: frozenset[str] | None = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    max_streams: _Limit | None = None
    may_prioritise: bool = False

    @property
    def raw_digest(self) -> bytes:
        return bytes.fromhex(self.digest.removeprefix(_DIGEST_PREFIX))


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: Annotated[tuple[KeyEntry, ...], Meta(max_length=MAX_KEYS)] = ()


class KeyFileError(ValueError):
    """The file cannot be read, or is not a key file. The message names the file and the field."""


def digest_of(key: bytes) -> bytes:
    """Hash plainly, without a salt or stretching: keys are 256 random bits."""
    return hashlib.sha256(key).digest()


def digest_text(key: bytes) -> str:
    return _DIGEST_PREFIX + digest_of(key).hex()


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
    """Read a key file. Raises KeyFileError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise KeyFileError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        return parse_keys(data.decode())
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise KeyFileError(f"{path}: {error}") from None


class KeyFile(WatchedFiles):
    """The keys in force. One task calls `follow`; the authenticator reads."""

    interval_s = 1.0

    def __init__(self, path: Path, *, on_reload: Callable[[str], None] = lambda outcome: None) -> None:
        """Raises KeyFileError."""
        super().__init__([path])
        self._on_reload = on_reload
        self._entries = _by_digest(load_keys(path))

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes) -> KeyEntry | None:
        """Compare with every digest, whether or not one has matched, in constant time each."""
        presented = digest_of(key)
        found = None
        for digest, entry in self._entries:
            if hmac.compare_digest(digest, presented):
                found = entry
        return found

    def reload(self) -> None:
        """Read the file. One that cannot be used changes nothing: the keys in force stay, and the log says why."""
        path = self.paths[0]
        try:
            entries = load_keys(path)
        except KeyFileError as error:
            log.error("the API keys were NOT reloaded, the %d old ones still count: %s", len(self), error)
            self._on_reload("rejected")
            return
        self._entries = _by_digest(entries)
        log.info("%d API keys reloaded from %s", len(self), path)
        self._on_reload("loaded")


def _by_digest(entries: Iterable[KeyEntry]) -> list[tuple[bytes, KeyEntry]]:
    return [(entry.raw_digest, entry) for entry in entries]
