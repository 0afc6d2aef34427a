from __future__ import annotations

from cache.records import WorkerMember
from cache.types import Epoch, WorkerId
from server.workers.client import WorkerLost
from server.workers.prefixes import fleet_prefixes, merged
from worker.wire import PrefixReport, PrefixUse


def report(worker_id: str, *uses: PrefixUse, model: str = "m") -> PrefixReport:
    return PrefixReport(worker_id, "e", model, 16, 50, uses)


SYSTEM, CHAT = ("00", "aa"), ("00", "aa", "bb")


def test_equal_prefixes_of_several_workers_are_one() -> None:
    reports = [
        report("a", PrefixUse(SYSTEM, 10, 1, 3, 2.0), PrefixUse(CHAT, 100, 0, 1, 5.0)),
        report("b", PrefixUse(SYSTEM, 10, 2, 4, 1.0)),
        report("c", PrefixUse(SYSTEM, 10, 0, 1, 0.0), model="another"),
    ]
    chat, system, other = merged(reports, 10)
    assert (chat.hash, chat.path, chat.num_tokens, chat.workers) == ("bb", CHAT, 1600, ("a",))
    assert (system.num_hits, system.num_references, system.idle_s, system.workers) == (7, 3, 1.0, ("b", "a"))
    assert (other.model, other.num_hits) == ("another", 1)
    assert merged(reports, 1) == (chat,)


async def test_a_worker_without_an_answer_is_named() -> None:
    async def ask(url: str, limit: int) -> PrefixReport:
        if url == "http://b:1":
            raise WorkerLost("it is away")
        return report("a", PrefixUse(SYSTEM, 10, 1, 3, 2.0))

    members = [
        WorkerMember(WorkerId(name), Epoch("e"), f"http://{name}:1", "m", "n", "cpu", 16, 100, 1) for name in "ab"
    ]
    found = await fleet_prefixes(members, ask, 5)
    assert len(found.prefixes) == 1
    assert found.num_cached_blocks == {"a": 50}
    assert found.errors == {"b": "it is away"}
