"""The keys and records in Redis, and how they are read back: everything found there is untrusted input.

    {prefix:s}:members    HASH  worker id -> member     (JSON; constant during an epoch)
    {prefix:s}:states     HASH  worker id -> state      (msgpack array; rewritten at every publish)
    {prefix:s}:version    STRING, random, another one after every change of `members`
    {prefix:s}:b:<worker id>:<epoch>:<generation>       SET of 8-byte entries, with a TTL

`s` is the shard; the braces are a hash tag, so that one shard is one slot of a Redis Cluster and one script reads it.
"""

from __future__ import annotations

import re
import zlib
from typing import Annotated, Any, Final

import msgspec

from cache.records import WorkerLoad, WorkerMember
from cache.types import WorkerId

MAX_STATE_BYTES: Final = 16 * 1024
MAX_MEMBER_BYTES: Final = 8 * 1024
MAX_MEMBERS: Final = 20_000
_STATE_FORMAT: Final = 1
_KEY_PART: Final = re.compile(r"[A-Za-z0-9._\-]{1,128}")

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Name = Annotated[str, msgspec.Meta(max_length=128)]


class RegistryError(ValueError):
    """A value of the registry that no worker of ours has written."""


class ReplyError(ValueError):
    """A reply of another shape than the command's: the connection may be out of step and is not to be trusted."""


class State(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A worker's state in its registry entry. Times are Redis' own, in milliseconds."""

    format: int
    epoch: _Name
    generation: _Count
    batch: _Count
    deadline_ms: _Count
    written_ms: _Count
    num_entries: _Count
    load: WorkerLoad


_decode_state: Final = msgspec.msgpack.Decoder(State).decode
_STATE_ENCODER: Final = msgspec.msgpack.Encoder()
_MEMBER_DECODER: Final = msgspec.json.Decoder(WorkerMember)
_MEMBER_ENCODER: Final = msgspec.json.Encoder()


class Keys:
    """The names of one shard's keys."""

    __slots__ = ("members", "states", "tag", "version")

    def __init__(self, prefix: str, shard: int) -> None:
        self.tag = f"{{{prefix}:{shard}}}"
        self.members = f"{self.tag}:members".encode()
        self.states = f"{self.tag}:states".encode()
        self.version = f"{self.tag}:version".encode()

    def blocks(self, worker_id: str, epoch: str, generation: int) -> bytes:
        return f"{self.tag}:b:{worker_id}:{epoch}:{generation}".encode()


def check_key_part(name: str, value: str) -> str:
    """`value` unchanged, or ValueError: it stands in keys, and must not disturb their hash tag."""
    if not _KEY_PART.fullmatch(value):
        raise ValueError(f"{name} {value!r}: use 1 to 128 letters, digits, '.', '_' or '-'")
    return value


def check_member(member: WorkerMember) -> WorkerMember:
    """`member` unchanged, or ValueError."""
    check_key_part("worker_id", member.worker_id)
    check_key_part("epoch", member.epoch)
    return member


def shard_of(worker_id: WorkerId, num_shards: int) -> int:
    """The shard in which a worker lives, the same for every reader and writer."""
    return zlib.crc32(worker_id.encode()) % num_shards


def encode_member(member: WorkerMember) -> bytes:
    return _MEMBER_ENCODER.encode(member)


def decode_member(worker_id: bytes, data: bytes) -> WorkerMember:
    """Raises RegistryError."""
    if len(data) > MAX_MEMBER_BYTES or len(worker_id) > 128:
        raise RegistryError(f"member of {len(data)} bytes")
    try:
        member = _MEMBER_DECODER.decode(data)
        check_member(member)
    except Exception as error:  # whatever a decoder raises at such bytes
        raise RegistryError(f"{type(error).__name__}: {error!s:.200}") from error
    if member.worker_id.encode() != worker_id:
        raise RegistryError(f"member calls itself {member.worker_id!r}")
    if not (0 < member.block_size < 2**31 and 0 < member.max_model_len < 2**31) or not member.url.startswith(
        ("http://", "https://")
    ):
        sizes = f"block_size {member.block_size!s:.20}, max_model_len {member.max_model_len!s:.20}"
        raise RegistryError(f"member with {sizes}, url {member.url!r:.80}")
    return member


def encode_state(
    member: WorkerMember,
    load: WorkerLoad,
    *,
    generation: int,
    batch: int,
    deadline_ms: int,
    written_ms: int,
    num_entries: int,
) -> bytes:
    return _STATE_ENCODER.encode(
        State(
            format=_STATE_FORMAT,
            epoch=member.epoch,
            generation=generation,
            batch=batch,
            deadline_ms=deadline_ms,
            written_ms=written_ms,
            num_entries=num_entries,
            load=load,
        )
    )


def decode_state(data: Any) -> State:
    """Raises RegistryError."""
    try:
        state: State = _decode_state(data)
        if len(data) > MAX_STATE_BYTES or state.format != _STATE_FORMAT:
            raise RegistryError(f"state of {len(data)} bytes in format {state.format!s:.20}")
    except RegistryError:
        raise
    except Exception as error:  # whatever a decoder raises at such bytes, or what is none
        raise RegistryError(f"{type(error).__name__}: {error!s:.200}") from error
    return state


def decode_hash(reply: Any) -> list[tuple[bytes, bytes]]:
    """The pairs of an HGETALL. Raises ReplyError."""
    if not isinstance(reply, list) or len(reply) % 2 or not all(type(part) is bytes for part in reply):
        raise ReplyError(f"no hash: {brief(reply)}")
    return list(zip(reply[::2], reply[1::2], strict=True))


def decode_time_ms(reply: Any) -> int:
    """A TIME reply in milliseconds. Raises ReplyError."""
    if type(reply) is list and len(reply) == 2:
        seconds, microseconds = reply
        is_text = type(seconds) is type(microseconds) is bytes and len(seconds) <= 12 and len(microseconds) <= 6
        if is_text and seconds.isdigit() and microseconds.isdigit():
            return int(seconds) * 1000 + int(microseconds) // 1000
    raise ReplyError(f"no time: {brief(reply)}")


def brief(reply: Any) -> str:
    """Describe a reply in a few words, however large or deep it is."""
    match reply:
        case bytes():
            return f"{len(reply)} bytes: {reply[:60]!r}"
        case list():
            return f"a list of {len(reply)}"
        case Exception():
            return f"the error {str(reply)[:120]!r}"
    return f"{type(reply).__name__} {reply!s:.40}"
