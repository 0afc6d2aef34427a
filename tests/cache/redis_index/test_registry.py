"""The registry as a gateway reads it, without a Redis."""

from __future__ import annotations

import json
import logging
import math
import random
from collections import Counter
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.records import WorkerLoad, WorkerMember
from cache.redis_index import schema
from cache.redis_index.registry import Registry
from cache.redis_index.schema import Signer
from cache.types import Epoch, WorkerId
from server.ops.overview import index_row
from tests.garbage import changed, changed_tree
from tests.members import make_member

MEMBER = make_member("w0", "e0")
OTHER_MEMBER = schema.encode_member(make_member("w1", "e1"))


def state(version: int, *, written_ms: int = 500) -> bytes:
    return schema.encode_state(
        MEMBER,
        WorkerLoad(num_running=version),
        set_version=version,
        batch=1,
        deadline_ms=written_ms + 1500,
        written_ms=written_ms,
        num_entries=9,
    )


UNSIGNED = Signer(b"", "headstart", 0)


def registry() -> Registry:
    read = Registry(lambda event: None, UNSIGNED)
    read.refresh([(b"w0", schema.encode_member(MEMBER))], [(b"w0", state(1))])
    return read


def test_match_in_an_old_version_is_not_credited() -> None:
    read = registry()
    workers = read.workers(None)

    def seen(version: int) -> tuple[int, int]:
        (candidate,) = read.candidates(workers, [5], [()], [state(version)], 1000)
        return candidate.matched_blocks, candidate.load.num_running

    read.has_changed = False
    assert seen(1) == (5, 1)
    assert not read.has_changed
    assert seen(2) == (0, 2)
    assert read.has_changed, "the next lookup asks for the new set"
    assert seen(2) == (5, 2)
    assert seen(1) == (0, 1), "an older one stands there again, after a failover"


def test_worker_without_state_or_lease_is_no_candidate() -> None:
    read = registry()
    workers = read.workers(None)
    (candidate,) = read.candidates(workers, [5], [()], [state(1)], 1999)
    assert candidate.load_age_s == pytest.approx(1.499)
    assert read.candidates(workers, [5], [()], [state(1)], 2000) == []
    assert read.candidates(workers, [5], [()], [], 1000) == []
    assert read.candidates(workers, [5], [()], [None], 1000) == []
    assert len(read.candidates(workers, [5], [()], [state(1, written_ms=3000)], 2500)) == 1, "it is there again"


def test_entries_include_lapsed_workers() -> None:
    read = registry()
    for now_ms, lease_left_s, age_s in ((1000, 1.0, 0.5), (4000, -2.0, 3.5)):
        read.now_ms = now_ms
        (entry,) = read.entries()
        assert (entry.lease_left_s, entry.age_s) == pytest.approx((lease_left_s, age_s))
        assert (entry.num_entries, entry.set_version) == (9, 1)


