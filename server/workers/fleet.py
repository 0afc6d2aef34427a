"""The workers of this gateway, and which of them can be sent a request now.

They come from the registry and from `--workers`. A worker with a lease in the registry is a candidate with the match
from the index. A worker without a lease is polled: while it answers, it is a candidate with match 0. So an empty
registry removes no worker, and a forged entry displaces none.

    live    it has a lease, or it has answered. After one missed poll, requests prefer others
    silent  it has missed two polls: it gets no request, and requests that need it wait
    gone    another process or none is at its address, or it drained before it fell silent

Only polls change this, so time in which the gateway itself stood still makes no worker silent.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from cache.records import Candidate, PrefixIndex, WorkerLoad, WorkerMember, WorkerState
from cache.types import BlockHash, Epoch, WorkerId
from server.workers.connection import WorkerAbsent
from server.workers.networks import MemberVerifier, WorkerNetworks, check_target, target_urls
from worker.common.capabilities import adapter_names

logger = logging.getLogger(__name__)

FetchState = Callable[[str], Coroutine[Any, Any, WorkerState]]
"""Asks the worker at a URL for its state: `WorkerClient.state`."""
POLL_S: Final = 1.0  # the registry changes by leases of seconds
MAX_POLL_S: Final = 10.0  # between two polls with timeouts: a longer time is one in which the gateway stood still
FIRST_POLL_S: Final = 0.05  # a gateway that starts is ready as soon as a worker is
FORGET_S: Final = 600.0  # a worker that restarts is back within minutes
FIRST_BREAK_S: Final = 1.0  # a worker that failed once is tried again soon
MAX_BREAK_S: Final = 30.0  # bounds how late a worker that is back is used
MAX_MISSED: Final = 2
"""A worker is silent after this many polls in a row without an answer."""
MAX_CONTRADICTED: Final = 16  # bounds the memory for a worker that restarts again and again
MAX_ASKING: Final = 64
"""Workers polled at a time: each takes a connection."""


class RegistryIndex(PrefixIndex, Protocol):
    """The shared index, as the fleet needs it."""

    def members(self) -> list[WorkerMember]: ...


class NoIndex:
    """Replaces the index in a gateway without Redis, which has only `--workers`."""

    async def lookup(
        self, hashes: Sequence[BlockHash], model: str | None = None, num_tokens: int = 0
    ) -> list[Candidate] | None:
        return None

    def members(self) -> list[WorkerMember]:
        return []


@dataclass(slots=True, eq=False)
class FleetWorker:
    """One worker and its state."""

    member: WorkerMember
    reported_s: float
    """When `load` was written."""
    load: WorkerLoad = field(default_factory=WorkerLoad)
    leased_s: float = -math.inf
    num_missed: int = 0
    """Polls in a row without an answer."""
    silent_s: float = 0.0
    """The time of these polls. A time in which this gateway stood still does not count."""
    is_gone: bool = False
    """It is not at its address, or drained before it fell silent. A lease does not change this, an answer does."""
    num_failures: int = 0
    """Requests that failed there since it last produced a token."""
    broken_until_s: float = -math.inf
    """The circuit breaker is open until then."""
    contradicted: list[Epoch] = field(default_factory=list)
    """Epochs from the registry that the worker itself has contradicted."""

    @property
    def is_live(self) -> bool:
        return not self.is_gone and self.num_missed < MAX_MISSED

    def missed(self, passed_s: float, *, is_gone: bool) -> None:
        """Record a poll without its answer, `passed_s` after the one before."""
        self.num_missed += 1
        self.silent_s += passed_s
        self.is_gone |= is_gone or (self.load.draining and not self.is_live)

    def answered(self) -> None:
        self.num_missed, self.silent_s, self.is_gone = 0, 0.0, False


class Fleet:
    """The known workers. Owned by the gateway's event loop. Only `poll` waits for the registry and the workers."""

    def __init__(
        self,
        index: RegistryIndex,
        fetch_state: FetchState,
        *,
        targets: Sequence[str] = (),
        cluster_secret: bytes = b"",
        networks: WorkerNetworks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`targets`: base URLs of workers, or dns:NAME:PORT for every address of a name."""
        self._index = index
        self._fetch_state = fetch_state
        for target in targets:
            check_target(target)
        self._targets = targets
        self._cluster_secret = cluster_secret
        self._networks = networks or WorkerNetworks()
        self._clock = clock
        self._workers: dict[WorkerId, FleetWorker] = {}
        self._verifier = MemberVerifier(cluster_secret, self._networks)
        self._unreachable: dict[str, tuple[str, bool]] = {}
        """Addresses that did not answer the last poll: why, and whether certainly no worker is there."""
        self._silent_targets: set[str] = set()
        """Addresses of `targets` that have never answered."""
        self._answered: set[str] = set()
        self._has_looked = False
        """Targets were polled, and the registry, if there is one, was read."""
        self.index_answered_s = -math.inf
        """When a poll last read the registry."""
        self._polled_s = -math.inf
        self._wake = asyncio.Event()
        self._asking = asyncio.Semaphore(MAX_ASKING)

    def candidates(
        self, model: str, found: Sequence[Candidate] | None, namespace: str | None = None
    ) -> list[Candidate]:
        """Return the candidates of a lookup, and every other live worker of the model, with match 0.

        `namespace`: only workers with this one; None: all.
        """
        now_s = self._clock()
        candidates, leased = [], set()
        accepts, lease = self._verifier.accepts, self._lease
        for candidate in found or ():
            member = candidate.member
            if accepts(member) and lease(candidate, now_s):
                leased.add(member.worker_id)
                if member.model == model and namespace in (None, member.namespace):
                    candidates.append(candidate)
        if len(leased) == len(self._workers):
            return candidates
        others = [w for worker_id, w in self._workers.items() if w.is_live and worker_id not in leased]
        return candidates + self._unleased(others, model, namespace, now_s)

    def silent(self, model: str, namespace: str | None) -> list[Candidate]:
        """Return the workers of a namespace that may come back, with their last reports."""
        silent = [worker for worker in self._workers.values() if not (worker.is_live or worker.is_gone)]
        return self._unleased(silent, model, namespace, self._clock())

    def _unleased(
        self, workers: Sequence[FleetWorker], model: str, namespace: str | None, now_s: float
    ) -> list[Candidate]:
        return [
            Candidate(worker.member, worker.load, 0, now_s - max(worker.reported_s, 0.0))
            for worker in workers
            if worker.member.model == model
            and namespace in (None, worker.member.namespace)
            and self._verifier.accepts(worker.member)
        ]

    def broken(self) -> set[WorkerId]:
        """Return the workers whose circuit breaker is open: requests failed there recently, or the last poll did."""
        now_s, workers = self._clock(), self._workers.items()
        return {worker_id for worker_id, worker in workers if worker.num_missed or worker.broken_until_s > now_s}

    def report_failure(self, worker_id: WorkerId) -> None:
        """Open the breaker, for longer each time: the worker could not be reached, or was lost."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        worker.num_failures += 1
        break_s = FIRST_BREAK_S * 2.0 ** min(worker.num_failures - 1, 10)
        worker.broken_until_s = self._clock() + min(MAX_BREAK_S, break_s)
        self._wake.set()

    def report_wrong_epoch(self, member: WorkerMember) -> None:
        """Open the breaker and poll the worker: it has refused the epoch that this gateway has."""
        worker = self._workers.get(member.worker_id)
        if worker is not None and worker.member.epoch == member.epoch:
            worker.broken_until_s = self._clock() + FIRST_BREAK_S
            self._wake.set()

    def report_success(self, worker_id: WorkerId) -> None:
        """Close the breaker: the worker has produced a token."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.num_failures:
            worker.num_failures = 0
            worker.broken_until_s = -math.inf

    def workers(self, model: str | None = None) -> list[WorkerMember]:
        """Return the known workers, live ones first."""
        workers = [worker for worker in self._workers.values() if model in (None, worker.member.model)]
        workers.sort(key=lambda worker: not worker.is_live)
        return [worker.member for worker in workers]

    def known(self) -> list[tuple[WorkerMember, bool | None]]:
        """Return the workers that have not left; True for each that could be sent a request, None for a lost one."""
        workers = [w for w in self._workers.values() if not (w.is_gone and w.load.draining)]
        return [(w.member, None if w.is_gone else w.is_live and not w.load.draining) for w in workers]

    def longest_context(self, model: str, namespace: str | None, needs: frozenset[str]) -> int:
        """Return the longest context of the known workers that can serve these needs, if they are back."""
        known = [each for each, _ in self.known() if each.model == model and namespace in (None, each.namespace)]
        return max([each.max_model_len for each in known if needs.issubset(each.capabilities)], default=0)

    def live_workers(self, model: str | None = None) -> list[WorkerMember]:
        """Return the workers that could be sent a request."""
        return [member for member, is_ready in self.known() if is_ready and model in (None, member.model)]

    def may_have(self, name: str) -> bool:
        """Return False only if certainly no worker serves a model or an adapter of this name."""
        members = [worker.member for worker in self._workers.values()]
        members += [m for m in self._index.members() if not self._unreachable.get(m.url, ("", False))[1]]
        names = adapter_names([name])
        is_known = any(name == member.model or names[0] in member.capabilities for member in members)
        return is_known or bool(self._silent_targets) or not self._has_looked

    def refused(self) -> list[tuple[str, WorkerMember | None, str]]:
        """Return the workers that this gateway does not take: URL, member if it is known, and reason."""
        refused = [(member.url, member, reason) for member, reason in self._verifier.refused.values()]
        known = {member.url.rstrip("/") for member in self.workers()}.union(url for url, _, _ in refused)
        silent = ((url, why) for url, (why, _) in self._unreachable.items() if url.rstrip("/") not in known)
        return refused + [(url, None, f"it does not answer: {why}") for url, why in silent]

    async def run(self) -> None:
        """Poll until cancelled, more often while the number of workers changes."""
        while True:
            num_before = len(self._workers)
            await self.poll()
            self._wake.clear()
            try:
                async with asyncio.timeout(POLL_S if len(self._workers) == num_before > 0 else FIRST_POLL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def poll(self) -> None:
        """Read the registry's leases, then poll all workers without a lease or with an open breaker."""
        found = await self._index.lookup([])
        now_s = self._clock()
        if found is not None:
            self.index_answered_s = now_s
        passed_s, self._polled_s = min(MAX_POLL_S, now_s - self._polled_s), now_s
        accepts = self._verifier.accepts
        for candidate in found or ():
            if accepts(candidate.member):
                self._lease(candidate, now_s)
        targets = set(await target_urls(self._targets, self._networks.scheme))
        urls = targets.copy()
        broken = self.broken()
        confirmed = {
            worker_id
            for worker_id, worker in self._workers.items()
            if worker.leased_s >= now_s and worker_id not in broken and not worker.is_gone
        }
        registered = self._index.members()
        members = [worker.member for worker in self._workers.values()]
        members += [member for member in registered if accepts(member)]
        urls.update(member.url for member in members if member.worker_id not in confirmed)
        self._unreachable = {url: error for url, error in self._unreachable.items() if url in urls}
        self._verifier.keep_refused({member.worker_id for member in registered}, targets)
        await asyncio.gather(*(self._ask(url, passed_s) for url in urls))
        self._answered &= targets
        self._answered |= targets - self._unreachable.keys()
        self._silent_targets = targets - self._answered
        self._has_looked = self._has_looked or found is not None or isinstance(self._index, NoIndex)
        self._forget()

    async def _ask(self, url: str, passed_s: float) -> None:
        """Ask the worker at `url` for its state, `passed_s` after the poll before."""
        epochs = {worker.member.worker_id: worker.member.epoch for worker in self._at(url)}
        try:
            async with self._asking:
                state = await self._fetch_state(url)
        except Exception as error:  # a URL from the registry may raise anything in a library
            why, is_gone = str(error) or type(error).__name__, _is_gone(error)
            for worker in self._at(url):
                worker.missed(passed_s, is_gone=is_gone)
            if url not in self._unreachable:
                logger.warning("worker at %s does not answer: %s", url, why)
            self._unreachable[url] = why, is_gone
            return
        self._unreachable.pop(url, None)
        now_s = self._clock()
        member = state.member
        for worker in self._at(url):
            if worker.member.worker_id != member.worker_id:
                worker.missed(passed_s, is_gone=True)  # another worker has its address
        if not self._verifier.accepts(member):
            self._workers.pop(member.worker_id, None)
            return
        worker = self._update(member, now_s, asked_for=epochs.get(member.worker_id))
        worker.answered()
        if worker.leased_s < now_s:
            worker.load, worker.reported_s = state.load, now_s

    def _at(self, url: str) -> list[FleetWorker]:
        return [worker for worker in self._workers.values() if worker.member.url.rstrip("/") == url.rstrip("/")]

    def _update(self, member: WorkerMember, now_s: float, *, asked_for: Epoch | None = None) -> FleetWorker:
        """Store `member` as the worker's. `asked_for`: the epoch that the gateway had when it polled the worker."""
        worker = self._workers.get(member.worker_id)
        if worker is None:
            logger.info("worker %s (%s) at %s", member.worker_id, member.model, member.url)
            worker = self._workers[member.worker_id] = FleetWorker(member, reported_s=now_s)
        elif worker.member != member:
            if asked_for == worker.member.epoch and asked_for != member.epoch:
                worker.contradicted = [*worker.contradicted[-MAX_CONTRADICTED:], asked_for]
            worker.member = member
            worker.load, worker.reported_s = WorkerLoad(), now_s
            worker.broken_until_s, worker.num_failures = -math.inf, 0
            worker.answered()
        return worker

    def _lease(self, candidate: Candidate, now_s: float) -> bool:
        """Apply a registry entry. Return False if the worker itself has contradicted it, or is gone."""
        member = candidate.member
        worker = self._workers.get(member.worker_id)
        if worker is None or worker.member is not member:
            if worker is not None and self._cluster_secret and _is_replayed(member, worker):
                return False
            worker = self._update(member, now_s)
            worker.member = member  # the index's own object, so that `is` succeeds next time
        worker.load, worker.reported_s = candidate.load, now_s - candidate.load_age_s
        if worker.is_gone:
            return False
        worker.leased_s = now_s
        return True

    def _forget(self) -> None:
        """Drop workers that left the registry and have had no lease and no answer for long."""
        registered = {member.worker_id for member in self._index.members()}
        for worker_id, worker in list(self._workers.items()):
            if worker_id not in registered and worker.silent_s > FORGET_S:
                del self._workers[worker_id]
                logger.info("worker %s is forgotten", worker_id)


def _is_replayed(member: WorkerMember, worker: FleetWorker) -> bool:
    """Return whether `member` is an old registry entry written again: the worker has left its epoch."""
    if member.epoch == worker.member.epoch:
        return False
    return member.epoch_started_ms < worker.member.epoch_started_ms or member.epoch in worker.contradicted


def _is_gone(error: Exception) -> bool:
    """Return whether a failed poll shows that no worker of this fleet is at the address."""
    cause = error.__cause__
    is_network = isinstance(cause, OSError) and not isinstance(cause, ConnectionRefusedError)
    return isinstance(error, WorkerAbsent) and not is_network
