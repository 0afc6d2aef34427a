from __future__ import annotations

from server.http.protocol import ConnectionLimit


class Connection:
    def __init__(self, limit: ConnectionLimit) -> None:
        self._limit = limit
        self.dropped = False
        self.admitted = limit.open(self)

    def drop(self) -> None:
        self.dropped = True
        self._limit.close(self)


def test_who_has_waited_longest_for_a_request_makes_room() -> None:
    limit = ConnectionLimit(3)
    asking, idle, newer = (Connection(limit) for _ in range(3))
    limit.begin(asking)
    latest = Connection(limit)
    assert latest.admitted
    assert [connection.dropped for connection in (asking, idle, newer, latest)] == [False, True, False, False]
    limit.begin(newer)
    limit.begin(latest)
    assert not Connection(limit).admitted, "all are at work"


def test_who_is_answered_waits_again_and_who_leaves_makes_room() -> None:
    limit = ConnectionLimit(2)
    first, second = Connection(limit), Connection(limit)
    limit.begin(first)
    limit.begin(second)
    limit.end(second)
    third = Connection(limit)
    assert third.admitted
    assert (first.dropped, second.dropped) == (False, True)
    limit.close(first)
    fourth = Connection(limit)
    assert fourth.admitted
    assert not third.dropped, "there was room"
