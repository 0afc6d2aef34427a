"""The tree of shared prefixes, and how often workers are asked for theirs."""

from __future__ import annotations

from cache.records import WorkerMember
from cache.types import Epoch, WorkerId
from server.ops.stems import AGE_S_PER_BLOCK, MAX_ASKED, MIN_AGE_S, StemWatch, tree
from server.workers.client import WorkerLost
from server.workers.prefixes import merged
from worker.wire import PrefixReport, PrefixUse

ROOT, SYSTEM, CHAT, OTHER, TURN = "00", "aa", "bb", "cc", "dd"


def report(worker_id: str, *uses: PrefixUse, epoch: str = "e", num_cached_blocks: int = 50) -> PrefixReport:
    return PrefixReport(worker_id, epoch, "m", 16, num_cached_blocks, uses)


def member(name: str, epoch: str = "e") -> WorkerMember:
    return WorkerMember(WorkerId(name), Epoch(epoch), f"http://{name}", "m", "n", "cpu", 16, 100, 1)


def use(*path: str, num_blocks: int, num_hits: int) -> PrefixUse:
    return PrefixUse((ROOT, *path), num_blocks, 0, num_hits, 1.0)


def test_children_follow_their_parent_and_the_way_to_a_prefix_names_its_holders() -> None:
    prefixes = merged(
        [
            report("a", use(SYSTEM, num_blocks=10, num_hits=9), use(SYSTEM, CHAT, num_blocks=40, num_hits=3)),
            report(
                "b", use(SYSTEM, OTHER, num_blocks=30, num_hits=2), use(SYSTEM, OTHER, TURN, num_blocks=50, num_hits=1)
            ),
            report("c", use("ee", num_blocks=2, num_hits=1)),
        ],
        10,
    )
    rows = tree(prefixes)
    assert [(row["hash"], row["parent"], row["level"]) for row in rows] == [
        (SYSTEM, None, 1),
        (CHAT, SYSTEM, 2),
        (OTHER, SYSTEM, 2),
        (TURN, OTHER, 3),
        ("ee", None, 1),
    ]
    assert rows[0]["workers"] == ["a", "b"], "b did not report the system prompt, but what it reported begins with it"


def test_a_row_whose_parent_is_not_shown_hangs_on_the_next_above() -> None:
    prefixes = merged(
        [report("a", use(SYSTEM, CHAT, TURN, num_blocks=9, num_hits=1), use(SYSTEM, num_blocks=1, num_hits=2))], 10
    )
    assert [(row["hash"], row["parent"]) for row in tree(prefixes)] == [(SYSTEM, None), (TURN, SYSTEM)]


class Fleet:
    """Workers that answer, and a clock that a test moves."""

    def __init__(self, *names: str) -> None:
        self.members = [member(name) for name in names]
        self.asked: list[str] = []
        self.silent: set[str] = set()
        self.num_cached_blocks = 0
        self.now_s = 100.0
        self.watch = StemWatch(lambda: self.members, self.ask, lambda: self.now_s)

    async def ask(self, url: str, limit: int) -> PrefixReport:
        name = url.removeprefix("http://")
        self.asked.append(name)
        if name in self.silent:
            raise WorkerLost("it is away")
        (known,) = [each for each in self.members if each.worker_id == name]
        uses = use(SYSTEM, num_blocks=10, num_hits=1)
        return report(name, uses, epoch=known.epoch, num_cached_blocks=self.num_cached_blocks)


async def test_a_worker_is_asked_the_less_often_the_more_it_holds() -> None:
    fleet = Fleet("a")
    fleet.num_cached_blocks = 100_000
    await fleet.watch.look()
    fleet.now_s += MIN_AGE_S
    told = await fleet.watch.look()
    assert fleet.asked == ["a"]
    assert told["stems"][0]["workers"] == ["a"], "its last report counts in between"
    fleet.now_s += AGE_S_PER_BLOCK * fleet.num_cached_blocks
    await fleet.watch.look()
    assert fleet.asked == ["a", "a"]


async def test_a_large_fleet_is_asked_in_turn() -> None:
    names = [f"w{i}" for i in range(MAX_ASKED + 8)]
    fleet = Fleet(*names)
    assert (await fleet.watch.look())["num_told"] == MAX_ASKED
    fleet.now_s += MIN_AGE_S
    told = await fleet.watch.look()
    assert set(fleet.asked) == set(names)
    assert (told["num_told"], told["num_workers"]) == (len(names), len(names))


async def test_a_lost_silent_or_restarted_worker_holds_nothing() -> None:
    fleet = Fleet("a", "b", "c")
    assert (await fleet.watch.look())["stems"][0]["num_workers"] == 3
    fleet.members = [member("b", "another"), member("c")]
    fleet.silent = {"c"}
    told = await fleet.watch.look()
    assert sorted(told["stems"][0]["workers"]) == ["b", "c"], "the new boot is asked at once, c not yet again"
    fleet.now_s += MIN_AGE_S + 1
    told = await fleet.watch.look()
    assert told["stems"][0]["workers"] == ["b"]
    assert (told["num_told"], told["num_workers"]) == (1, 2)
