"""The entries that a worker writes to Redis, signed before they are due."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from cache.records import WorkerLoad, WorkerMember
from cache.redis_index.client import Argument, pack
from cache.redis_index.schema import Keys, Signer, encode_member, encode_state
from cache.redis_index.upkeep import new_version
from cache.types import Epoch, IndexEntry

LEASE_MS: Final = 5000
SET_TTL_MS: Final = 60_000
NUM_CHANGED: Final = 2
"""Blocks that each publish stores and removes, next to those of prompts."""
OTHER_BLOCKS: Final = 200
"""Blocks that a worker holds from the start."""
_LOAD: Final = WorkerLoad({}, 1000.0, 20_000.0, 3, 0, 90_000, 100_000)


@dataclass(slots=True, eq=False)
class Published:
    """One epoch of one worker in the registry."""

    member: WorkerMember
    keys: Keys
    signer: Signer
    states: list[bytes] = field(default_factory=list)
    """Those of its next publishes, the first one last."""
    others: deque[IndexEntry] = field(default_factory=deque)
    held: set[IndexEntry] = field(default_factory=set)
    """Blocks of prompts."""
    fresh: list[IndexEntry] = field(default_factory=list)
    """Those that are not published yet."""

    def sign(self, first_ms: int, every_ms: int, num_publishes: int) -> None:
        """Make the states of publishes at these times of Redis' clock."""
        for number in range(num_publishes, 0, -1):
            written_ms = first_ms + (number - 1) * every_ms
            state = encode_state(
                self.member,
                _LOAD,
                set_version=1,
                batch=number,
                deadline_ms=written_ms + LEASE_MS,
                written_ms=written_ms,
                num_entries=OTHER_BLOCKS,
            )
            self.states.append(self.signer.sign_state(self.member.worker_id, state))

    def registration(self) -> bytes:
        """Return the commands that enter the worker with its first state."""
        worker_id = self.member.worker_id
        self.others.extend(_blocks(OTHER_BLOCKS))
        record = self.signer.sign_member(worker_id, encode_member(self.member))
        key = self.keys.pool(self.member, 1)
        return pack(
            [
                ("MULTI",),
                ("SADD", key, *self.others),
                ("PEXPIRE", key, SET_TTL_MS),
                ("HSET", self.keys.members, worker_id, record),
                new_version(self.keys),
                ("HSET", self.keys.states, worker_id, self.states.pop()),
                ("EXEC",),
            ]
        )

    def publish(self) -> bytes:
        """Return the commands of the next publish, with the blocks that prompts have stored since the last one."""
        key, stored = self.keys.pool(self.member, 1), _blocks(NUM_CHANGED)
        removed = [self.others.popleft() for _ in stored]
        self.others.extend(stored)
        fresh, self.fresh = self.fresh, []
        commands: list[tuple[Argument, ...]] = [
            ("MULTI",),
            ("SADD", key, *stored, *fresh),
            ("SREM", key, *removed),
            ("PEXPIRE", key, SET_TTL_MS),
            ("HSET", self.keys.states, self.member.worker_id, self.states.pop()),
            ("EXEC",),
        ]
        return pack(commands)

    def hold(self, entries: list[IndexEntry]) -> int:
        """Store the blocks of a prompt, and return how many of its first ones were held."""
        num_held = next((at for at, entry in enumerate(entries) if entry not in self.held), len(entries))
        self.held.update(entries[num_held:])
        self.fresh += entries[num_held:]
        return num_held


def restarted(member: WorkerMember, now_ms: int) -> WorkerMember:
    """Return the member of the worker's next process."""
    return replace(member, epoch=Epoch(os.urandom(8).hex()), epoch_started_ms=now_ms)


def _blocks(count: int) -> list[IndexEntry]:
    return [IndexEntry(os.urandom(8)) for _ in range(count)]
