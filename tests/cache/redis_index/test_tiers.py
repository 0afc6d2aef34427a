"""Stores below the pool in the index on a real Redis: both sides of their sets."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import msgspec
import pytest

from benchmarks.dev.index_load import fleet
from cache.records import WorkerLoad, WorkerMember
from cache.redis_index import IndexWriter, RedisIndex, SetChange, WriterSettings, schema
from cache.redis_index.client import RedisClient, RedisDownError, Reply
from cache.redis_index.connection import ClientSettings
from cache.redis_index.lookup import Shard
from cache.redis_index.registry import Registry
from cache.redis_index.schema import RegistryError, Signer
from cache.types import BlockHash, Tier, TierName
from tests.cache.redis_index.index_parts import (
    EAGER,
    LASTING,
    becomes,
    chain,
    entries,
    linked,
    member,
)
from tests.redis_server import RedisServer
from tests.waiting import HANG_S, until

POOL_KEY = "{headstart:0}:b:w0:epoch-of-w0:1"
Ends = dict[str, tuple[int, ...]]


def tiered(name: str = "w0", tiers: tuple[TierName, ...] = ("disk",), epoch: str | None = None) -> WorkerMember:
    return replace(member(name, epoch), tiers=tiers)


async def ends(index: RedisIndex, hashes: Sequence[BlockHash]) -> Ends:
    """Return where each worker's match ends: in its pool, then in each tier."""
    found = await index.lookup(hashes)
    assert found is not None
    return {item.member.worker_id: (item.matched_blocks, *item.tier_blocks) for item in found}


def end(index: RedisIndex, hashes: Sequence[BlockHash], expected: Ends) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return await ends(index, hashes) == expected

    return check


# --- lookups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_a_match_goes_on_in_each_tier(redis_server: RedisServer, seed: int) -> None:
    """The pool has a prefix. A tier has any blocks: those that follow, more, fewer, or some with gaps."""
    rng = random.Random(seed)
    kinds: list[tuple[Tier, ...]] = [(), (), ("disk",), ("host",), ("host", "disk")]
    members = [tiered(f"w{n:02}", rng.choice(kinds)) for n in range(20)]
    prompts = [chain(rng.choice([0, 1, 2, 3, 17, 64])) for _ in range(50)]
    held: dict[str, list[set[BlockHash]]] = {m.worker_id: [set() for _ in (None, *m.tiers)] for m in members}
    for hashes in prompts:
        shared = rng.randint(0, len(hashes))  # neighbours often agree
        for places in held.values():
            base = rng.choice([shared, rng.randint(0, len(hashes))])
            places[0].update(hashes[:base])
            for place in places[1:]:
                first, last = rng.randint(0, base), rng.choice([shared, rng.randint(base, len(hashes))])
                share = rng.choice([1.0, 1.0, 0.5])
                place.update(block for block in hashes[first:last] if rng.random() < share)
                base = max(base, last)
    writers = [IndexWriter(redis_server.url, m, LASTING) for m in members]
    index = RedisIndex(redis_server.url, EAGER)
    async with linked(*writers, index):
        for writer in writers:
            pool, *tiers = [entries(sorted(place)) for place in held[writer.member.worker_id]]
            assert await writer.rewrite(pool, WorkerLoad(), tiers)
        await until(becomes(index, [], {m.worker_id: 0 for m in members}))
        num_exact = num_gapped = 0
        for hashes in prompts:
            found = await ends(index, hashes)
            assert found.keys() == held.keys()
            for name, (matched, *rest) in found.items():
                pool_held, *tiers_held = held[name]
                assert matched == run(pool_held, hashes, 0)
                base = matched
                for length, tier in zip(rest, tiers_held, strict=True):
                    exact = run(tier, hashes, base)
                    if tier.isdisjoint(hashes[exact:]):
                        assert length == exact
                        num_exact += length > base
                    else:  # a hint: it ends where some run in the tier ends
                        assert (length == exact) if exact == base else (hashes[length - 1] in tier)
                        assert length == len(hashes) or hashes[length] not in tier
                        num_gapped += 1
                    base = length
        assert num_exact > 50
        assert num_gapped > 20


