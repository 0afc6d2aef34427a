"""FeedChanges of workers and requests, from snapshots of them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.ops.changes import MAX_CHANGES, SAME_S, FeedChanges

STATES = ("serving", "standby", "draining", "broken", "lost")


class Watched:
    """FeedChanges under a clock of the test."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.changes = FeedChanges(clock=lambda: self.now)

    def see(self, *workers: tuple[str, str], epoch: str = "1", **counts: int) -> list[dict[str, Any]]:
        rows = [{"worker": name, "model": "m", "epoch": epoch, "state": state, "reason": ""} for name, state in workers]
        self.changes.see(rows, {("refused", why): count for why, count in counts.items()})
        return rows

    def shown(self) -> list[tuple[str, str, int]]:
        return [(each["worker"] or each["why"], each["what"], each["count"]) for each in self.changes.recent]


def test_the_life_of_a_worker() -> None:
    seen = Watched()
    (row,) = seen.see(("w", "lost"))
    assert (row["state"], seen.shown()) == ("joining", [])
    seen.now += 1.0
    (row,) = seen.see(("w", "serving"))
    assert (row["since"], seen.shown()) == (1001.0, [("w", "joined", 1)])
    seen.now += 1.0
    (row,) = seen.see(("w", "lost"))
    assert (row["state"], row["since"]) == ("dead", 1002.0)
    seen.now += 1.0
    (row,) = seen.see(("w", "lost"))
    assert (row["state"], row["since"]) == ("dead", 1002.0), "it has not changed"
    seen.see(("w", "serving"), epoch="2")
    seen.see(("w", "broken"), epoch="2")
    seen.see(("w", "serving"), epoch="2")
    seen.see(("w", "draining"), epoch="2")
    (row,) = seen.see(("w", "lost"), epoch="2")
    assert row["state"] == "left"
    seen.see()
    words = [what for _, what, _ in seen.shown()]
    assert words == [
        *("joined", "died", "restarted", "breaker opened", "serves", "drains", "left"),
        "forgotten",
    ]


def test_a_purge_is_no_restart() -> None:
    """A worker begins a new epoch without a death, too."""
    seen = Watched()
    seen.see(("w", "serving"))
    seen.see(("w", "serving"), epoch="2")
    assert [what for _, what, _ in seen.shown()] == ["joined", "began a new epoch"]


def test_requests_of_one_kind_are_one_line_for_a_minute() -> None:
    seen = Watched()
    seen.see(queue_full=2)
    seen.now += SAME_S / 2
    seen.see(queue_full=5, worker_lost=1)
    assert seen.shown() == [("queue_full", "refused", 5), ("worker_lost", "refused", 1)]
    assert [each["last"] - each["at"] for each in seen.changes.recent] == [SAME_S / 2, 0.0]
    seen.now += SAME_S
    seen.see(queue_full=6, worker_lost=1)
    assert seen.shown()[-1] == ("queue_full", "refused", 1)


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from("abc"), st.sampled_from(STATES)), st.sampled_from("12"), st.integers(0, 3)
        )
    )
)
def test_no_request_is_lost_or_counted_twice(snapshots: list[tuple[dict[str, str], str, int]]) -> None:
    """And no worker dies that has not served."""
    seen, count, served = Watched(), 0, set[str]()
    for workers, epoch, more in snapshots:
        count += more
        seen.now += 10.0
        rows = seen.see(*workers.items(), epoch=epoch, full=count)
        served &= {row["worker"] for row in rows}
        for row in rows:
            assert row["state"] != "lost"
            assert row["state"] != "dead" or row["worker"] in served
            assert row["since"] <= seen.now
        served |= {row["worker"] for row in rows if row["state"] not in ("joining", "dead")}
    if len(seen.changes.recent) < MAX_CHANGES:
        assert sum(each["count"] for each in seen.changes.recent if each["what"] == "refused") == count
