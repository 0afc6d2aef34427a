"""The identity of a request, and the salt that separates the caches of tenants.

tenant salt  = HMAC(cluster secret, "tenant" || tenant)       made here, never taken from a request
request salt = HMAC(tenant salt, "cache_salt" || cache_salt)  a request can narrow, never widen

API keys are in a TOML file of digests, reloaded whenever it changes:

    [[keys]]
    digest = "sha256:..."          # of the key: what is stored cannot be sent
    tenant = "research"            # several keys may share one; each tenant has a cache of its own
    name = "notebook"              # for logs
    models = ["smollm2"]           # those it may use; absent: all
    requests_per_minute = 600      # absent: no limit, as for the next three
    tokens_per_minute = 200000
    max_streams = 32               # requests at a time
    tokens_per_day = 5000000       # prompt and answer, by UTC
    weight = 4                     # share of a busy fleet, next to other tenants; absent: 1
    may_prioritise = true          # may set `priority`
    trusted_front = true           # names the tenant of each request in a header

    [[tenants]]                    # a tenant that trusted fronts name: its rights and limits replace the front's
    tenant = "acme"

The format is TOML: `headstart keys` prints an entry to append, and comments can name the owner of a key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.types import Scope

from cache.redis_index import LEASE_S, KeyUse
from server.auth.limits import LABEL, KeyEntry, KeyUsage, TenantEntry
from server.errors import ForbiddenError, InvalidRequestError
from worker.common.command_line import reason
from worker.common.tls import WatchedFiles

log = logging.getLogger(__name__)

MAX_KEYS: Final = 4096  # bounds a reload, which holds the event loop
MAX_FILE_BYTES: Final = 4 << 20  # `MAX_KEYS` entries of 1 KiB each
DEFAULT_TENANT: Final = "default"
IDENTITY: Final = "headstart.identity"
DIGEST_PREFIX: Final = "sha256:"


class Identity:
    """A tenant, and the permissions of the presented key."""

    __slots__ = ("key", "salt", "tag", "tenant", "usage")

    def __init__(self, cluster_secret: bytes, key: KeyEntry, usage: KeyUsage | None = None) -> None:
        """`usage`: None if the key has no limits."""
        self.key = key
        self.usage = usage
        self.tenant = key.tenant
        self.salt = tenant_salt(cluster_secret, key.tenant)
        self.tag = blake2b(self.salt, digest_size=8, person=b"tenant tag").hexdigest()
        """The name by which workers separate tenants; it reveals nothing else about them."""

    @property
    def key_name(self) -> str:
        """The key's name, or the first 12 digits of its digest, which do not reveal the key; empty without a key."""
        return self.key.name or self.key.digest.removeprefix(DIGEST_PREFIX)[:12]

    def may_use(self, *names: str) -> bool:
        """Return whether the key may use a model with any of these names."""
        return self.key.models is None or not self.key.models.isdisjoint(names)


def identity_of(scope: Scope) -> Identity:
    """Return the identity that `authenticated` has put into the scope."""
    identity: Identity = scope[IDENTITY]
    return identity


def tenant_identity(cluster_secret: bytes, tenant: str) -> Identity:
    """Return a tenant's identity without the limits of a key."""
    return Identity(cluster_secret, KeyEntry(digest="", tenant=tenant, may_prioritise=True))


def tenant_salt(cluster_secret: bytes, tenant: str) -> bytes:
    return hmac.digest(cluster_secret, b"tenant\0" + tenant.encode(), "sha256")


def request_salt(identity: Identity, cache_salt: str | None) -> bytes:
    if cache_salt is None:
        return identity.salt
    return hmac.digest(identity.salt, b"cache_salt\0" + cache_salt.encode(), "sha256")


def allowed_priority(identity: Identity, priority: int | None) -> int:
    """Return the priority of a request, 0 by default. Raises ForbiddenError where the key may not set one."""
    if priority and not identity.key.may_prioritise:
        raise ForbiddenError("This key may not set a priority.", param="priority")
    return priority or 0


