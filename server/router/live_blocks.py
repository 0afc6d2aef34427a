"""The blocks of live requests at each worker: they hold room, and are cached there once computed.

A radix tree over block hashes. A hash names all blocks before it, so two prompts share a node's blocks up to one
position. It is searched by halves. A request costs a step for each node on its path, not for each block.

    node    blocks `start` to `end` of a prompt, that of all its requests
    there   the node's requests at one worker: live ones, and ended ones whose blocks the index does not have yet
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Final, NamedTuple

from cache.records import WorkerMember
from cache.types import BlockHash, WorkerIncarnation
from server.router.load_tracker import TrackedRequest, WorkerLoadEstimate

PUBLISH_DELAY_S: Final = 0.3  # six of the publisher's intervals: the index has a prefill's blocks after it


@dataclass(slots=True, eq=False)
class _There:
    computed_by: TrackedRequest
    """The first to come of those that have not failed."""
    requests: dict[TrackedRequest, None] = field(default_factory=dict)
    num_live: int = 0


@dataclass(slots=True, eq=False)
class _Node:
    hashes: Sequence[BlockHash]
    """Those of a prompt with this node's blocks."""
    start: int
    end: int
    children: dict[BlockHash, _Node] = field(default_factory=dict)
    """By their first block."""
    there: dict[WorkerIncarnation, _There] = field(default_factory=dict)
    """The worker that got the latest request last."""

    def split(self, at: int) -> None:
        """End this node before block `at`. Its child has the rest."""
        there = {key: _There(each.computed_by, each.requests.copy(), each.num_live) for key, each in self.there.items()}
        self.children = {self.hashes[at]: _Node(self.hashes, at, self.end, self.children, there)}
        self.end = at


Path = Sequence[tuple[_Node, int]]
"""The nodes that begin like a prompt, and the end of what each shares with it."""


class OwnBlocks(NamedTuple):
    """Blocks of a prompt at one worker, according to this gateway's own requests."""

    num_live: int
    """Blocks of live requests."""
    num_cached: int
    """Blocks that are there, or are when `ready_s` has passed."""
    ready_s: float


NO_BLOCKS: Final = OwnBlocks(0, 0, 0.0)


class LiveBlocks:
    """Owned by one gateway's scorer. The requests bound it."""

    def __init__(self, clock: Callable[[], float], publish_delay_s: float, *, count_pending: bool = True) -> None:
        """`publish_delay_s`: this time after a prefill the index has its blocks.

        `count_pending`: blocks of requests just routed count as cached.
        """
        self._clock = clock
        self._publish_delay_s = publish_delay_s
        self._count_pending = count_pending
        self._roots: dict[BlockHash, _Node] = {}
        self._ended: list[tuple[float, int, WorkerIncarnation, TrackedRequest, Sequence[BlockHash]]] = []
        """A heap by the time at which the index has the blocks."""
        self._numbers = count()

    def path(self, hashes: Sequence[BlockHash]) -> Path:
        """Return where the prompt is in the tree, until the next call of `opened` or `closed`."""
        while self._ended and self._ended[0][0] <= self._clock():
            self._remove(*heappop(self._ended)[2:])
        return self._path(hashes)

    def _path(self, hashes: Sequence[BlockHash]) -> list[tuple[_Node, int]]:
        path, nodes, end = [], self._roots, 0
        while end < len(hashes) and (node := nodes.get(hashes[end])) is not None:
            end = _shared_end(node, hashes)
            path.append((node, end))
            if end < node.end:
                break
            nodes = node.children
        return path

    def own_blocks(self, member: WorkerMember, path: Path, estimate: WorkerLoadEstimate) -> OwnBlocks:
        """Return what own requests have of a prompt at a worker."""
        incarnation, num_cached = (member.worker_id, member.epoch), 0
        counts = self._count_pending and not member.ends  # else where a hit in own blocks may stop is not known
        for node, end in reversed(path):
            if (there := node.there.get(incarnation)) is None:
                continue
            if counts and not num_cached:
                num_cached = end
            if there.num_live:
                return OwnBlocks(end, num_cached, estimate.ready_s(there.computed_by, self._clock()) if counts else 0.0)
        return OwnBlocks(0, num_cached, 0.0) if num_cached else NO_BLOCKS

    def holders(self, path: Path, limit: int) -> list[WorkerIncarnation]:
        """Return where the longest prefixes are; of equal ones, where the latest requests went."""
        found: dict[WorkerIncarnation, None] = {}
        for node, _ in reversed(path):
            for incarnation in reversed(node.there):
                found[incarnation] = None
                if len(found) == limit:
                    return [*found]
        return [*found]

    def opened(self, incarnation: WorkerIncarnation, request: TrackedRequest, hashes: Sequence[BlockHash]) -> None:
        """Count a request's blocks as live."""
        path = self._path(hashes)
        end, nodes = 0, self._roots
        if path:
            node, end = path[-1]
            if end < node.end:
                node.split(end)
            nodes = node.children
        if end < len(hashes):
            node = nodes[hashes[end]] = _Node(hashes, end, len(hashes))
            path.append((node, node.end))
        for node, _ in path:
            there = node.there.pop(incarnation, None) or _There(request)
            node.there[incarnation] = there
            there.requests[request] = None
            there.num_live += 1

    def closed(self, incarnation: WorkerIncarnation, request: TrackedRequest, hashes: Sequence[BlockHash]) -> int:
        """End a request. Return how many of its blocks no live request has there any more.

        Without a first token its blocks stop counting as cached.
        """
        num_gone = 0
        for node, _ in self._path(hashes):
            there = node.there[incarnation]
            there.num_live -= 1
            if not there.num_live:
                num_gone += node.end - node.start
        published_s = -1.0 if request.first_token_s is None else request.first_token_s + self._publish_delay_s
        if published_s > self._clock():
            heappush(self._ended, (published_s, next(self._numbers), incarnation, request, hashes))
        else:
            self._remove(incarnation, request, hashes)
        return num_gone

    def _remove(self, incarnation: WorkerIncarnation, request: TrackedRequest, hashes: Sequence[BlockHash]) -> None:
        nodes = self._roots
        for node, _ in self._path(hashes):
            there = node.there[incarnation]
            del there.requests[request]
            if there.requests:
                if there.computed_by is request and request.first_token_s is None:
                    there.computed_by = next(iter(there.requests))  # it computes them now
            else:
                del node.there[incarnation]
                if not node.there:
                    del nodes[hashes[node.start]]
            nodes = node.children


def _shared_end(node: _Node, hashes: Sequence[BlockHash]) -> int:
    """Return the end of the blocks that the node and a prompt share."""
    end = min(node.end, len(hashes))
    if hashes[end - 1] == node.hashes[end - 1]:
        return end
    return bisect_left(range(end), True, node.start + 1, key=lambda at: hashes[at] != node.hashes[at])