@pytest.mark.parametrize("value", [b"junk", b"", b"x" * (schema.MAX_MEMBER_BYTES + 1), OTHER_MEMBER])
def test_invalid_value_is_counted_each_time_and_logged_once(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    events: list[str] = []
    read = Registry(events.append, UNSIGNED)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            read.refresh([(b"w0", value)], [])
    assert events == ["invalid"] * 3
    assert len(caplog.records) == 1


SIGNER = Signer(b"secret", "headstart", 0)
OTHERS = {
    "secret": Signer(b"other", "headstart", 0),
    "prefix": Signer(b"secret", "headstart2", 0),
    "shard": Signer(b"secret", "headstart", 1),
    "none": UNSIGNED,
}


def signed_record(member: WorkerMember = MEMBER, signer: Signer = SIGNER) -> bytes:
    return signer.sign_member(member.worker_id, schema.encode_member(member))


def signed_state(batch: int, member: WorkerMember = MEMBER, signer: Signer = SIGNER, **changes: object) -> bytes:
    fields: dict[str, object] = {"set_version": 1, "deadline_ms": 6000, "written_ms": batch, "num_entries": 9}
    load = WorkerLoad(num_running=batch)
    record = schema.encode_state(member, load, batch=batch, **{**fields, **changes})  # type: ignore[arg-type]
    return signer.sign_state(member.worker_id, record)


class Signed:
    """A registry with a secret that has read w0 in batch 5."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.registry = Registry(lambda event: self.events.update([event]), SIGNER)
        self.refresh(signed_record(), signed_state(5))

    def refresh(self, record: bytes | None, state: bytes | None = None, field: bytes = b"w0") -> None:
        self.registry.refresh([] if record is None else [(field, record)], [] if state is None else [(field, state)])

    def seen(self, *states: bytes | None, now_ms: int = 1000) -> list[tuple[str, int, int]]:
        """Return epoch, match and running sequences of the candidates of a lookup that returned `states`."""
        workers = self.registry.workers(None)
        found = self.registry.candidates(workers, [7] * len(workers), [()] * len(workers), states, now_ms)
        return [(c.member.epoch, c.matched_blocks, c.load.num_running) for c in found]


def test_signed_entry_is_read_like_an_unsigned_one() -> None:
    fleet = Signed()
    assert fleet.seen(signed_state(6)) == [("e0", 7, 6)]
    fleet.refresh(signed_record(), signed_state(6))
    assert fleet.seen(signed_state(6)) == [("e0", 7, 6)]
    assert not fleet.registry.has_foreign_states, "the same batch is not out of date"
    assert not fleet.events
    assert schema.decode_member(b"w0", signed_record()) == MEMBER, "also by a gateway that knows no signatures"
    assert schema.decode_state(signed_state(6)).batch == 6


@pytest.mark.parametrize("other", sorted(OTHERS))
def test_foreign_signature_changes_nothing(other: str) -> None:
    fleet = Signed()
    moved = replace(MEMBER, url="http://10.9.9.9", epoch=Epoch("e9"), epoch_started_ms=9)
    fleet.refresh(signed_record(moved, OTHERS[other]), signed_state(9, moved, OTHERS[other]))
    assert fleet.seen(signed_state(9, signer=OTHERS[other])) == [("e0", 7, 5)], "as it was known, from memory"
    assert fleet.events["invalid"] >= 2
    assert fleet.seen(None, now_ms=6000) == [], "until its lease has ended"


def test_old_batch_number_and_swapped_state_change_nothing() -> None:
    fleet = Signed()
    other = replace(MEMBER, worker_id=WorkerId("w1"))
    assert fleet.seen(signed_state(4, deadline_ms=90_000)) == [("e0", 7, 5)]
    assert fleet.events == {"stale": 1}
    assert fleet.seen(signed_state(8, other)) == [("e0", 7, 5)], "signed for another worker"
    assert fleet.events["invalid"] == 1
    assert fleet.seen(signed_state(6)) == [("e0", 7, 6)]


def test_older_epoch_does_not_replace_a_newer_one() -> None:
    fleet = Signed()
    later = replace(MEMBER, epoch=Epoch("e1"), epoch_started_ms=2)
    earlier = replace(MEMBER, epoch=Epoch("e-"), epoch_started_ms=1)
    fleet.refresh(signed_record(later), signed_state(6, later))
    assert fleet.seen(signed_state(6, later)) == [("e1", 7, 6)]
    fleet.refresh(signed_record(earlier), signed_state(7, earlier))
    assert fleet.seen(signed_state(7, earlier)) == [("e1", 7, 6)]
    assert fleet.events["stale"] == 1


def test_a_worker_that_left_is_no_candidate() -> None:
    """Its lease has not ended."""
    fleet = Signed()
    fleet.refresh(None)
    assert fleet.seen() == []


def test_unsigned_member_is_only_an_address_to_ask() -> None:
    fleet = Signed()
    stranger = replace(MEMBER, worker_id=WorkerId("w7"), secret_check="old")
    fleet.registry.refresh([(b"w0", signed_record()), (b"w7", schema.encode_member(stranger))], [(b"w7", state(1))])
    assert [member.worker_id for member in fleet.registry.members()] == ["w0", "w7"]
    assert [worker.member.worker_id for worker in fleet.registry.workers(None)] == ["w0"]


@given(data=st.data(), what=st.sampled_from(["member", "state"]))
def test_no_changed_byte_passes_verification(data: st.DataObject, what: str) -> None:
    """Flip, cut, extend or move any part of a signed entry: it changes nothing."""
    fleet = Signed()
    genuine = signed_record() if what == "member" else signed_state(6)
    at = data.draw(st.integers(0, len(genuine) - 1))
    forged = data.draw(
        st.sampled_from(
            [
                genuine[:at] + bytes([genuine[at] ^ data.draw(st.integers(1, 255))]) + genuine[at + 1 :],
                genuine[:at],
                genuine + b"0",
                genuine[at:] + genuine[:at] if at else genuine[1:],
            ]
        )
    )
    if what == "member":
        fleet.refresh(forged, signed_state(5))
    else:
        fleet.seen(forged)
    assert fleet.seen(None) == [("e0", 7, 5)]
    assert fleet.registry.workers(None)[0].member == MEMBER


@given(
    seed=st.integers(0, 2**32), what=st.sampled_from(["member", "state", "load"]), field=st.sampled_from([b"w0", b""])
)
@settings(max_examples=500)
def test_whatever_stands_there_candidates_are_sound(seed: int, what: str, field: bytes) -> None:
    """Without a secret a changed value may be taken. All that a router computes with is finite, and others stay."""
    rng, other = random.Random(seed), replace(MEMBER, worker_id=WorkerId("w1"), epoch=Epoch("e1"))
    records, states = [(b"w1", schema.encode_member(other))], [state(1), state(2).replace(b"e0", b"e1")]
    value = changed(rng, schema.encode_member(MEMBER) if what == "member" else states[0])
    if what == "load":
        *head, load, tiers = msgpack.unpackb(states[0])
        value = msgpack.packb([*head, changed_tree(rng, load), tiers])
    if what == "member":
        records.append((field, value))
    else:
        records.append((b"w0", schema.encode_member(MEMBER)))
        states[0] = value
    read = Registry(lambda event: None, UNSIGNED)
    read.refresh(records, [(b"w0", states[0]), (b"w1", states[1])])
    workers = read.workers(None)
    found = read.candidates(workers, [7] * len(workers), [()] * len(workers), states, 1000)
    assert "w1" in {candidate.member.worker_id for candidate in found}
    for load in [candidate.load for candidate in found]:
        numbers = [load.assigned_prefill_s, load.prefill_tokens_per_s, load.start_interval_s]
        assert all(math.isfinite(number) and number >= 0.0 for number in [*numbers, *load.queued_prefill_s.values()])
    json.dumps([index_row(entry) for entry in read.entries()], allow_nan=False)
