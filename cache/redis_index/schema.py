"""The keys and signed records in Redis, and their decoders: everything read from there is untrusted input.

`Keys` has the layout. Members are JSON and constant during an epoch; states are msgpack arrays, rewritten at every
publish.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import replace
from hashlib import blake2s
from hmac import compare_digest
from typing import Annotated, Any, Final

import msgspec

from cache.records import Count, WorkerLoad, WorkerMember
from cache.types import TIERS, TierName, WorkerId

MAX_STATE_BYTES: Final = 16 * 1024  # bounds what a forged state costs its readers
MAX_MEMBER_BYTES: Final = 8 * 1024  # and a forged member
MAX_MEMBERS: Final = 20_000  # bounds what forged entries cost
MAX_NAME_BYTES: Final = 128
"""The length of a worker's id."""
MAX_TIERS: Final = 8
"""Further tiers are ignored."""
KNOWN_ENDS: Final = ("exact", "inexact")
"""Values of `WorkerMember.ends` of pools with ends."""
_STATE_FORMAT: Final = 1  # in each state: readers ignore another form
_KEY_PART: Final = re.compile(r"[A-Za-z0-9._\-]{1,128}")
_MAC_BYTES: Final = 16  # no forger guesses 128 bits
_MEMBER_MARK: Final = b',"signature":"'
_MEMBER_TAIL: Final = len(_MEMBER_MARK) + 2 * _MAC_BYTES + len(b'"}')
_STATE_MARK: Final = b"\xc4\x10"
"""msgpack: 16 bytes of binary."""

_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)]


class RegistryError(ValueError):
    """A value of the registry that no worker has written."""


class ReplyError(ValueError):
    """A reply that does not match its command: the connection may be out of step."""


class StateRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A worker's state in its registry entry. Times are those of Redis, in milliseconds."""

    format: int
    epoch: _Name
    set_version: Count
    batch: Count
    deadline_ms: Count
    written_ms: Count
    num_entries: Count
    load: WorkerLoad
    num_tier_entries: tuple[Count, ...] = ()
    """For each of the member's tiers."""


_decode_state: Final = msgspec.msgpack.Decoder(StateRecord).decode
_decode_member: Final = msgspec.json.Decoder(WorkerMember).decode
encode_member: Final = msgspec.json.Encoder().encode


class Keys:
    """The names of one shard's keys. The braces are a hash tag: one shard is one slot of a Redis Cluster.

    {prefix:shard}:members    HASH, worker id -> member
    {prefix:shard}:states     HASH, worker id -> state
    {prefix:shard}:version    STRING, random, changes with `members`
    {prefix:shard}:b:<worker id>:<epoch>:<version>           SET of 8-byte entries of the pool, with a TTL
    {prefix:shard}:b:<worker id>:<epoch>:<version>:<tier>    the same of a store below it
    {prefix:shard}:e:<worker id>:<epoch>:<version>           HASH of a pool with ends, with a TTL: an entry -> where a
                                                             hit stops that matches up to it, in blocks
    {prefix:shard}:limits:<key>                              HASH: what is used of an API key's limits
    """

    __slots__ = ("_tag", "members", "states", "version")

    def __init__(self, prefix: str, shard: int) -> None:
        self._tag = f"{{{prefix}:{shard}}}"
        self.members = f"{self._tag}:members".encode()
        self.states = f"{self._tag}:states".encode()
        self.version = f"{self._tag}:version".encode()

    def blocks(self, worker_id: str, epoch: str, version: int, tier: TierName | None = None) -> bytes:
        """Return the key of the pool's set, or of a tier's."""
        end = "" if tier is None else f":{tier}"
        return f"{self._tag}:b:{worker_id}:{epoch}:{version}{end}".encode()

    def limits(self, key: str) -> bytes:
        return f"{self._tag}:limits:{key}".encode()

    def pool(self, member: WorkerMember, version: int) -> bytes:
        """Return the key of the pool's set, or of its hash if it has ends."""
        if member.ends not in KNOWN_ENDS:
            return self.blocks(member.worker_id, member.epoch, version)
        return f"{self._tag}:e:{member.worker_id}:{member.epoch}:{version}".encode()

    def sets(self, member: WorkerMember, version: int) -> list[bytes]:
        """Return the keys of the pool, then of each tier."""
        tiers = [self.blocks(member.worker_id, member.epoch, version, tier) for tier in member.tiers]
        return [self.pool(member, version), *tiers]


class Signer:
    """Signs and verifies the entries of one shard: Redis can lose or garble an entry, but never make one.

    A signature covers the key prefix, the shard, the worker id and every byte of the entry before it. These contain the
    epoch and, in a state, the batch number. So a reader refuses a value copied to another worker, shard or fleet.
    Both records end with their signature. Readers without a secret ignore it; records may gain fields before it.

    Without a secret, nothing is signed. The MAC is keyed BLAKE2s, the fastest for the hundred bytes of a state.
    """

    __slots__ = ("_bases", "enabled")

    def __init__(self, secret: bytes, prefix: str, shard: int) -> None:
        self.enabled = bool(secret)
        key = blake2s(secret, digest_size=32, person=b"registry").digest()
        scope = b"%d\0%d\0%b" % (shard, len(prefix), prefix.encode())
        self._bases = {
            kind: blake2s(scope, key=key, digest_size=_MAC_BYTES, person=kind) for kind in (b"member", b"state")
        }

    def state_mac(self, worker_id: str) -> blake2s:
        """Return the initial MAC of `worker_id`'s states. Readers keep it, as they verify one state per publish."""
        return self._begin(b"state", worker_id.encode())

    def sign_member(self, worker_id: str, record: bytes) -> bytes:
        """Append the signature to a JSON object."""
        if not self.enabled:
            return record
        body = record[:-1]
        return body + self._member_tail(worker_id.encode(), body)

    def verifies_member(self, worker_id: bytes, signed: bytes) -> bool:
        body, tail = signed[:-_MEMBER_TAIL], signed[-_MEMBER_TAIL:]
        return compare_digest(tail, self._member_tail(worker_id, body))

    def sign_state(self, worker_id: str, record: bytes) -> bytes:
        """Append the signature to a msgpack array of fewer than 15 elements, as another element."""
        if not self.enabled:
            return record
        body = b"%c%b%b" % (record[0] + 1, record[1:], _STATE_MARK)
        return body + _digest(self.state_mac(worker_id), body)

    def _member_tail(self, worker_id: bytes, body: bytes) -> bytes:
        return b'%b%b"}' % (_MEMBER_MARK, _digest(self._begin(b"member", worker_id), body).hex().encode())

    def _begin(self, kind: bytes, worker_id: bytes) -> blake2s:
        mac = self._bases[kind].copy()
        mac.update(b"%d\0%b" % (len(worker_id), worker_id))
        return mac