def run(held: set[BlockHash], hashes: Sequence[BlockHash], base: int) -> int:
    """Return where the blocks of `hashes` from `base` on are no longer held."""
    return next((at for at in range(base, len(hashes)) if hashes[at] not in held), len(hashes))


async def test_hundreds_of_workers_have_tiers(redis_server: RedisServer) -> None:
    """Their places in the reply take more than a byte."""
    hashes, client = chain(100), RedisClient(redis_server.url, ClientSettings())
    index = RedisIndex(redis_server.url, replace(fleet.READER, deadline_s=HANG_S))
    async with fleet.running(client):
        await fleet.populate(client, hashes, 600, "deep", on_disk="head")
        async with fleet.running(index):
            found = await ends(index, hashes)
        assert list(found.values()) == [(50 + n % 50,) * 2 for n in range(600)]


@pytest.mark.parametrize(("disk", "most_calls"), [(40, 1), (90, 12)], ids=["no more than the pool", "more"])
async def test_a_tier_costs_one_call_where_neighbours_agree(
    redis_server: RedisServer, disk: int, most_calls: int
) -> None:
    """The first tier has to search the end; the workers without tiers cost what they cost where none has any."""
    hashes = chain(100)

    async def num_calls(num_tiers: int) -> int:
        redis_server.command("FLUSHALL")
        members = [tiered(f"w{n}", ("disk",) * (n % 3 == 1 and n < 3 * num_tiers)) for n in range(10)]
        writers = [IndexWriter(redis_server.url, m, LASTING) for m in members]
        index = RedisIndex(redis_server.url, EAGER)
        async with linked(*writers, index):
            for writer in writers:
                tiers = [entries(hashes[:disk])] * len(writer.member.tiers)
                assert await writer.rewrite(entries(hashes[:60]), WorkerLoad(), tiers)
            seen = {m.worker_id: (60, *[max(60, disk)] * len(m.tiers)) for m in members}
            await until(end(index, hashes, seen))
            redis_server.command("CONFIG", "RESETSTAT")
            assert await ends(index, hashes) == seen
            stats = redis_server.command("INFO", "commandstats")
        return sum(int(number) for number in re.findall(rb"cmdstat_sm?ismember:calls=(\d+)", stats))

    without, one = await num_calls(0), await num_calls(1)
    assert without < one <= without + most_calls
    assert await num_calls(3) == one + 2


@pytest.mark.parametrize("foreign", [("SET", "x"), ("RPUSH", "x", "y"), ("HSET", "x", "y")])
async def test_a_key_of_another_type_only_costs_its_tier(redis_server: RedisServer, foreign: tuple[str, ...]) -> None:
    """The next rewrite repairs it."""
    hashes = chain(10)
    writer = IndexWriter(redis_server.url, tiered(tiers=("host", "disk")), LASTING)
    index = RedisIndex(redis_server.url, EAGER)
    held = entries(hashes)
    async with linked(writer, index):
        assert await writer.rewrite(held[:2], WorkerLoad(), [held[:5], held])
        await until(end(index, hashes, {"w0": (2, 5, 10)}))
        redis_server.command("DEL", f"{POOL_KEY}:host")
        redis_server.command(foreign[0], f"{POOL_KEY}:host", *foreign[1:])
        assert await ends(index, hashes) == {"w0": (2, 2, 10)}
        unchanged = [SetChange([], [], 5), SetChange([], [], 10)]
        assert not await writer.publish([SetChange([], [], 2), *unchanged], WorkerLoad())
        assert await writer.rewrite(held[:2], WorkerLoad(), [held[:5], held])
        await until(end(index, hashes, {"w0": (2, 5, 10)}))