class KeyEntries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key file."""

    keys: Annotated[tuple[KeyEntry, ...], Meta(max_length=MAX_KEYS)] = ()
    tenants: Annotated[tuple[TenantEntry, ...], Meta(max_length=MAX_KEYS)] = ()


def digest_of(key: bytes) -> bytes:
    """Hash plainly, without a salt or stretching: keys are 256 random bits."""
    return hashlib.sha256(key).digest()


def digest_text(key: bytes) -> str:
    return DIGEST_PREFIX + digest_of(key).hex()


def parse_keys(text: str) -> KeyEntries:
    """Parse a key file. Raises ValueError that names the field."""
    try:
        entries = msgspec.convert(tomllib.loads(text.removeprefix("\ufeff")), KeyEntries)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    names = [entry.digest for entry in entries.keys] + [entry.tenant for entry in entries.tenants]
    if len(set(names)) < len(names):
        raise ValueError("duplicate digest, or tenant in [[tenants]]")
    return entries


def load_keys(path: Path) -> KeyEntries:
    """Read a key file. Raises ValueError that names the file and the field."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
        return parse_keys(data.decode())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {reason(error)}") from None


class KeyFile(WatchedFiles):
    """The keys in force. One task calls `follow`; the authenticator reads."""

    interval_s = 1.0

    def __init__(
        self,
        path: Path,
        cluster_secret: bytes,
        counter: KeyUse | None = None,
        num_gateways: int = 1,
        *,
        on_reload: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        """Raises ValueError. `counter`: None without a Redis. `on_reload`: "loaded" or "rejected"."""
        super().__init__([path])
        self._cluster_secret = cluster_secret
        self._on_reload = on_reload
        self._blinding = secrets.token_bytes()
        self._identities: dict[bytes, Identity] = {}
        """By the blinded digest of the key."""
        self._new_usage = partial(KeyUsage, counter, num_gateways=num_gateways)
        self._usages: dict[str, KeyUsage] = {}
        self._tenants: dict[str, tuple[TenantEntry, KeyUsage | None]] = {}
        self._load()

    def _load(self) -> None:
        """Apply the file. An entry whose digest was there before keeps its usage. Raises ValueError."""
        entries, loaded, tenants = load_keys(self.paths[0]), {}, {}
        old_usages, self._usages = self._usages, {}
        for entry in (*entries.keys, *entries.tenants):
            digest = (
                entry.digest.removeprefix(DIGEST_PREFIX)
                if isinstance(entry, KeyEntry)
                else digest_of(b"tenant\0" + entry.tenant.encode()).hex()
            )
            usage = old_usages.pop(digest, None) or self._new_usage(digest[:16])
            usage.apply(entry)
            self._usages[digest] = usage
            limited = usage if usage.has_limits else None
            if isinstance(entry, KeyEntry):
                loaded[self._blinded(bytes.fromhex(digest))] = Identity(self._cluster_secret, entry, limited)
            else:
                tenants[entry.tenant] = entry, limited
        self._identities, self._tenants = loaded, tenants

    async def renew_leases(self) -> None:
        """Report to Redis how many requests are open, until cancelled."""
        while True:
            await asyncio.sleep(LEASE_S / 4)
            for usage in self._usages.values():
                usage.renew_lease()

    def __len__(self) -> int:
        return len(self._identities)

    def find(self, key: bytes) -> Identity | None:
        """Look a key up, in the same time for every key of its length.

        The time depends only on the blinded digest. A client without this process's random value can neither choose
        nor predict a bit of that. So the time does not show how much of a key, or of a digest, was right.
        """
        return self._identities.get(self._blinded(digest_of(key)))

    def tenant_of(self, front: Identity, values: Sequence[bytes]) -> Identity:
        """Return the tenant that a trusted front names, with its own rights and limits, or those of the front's key.

        Raises InvalidRequestError unless the values of the header are one name.
        """
        name = values[0].decode("latin-1") if len(values) == 1 else ""
        if LABEL.fullmatch(name) is None:
            raise InvalidRequestError(
                "The header of the tenant must come once, with one name: letters, digits, spaces and ._@-, at most 64."
            )
        rights, usage = self._tenants.get(name) or (front.key, front.usage)
        models, front_models = rights.models, front.key.models
        key = msgspec.structs.replace(
            front.key,
            tenant=name,
            models=models if front_models is None else front_models if models is None else front_models & models,
            weight=rights.weight,
            may_prioritise=rights.may_prioritise,
        )
        return Identity(self._cluster_secret, key, usage)

    def _blinded(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._blinding, digest_size=16).digest()

    def reload(self) -> None:
        """Read the file. An invalid file changes nothing: the current keys stay, and the log has the reason."""
        try:
            self._load()
        except ValueError as error:
            log.error("the API keys were NOT reloaded, the %d old ones stay valid: %s", len(self), error)
            self._on_reload("rejected")
        else:
            log.info("%d API keys reloaded from %s", len(self), self.paths[0])
            self._on_reload("loaded")