def verifies_state(mac: blake2s, signed: bytes) -> bool:
    """Return whether a state ends with its signature; `mac` is from `Signer.state_mac`."""
    return compare_digest(_digest(mac, signed[:-_MAC_BYTES]), signed[-_MAC_BYTES:])


def _digest(mac: blake2s, body: bytes) -> bytes:
    mac = mac.copy()
    mac.update(body)
    return mac.digest()


def check_key_part(name: str, value: str) -> str:
    """Return `value` for use in a key. Raises ValueError if it could change the key's hash tag."""
    if not _KEY_PART.fullmatch(value):
        raise ValueError(f"{name} {value!r}: use 1 to 128 letters, digits, '.', '_' or '-'")
    return value


def shard_of(worker_id: WorkerId, num_shards: int) -> int:
    """Return the shard of a worker, the same for every reader and writer."""
    return zlib.crc32(worker_id.encode()) % num_shards


def decode_member(worker_id: bytes, data: bytes) -> WorkerMember:
    """Return the member found under `worker_id`. Raises RegistryError."""
    if len(data) > MAX_MEMBER_BYTES or len(worker_id) > MAX_NAME_BYTES:
        raise RegistryError(f"member of {len(data)} bytes")
    try:
        member = _decode_member(data)
        check_key_part("worker_id", member.worker_id)
        check_key_part("epoch", member.epoch)
    except Exception as error:  # anything that a decoder raises at such bytes
        raise RegistryError(f"{type(error).__name__}: {error!s:.200}") from error
    if member.worker_id.encode() != worker_id:
        raise RegistryError(f"member has the worker_id {member.worker_id!r}")
    if len(member.tiers) > MAX_TIERS:
        member = replace(member, tiers=member.tiers[:MAX_TIERS])
    if any(member.tiers.count(tier) > 1 for tier in TIERS):
        raise RegistryError(f"member names a tier twice: {member.tiers!s:.80}")
    is_sized = 0 < member.block_size < 2**31 and 0 < member.max_model_len < 2**31
    if not is_sized or not member.url.startswith(("http://", "https://")):
        sizes = f"block_size {member.block_size!s:.20}, max_model_len {member.max_model_len!s:.20}"
        raise RegistryError(f"member with {sizes}, url {member.url!r:.80}")
    return member


def encode_state(
    member: WorkerMember, load: WorkerLoad, num_tier_entries: tuple[int, ...] = (), **numbers: int
) -> bytes:
    """Encode a `StateRecord`; `numbers` are its other fields."""
    state = StateRecord(
        format=_STATE_FORMAT, epoch=member.epoch, load=load, num_tier_entries=num_tier_entries, **numbers
    )
    return msgspec.msgpack.encode(state)


def decode_state(data: Any) -> StateRecord:
    """Return a state. Raises RegistryError."""
    if isinstance(data, bytes) and len(data) > MAX_STATE_BYTES:
        raise RegistryError(f"state of {len(data)} bytes")
    try:
        state: StateRecord = _decode_state(data)
        is_ours = state.format == _STATE_FORMAT
    except Exception as error:  # anything that a decoder raises at such bytes, or at another type
        raise RegistryError(f"{type(error).__name__}: {error!s:.200}") from error
    if not is_ours:
        raise RegistryError(f"state of {len(data)} bytes in format {state.format!s:.20}")
    return state


def decode_hash(reply: Any) -> list[tuple[bytes, bytes]]:
    """Return the pairs of an HGETALL. Raises ReplyError."""
    if not isinstance(reply, list) or len(reply) % 2 or not all(type(part) is bytes for part in reply):
        raise ReplyError(f"no hash: {brief(reply)}")
    return list(zip(reply[::2], reply[1::2], strict=True))


def decode_time_ms(reply: Any) -> int:
    """Return a TIME reply in milliseconds. Raises ReplyError."""
    if type(reply) is list and len(reply) == 2:
        seconds, microseconds = reply
        is_text = type(seconds) is type(microseconds) is bytes and len(seconds) <= 12 and len(microseconds) <= 6
        if is_text and seconds.isdigit() and microseconds.isdigit():
            return int(seconds) * 1000 + int(microseconds) // 1000
    raise ReplyError(f"no time: {brief(reply)}")


def brief(reply: Any) -> str:
    """Describe a reply in a few words, whatever its size or depth."""
    match reply:
        case bytes():
            return f"{len(reply)} bytes: {reply[:60]!r}"
        case list():
            return f"a list of {len(reply)}"
        case Exception():
            return f"the error {str(reply)[:120]!r}"
    return f"{type(reply).__name__} {reply!s:.40}"
