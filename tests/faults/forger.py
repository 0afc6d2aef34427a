"""A forger: it may write to Redis and does not have the cluster secret."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace
from typing import Any, Final, Self

import redis

from cache.records import WorkerLoad
from cache.redis_index import schema
from cache.redis_index.schema import Signer
from cache.types import Epoch
from tests.garbage import changed
from tests.redis_server import RedisServer

KEYS: Final = schema.Keys("headstart", 0)
LIARS: Final = Signer(b"not the secret", "headstart", 0)


class Forger:
    """Writes 20 times a second while entered: forged, replayed, swapped and rolled-back entries, garbage, deletions."""

    def __init__(self, server: RedisServer, rng: random.Random, rate_hz: float = 20.0) -> None:
        self._store: Any = redis.Redis(unix_socket_path=str(server.socket))
        self._rng = rng
        self._pause_s = 1.0 / rate_hz
        self._seen: dict[bytes, set[tuple[bytes, bytes]]] = {KEYS.members: set(), KEYS.states: set()}
        """All authentic entries that were ever in the two hashes."""
        self._mine: set[tuple[bytes, bytes]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forger")
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._store.close()
        if self.error is not None:
            raise self.error

    def watch(self) -> None:
        """Remember what stands in Redis now, to be written again later."""
        for key, seen in self._seen.items():
            if self._store.type(key) == b"hash":
                seen.update(self._store.hgetall(key).items() - self._mine)

    def _run(self) -> None:
        actions = [
            self._forge_member,
            self._forge_state,
            self._replay,
            self._replay,
            self._garbage,
            self._garbage,
            self._swap,
            self._delete,
            self._break_version,
            self._break_type,
            self._poison_set,
        ]
        try:
            while not self._stop.wait(self._pause_s):
                self.watch()
                action = self._rng.choice(actions)
                action()
                self._store.set(KEYS.version, self._rng.randbytes(8))  # gateways read it at once
                self.counts[action.__name__] += 1
        except BaseException as error:
            self.error = error

    def _field(self, key: bytes) -> tuple[bytes, bytes]:
        return self._rng.choice(sorted(self._seen[key]))

    def _write(self, key: bytes, field: bytes, value: bytes) -> None:
        if (field, value) not in self._seen[key]:
            self._mine.add((field, value))
        if self._store.type(key) == b"hash":
            self._store.hset(key, field, value)
        else:
            self._as_one(("DEL", key), ("HSET", key, field, value))

    def _as_one(self, *commands: tuple[str | bytes, ...]) -> None:
        """One MULTI: the workers write at the same time."""
        with self._store.pipeline(transaction=True) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            pipeline.execute()

    def _forge_member(self) -> None:
        """The member as it is, but for an address, an epoch or a shape; signed with another secret, or not at all."""
        field, value = self._field(KEYS.members)
        member = schema.decode_member(field, value)
        changes = self._rng.choice(
            [
                {"url": "http://127.0.0.1:1"},
                {"url": "http://127.0.0.1:99999"},
                {"url": "http://a..b:80"},
                {"epoch": Epoch(self._rng.randbytes(8).hex()), "epoch_started_ms": 2**52},
                {"namespace": "other"},
                {"model": "other"},
                {"protocol": 99, "oldest_protocol": 99},
                {"block_size": 1},
                {},
            ]
        )
        record = schema.encode_member(replace(member, **changes))
        forms = [record, LIARS.sign_member(member.worker_id, record), value[:-1], b"[" * 5000, b"\xff", record[:50]]
        self._write(KEYS.members, field, self._rng.choice(forms))

    def _forge_state(self) -> None:
        """Write a state that drains, has an absurd load or lease, or names a set that is not there."""
        field, value = self._field(KEYS.members)
        member = schema.decode_member(field, value)
        load = WorkerLoad(
            {"x": 1e11},
            1e11,
            1e-3,
            10**6,
            10**6,
            0,
            10,
            draining=self._rng.random() < 0.5,  # type: ignore[dict-item]
        )
        record = schema.encode_state(
            member,
            load,
            set_version=self._rng.randrange(9),
            batch=2**52,
            deadline_ms=self._rng.choice([0, 2**52]),
            written_ms=0,
            num_entries=0,
        )
        forms = [record, LIARS.sign_state(member.worker_id, record), b"\x81" * 3000, b"\xd9\x02\xff\xff", b""]
        self._write(KEYS.states, field, self._rng.choice(forms))

    def _replay(self) -> None:
        """Write an entry that was authentic before: of this epoch, or of one before the cache was cleared."""
        key = self._rng.choice(list(self._seen))
        self._write(key, *self._field(key))

    def _garbage(self) -> None:
        """Write a changed entry under its own name or another, or to the version."""
        key = self._rng.choice(list(self._seen))
        field, value = self._field(key)
        names = [field, field, b"ghost", b"", b"\xff\xfe", b"x" * 10_000]
        self._write(key, self._rng.choice(names), changed(self._rng, value))

    def _swap(self) -> None:
        key = self._rng.choice(list(self._seen))
        (one, value), (other, _) = self._field(key), self._field(key)
        self._write(key, other, value)
        self._write(key, self._rng.choice([one, b"w9"]), value)

    def _delete(self) -> None:
        key = self._rng.choice(list(self._seen))
        if self._rng.random() < 0.5:
            self._store.delete(key)
        elif self._store.type(key) == b"hash":
            self._store.hdel(key, self._field(key)[0])

    def _break_version(self) -> None:
        self._store.delete(KEYS.version)
        if self._rng.random() < 0.5:
            self._store.set(KEYS.version, changed(self._rng, b"12345678"))

    def _break_type(self) -> None:
        self._as_one(("DEL", key := self._rng.choice([*self._seen, KEYS.version])), ("RPUSH", key, b"x"))

    def _poison_set(self) -> None:
        """Put blocks that no worker holds into a worker's set, or empty it."""
        keys = sorted(self._store.scan_iter(b"{headstart:0}:b:*"))
        if keys:
            key = self._rng.choice(keys)
            if self._rng.random() < 0.3:
                self._store.unlink(key)
            elif self._store.type(key) == b"set":
                self._store.sadd(key, *(self._rng.randbytes(8) for _ in range(20)))