@pytest.mark.parametrize(
    ("tiers", "ends_in_tiers"),
    [
        (("tape", "disk"), (2, 10)),
        (("disk", "tape"), (10, 10)),
        (("host", "tape", "disk"), (5, 5, 10)),
        (("tape", "", "é\n\0" * 50, "host"), (2, 2, 2, 5)),
        (("tape",), (2,)),
        (("tape", "drum"), (2, 2)),
    ],
)
async def test_a_tier_of_a_newer_version_costs_itself_alone(
    redis_server: RedisServer, tiers: tuple[str, ...], ends_in_tiers: tuple[int, ...]
) -> None:
    hashes, held = chain(10), {"host": 5, "disk": 10}
    writer = IndexWriter(redis_server.url, tiered(tiers=tiers), LASTING)
    others = [IndexWriter(redis_server.url, member(name), LASTING) for name in ("v0", "v1", "v2")]
    index = RedisIndex(redis_server.url, EAGER)
    async with linked(writer, *others, index):
        in_tiers = [entries(hashes[: held.get(tier, 7)]) for tier in tiers]
        assert await writer.rewrite(entries(hashes[:2]), WorkerLoad(), in_tiers)
        for other in others:  # a worker's place among others is no match
            assert await other.rewrite(entries(hashes[:1]), WorkerLoad())
        await until(end(index, hashes, {"w0": (2, *ends_in_tiers), "v0": (1,), "v1": (1,), "v2": (1,)}))
        (entry,) = [entry for entry in await index.entries() if entry.member.worker_id == "w0"]
        assert entry.num_tier_entries == {tier: held[tier] for tier in tiers if tier in held}


@pytest.mark.parametrize("names", [["tape", "disk"], [f"tape{number}" for number in range(700)]])
def test_a_member_with_many_tiers_costs_few_keys(names: list[str]) -> None:
    """However many it names: anybody may write an unsigned member."""
    shard = Shard("redis://h:1", 0, EAGER, lambda event: None)
    own = tiered(tiers=("host", *names))
    record = schema.encode_member(own)
    assert len(record) < schema.MAX_MEMBER_BYTES
    shard.registry.refresh([(b"w0", record)], [])
    query = shard._query(None)
    assert len(query.links) == 1 + ("disk" in names)
    assert len(query.matches_of[0]) == min(1 + len(names), schema.MAX_TIERS)


@pytest.mark.parametrize(
    "matches",
    [
        *([], [3, 0], [3, 0, 3], [3, 0, 3, 3, 3], [3, 0, 2, 3], [3, 0, 3, 2], [3, 0, 3, 5], [3, 0, -1, 3]),
        *([3, 0, 3, None], [3, 0, b"3", 3], [3, 0, [], 3], None, b"QUEUED"),
    ],
)
def test_a_forged_match_reaches_no_router(matches: object) -> None:
    shard = Shard("redis://h:1", 0, EAGER, lambda event: None)
    members = [tiered("w0", ("host", "disk")), tiered("w1", ())]
    shard.registry.refresh([(m.worker_id.encode(), schema.encode_member(m)) for m in members], [])
    query = shard._query(None)
    assert query.split([3, 0, 3, 4], 4) == ([3, 0], [(3, 4), ()])
    with pytest.raises(RedisDownError, match="malformed"):
        shard._candidates(query, 4, [b"v", [b"1", b"0"], matches, []])


# --- the registry -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", [["disk", "disk"], ["tape", "disk", "disk"], "disk", [1]])
def test_a_member_with_other_tiers_than_ours_is_refused(tiers: object) -> None:
    record = msgspec.json.encode({**msgspec.to_builtins(member()), "tiers": tiers})
    with pytest.raises(RegistryError):
        schema.decode_member(b"w0", record)


def test_a_match_in_tiers_of_an_old_version_is_not_credited() -> None:
    registry, own = Registry(lambda event: None, Signer(b"", "headstart", 0)), tiered()

    def state(version: int) -> bytes:
        numbers = {"batch": 1, "deadline_ms": 2000, "written_ms": 1, "num_entries": 7}
        return schema.encode_state(own, WorkerLoad(), (5,), set_version=version, **numbers)

    registry.refresh([(b"w0", schema.encode_member(own))], [(b"w0", state(1))])
    for version, expected in ((1, (4,)), (2, (0,)), (2, (4,))):
        (candidate,) = registry.candidates(registry.workers(None), [3], [(4,)], [state(version)], 1000)
        assert candidate.tier_blocks == expected


# --- writers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["lost entry", "foreign entry", "set gone"])
@pytest.mark.parametrize("key", [POOL_KEY, f"{POOL_KEY}:host", f"{POOL_KEY}:disk"])
async def test_a_damaged_set_is_detected(redis_server: RedisServer, key: str, damage: str) -> None:
    held = entries(chain(10))
    writer = IndexWriter(redis_server.url, tiered(tiers=("host", "disk")), LASTING)
    unchanged = [SetChange([], [], 10)] * 2
    async with linked(writer):
        assert await writer.rewrite(held, WorkerLoad(), [held, held])
        command: dict[str, tuple[str | bytes, ...]] = {
            "lost entry": ("SREM", key, held[3]),
            "foreign entry": ("SADD", key, "12345678"),
            "set gone": ("DEL", key),
        }
        assert redis_server.command(*command[damage]) == b":1\r\n"
        assert not await writer.publish([SetChange([], [], 10), *unchanged], WorkerLoad())
        assert await writer.rewrite(held, WorkerLoad(), [held, held])
        assert await writer.publish([SetChange([], [], 10), *unchanged], WorkerLoad())
        assert redis_server.command("EXISTS", POOL_KEY, f"{POOL_KEY}:host", f"{POOL_KEY}:disk") == b":0\r\n"


async def test_one_publish_changes_the_sets_of_the_pool_and_of_tiers(redis_server: RedisServer) -> None:
    hashes = chain(10)
    held = entries(hashes)
    writer = IndexWriter(redis_server.url, tiered(tiers=("host", "disk")), LASTING)
    index = RedisIndex(redis_server.url, EAGER)
    async with linked(writer, index):
        assert await writer.rewrite(held[:6], WorkerLoad(), [[], held[:2]])
        await until(end(index, hashes, {"w0": (6, 6, 6)}))
        num_sent = 0
        real = writer.client.submit

        def submit(packed: Sequence[bytes], num_replies: int, max_reply_bytes: int) -> asyncio.Future[list[Reply]]:
            nonlocal num_sent
            num_sent += 1
            return real(packed, num_replies, max_reply_bytes)

        writer.client.submit = submit  # type: ignore[method-assign]
        moved = SetChange(held[4:6], [], 2), SetChange(held[2:], held[:1], 9)
        assert await writer.publish([SetChange([], held[5:3:-1], 4), *moved], WorkerLoad())
        assert num_sent == 1
        assert await ends(index, hashes) == {"w0": (4, 6, 10)}
        (entry,) = await index.entries()
        assert (entry.num_entries, entry.num_tier_entries) == (4, {"host": 2, "disk": 9})


async def test_every_set_lives_and_ends_with_its_version(redis_server: RedisServer) -> None:
    held = entries(chain(3))
    writer = IndexWriter(
        redis_server.url, tiered(), WriterSettings(timeout_s=HANG_S, lease_s=600.0, set_ttl_s=1000.0, chunk=2)
    )
    tier_key = f"{POOL_KEY}:disk"
    async with linked(writer):
        assert await writer.rewrite(held, WorkerLoad(), [held])
        for key in (POOL_KEY, tier_key):
            redis_server.command("PEXPIRE", key, "50000")
        assert await writer.publish([SetChange([], [], 3), SetChange([], [], 3)], WorkerLoad())
        for key in (POOL_KEY, tier_key):
            assert 900_000 < int(redis_server.command("PTTL", key)[1:]) <= 1_000_000
        writer.begin_epoch(tiered(epoch="e1"))
        assert await writer.rewrite([], WorkerLoad(), [held[:1]])
        assert redis_server.command("EXISTS", POOL_KEY, tier_key) == b":0\r\n"
        await writer.retire()
        assert redis_server.command("DBSIZE") == b":1\r\n", "the version alone is left"
