"""The workers this gateway knows, and which of them can be sent a request now.

Known from the registry and from `--workers`; each also answers GET /state itself. The list only grows by what is
heard and shrinks by what workers themselves say or fail to say, so an empty registry empties nothing, and what somebody
else has written into it displaces nobody. A registry entry without a lease is an address to ask, no more.

    lease in the registry   direct answer    the worker is
    alive                   any              a candidate with the match that the index says
    lapsed or unread        healthy          a candidate with match 0
    lapsed or unread        failing          gone
    lapsed or unread        not asked yet    a candidate with match 0 for `grace_s` after it was last heard of
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import aiohttp

from cache.records import Candidate, PrefixIndex, WorkerLoad, WorkerMember, WorkerState
from cache.types import BlockHash, Epoch, WorkerId
from server.workers.client import WorkerLost, read_bounded
from server.workers.networks import WorkerNetworks
from server.workers.patience import patiently
from server.workers.targets import check_target, urls_of
from server.workers.verification import Vetting
from worker.wire import WireError, unpack

logger = logging.getLogger(__name__)

Fetch = Callable[[str], Coroutine[Any, Any, WorkerState]]
"""GET /state of a worker's base URL. Raises FetchError."""
_MAX_STATE_BYTES: Final = 256 * 1024
MAX_DENIED: Final = 16
MAX_ASKING: Final = 64
"""Workers that are asked at a time: each takes a connection."""


class FetchError(Exception):
    """The worker did not answer, or not with a state."""


class RegistryIndex(PrefixIndex, Protocol):
    """The shared index, as the fleet needs it."""

    def members(self) -> list[WorkerMember]: ...


class NoIndex:
    """For a gateway without Redis: it knows `--workers` alone, and routes by its own books and placements."""

    async def lookup(self, hashes: Sequence[BlockHash], model: str | None = None) -> list[Candidate] | None:
        return None

    def members(self) -> list[WorkerMember]:
        return []


@dataclass(frozen=True, slots=True)
class FleetSettings:
    workers: tuple[str, ...] = ()
    """Base URLs, or dns:NAME:PORT for every address of a name."""
    poll_s: float = 1.0
    fetch_timeout_s: float = 2.0
    grace_s: float = 5.0
    forget_s: float = 600.0
    first_break_s: float = 1.0
    max_break_s: float = 30.0
    cluster_secret: bytes = field(default=b"", repr=False)
    """A worker whose member is not signed with it is refused."""
    networks: WorkerNetworks = field(default_factory=WorkerNetworks)
    """Where workers may be."""


class _Known:
    """One worker and everything heard of it."""

    __slots__ = (
        "broken_until_s",
        "denied",
        "failed_s",
        "heard_s",
        "leased_s",
        "load",
        "load_s",
        "member",
        "num_failures",
        "ok_s",
    )

    def __init__(self, member: WorkerMember, now_s: float) -> None:
        self.member = member
        self.heard_s = now_s
        self.leased_s = -math.inf
        self.ok_s = -math.inf
        """The last direct answer."""
        self.failed_s = -math.inf
        """The last direct question without one."""
        self.load = WorkerLoad()
        self.load_s = now_s
        self.num_failures = 0
        self.broken_until_s = -math.inf
        self.denied: list[Epoch] = []
        """Epochs that the registry named and the worker itself has contradicted."""


class Fleet:
    """Owned by the gateway's event loop: `run()` asks, everything else only looks."""

    def __init__(
        self,
        index: RegistryIndex,
        fetch: Fetch,
        settings: FleetSettings | None = None,
        *,
        clock: Callable[[], float],
        namespaces: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`namespaces()` gives the namespace that each model's workers must announce, as far as it is known."""
        self._index = index
        self._fetch = fetch
        self._settings = settings or FleetSettings()
        for target in self._settings.workers:
            check_target(target)
        self._clock = clock
        self._namespaces = namespaces
        self._known: dict[WorkerId, _Known] = {}
        self._vetting = Vetting(self._settings.cluster_secret, self._settings.networks)
        self._unreachable: set[str] = set()
        self.index_answered_s = -math.inf
        """When a round last read the registry."""
        self.on_forgotten: Callable[[WorkerId], None] = lambda worker_id: None
        """Set by whoever keeps something for each worker: told of those that are gone for good."""
        self._wake = asyncio.Event()
        self._asking = asyncio.Semaphore(MAX_ASKING)

    # --- for the router ---------------------------------------------------------------------------------------------

    def candidates(self, model: str, found: Sequence[Candidate] | None) -> list[Candidate]:
        """What a lookup found, and beside it every other worker of the model that is not known to be gone."""
        now_s = self._clock()
        candidates = []
        leased = set()
        namespaces = self._namespaces()
        for candidate in found or ():
            if self._passes(candidate.member, namespaces) and self._lease(candidate, now_s):
                leased.add(candidate.member.worker_id)
                if candidate.member.model == model:
                    candidates.append(candidate)
        for worker_id, known in self._known.items():
            member = known.member
            if worker_id in leased or member.model != model or not self._live(known, now_s):
                continue
            if self._passes(member, namespaces):
                candidates.append(Candidate(member, known.load, 0, now_s - max(known.load_s, 0.0)))
        return candidates

    def broken(self, worker_id: WorkerId) -> bool:
        """Requests to it failed a moment ago."""
        known = self._known.get(worker_id)
        return known is not None and known.broken_until_s > self._clock()

    def report_failure(self, worker_id: WorkerId) -> None:
        """The HTTP side could not reach it, or lost it: leave it alone for a while, longer each time."""
        known = self._known.get(worker_id)
        if known is None:
            return
        known.num_failures += 1
        pause_s = self._settings.first_break_s * 2.0 ** min(known.num_failures - 1, 10)
        known.broken_until_s = self._clock() + min(self._settings.max_break_s, pause_s)
        self._wake.set()

    def report_wrong_epoch(self, member: WorkerMember) -> None:
        """The worker has refused the epoch that it is known with: ask it which it has, and use others meanwhile."""
        known = self._known.get(member.worker_id)
        if known is not None and known.member.epoch == member.epoch:
            known.broken_until_s = self._clock() + self._settings.first_break_s
            self._wake.set()

    def report_success(self, worker_id: WorkerId) -> None:
        """It has produced a token."""
        known = self._known.get(worker_id)
        if known is not None and known.num_failures:
            known.num_failures = 0
            known.broken_until_s = -math.inf

    def workers(self, model: str | None = None) -> list[WorkerMember]:
        """The workers known now, live ones first."""
        now_s = self._clock()
        known = [k for k in self._known.values() if model is None or k.member.model == model]
        known.sort(key=lambda k: not self._live(k, now_s))
        return [k.member for k in known]

    def live_workers(self, model: str | None = None) -> list[WorkerMember]:
        """Those that a request could be sent to."""
        now_s = self._clock()
        return [
            known.member
            for known in self._known.values()
            if (model is None or known.member.model == model) and self._live(known, now_s) and not known.load.draining
        ]

    # --- finding out ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look at the registry and ask workers directly, until cancelled."""
        while True:
            await self.poll()
            self._wake.clear()
            try:
                async with asyncio.timeout(self._settings.poll_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def poll(self) -> None:
        """One round: the registry's leases, then direct questions to all that the registry does not vouch for."""
        found = await self._index.lookup([])
        now_s = self._clock()
        if found is not None:
            self.index_answered_s = now_s
        namespaces = self._namespaces()
        for candidate in found or ():
            if self._passes(candidate.member, namespaces):
                self._lease(candidate, now_s)
        urls = set(await urls_of(self._settings.workers, self._settings.networks.scheme))
        urls.update(
            known.member.url for known in self._known.values() if known.leased_s < now_s or known.broken_until_s > now_s
        )
        urls.update(
            member.url
            for member in self._index.members()
            if self._passes(member, namespaces) and not self._is_vouched_for(member, now_s)
        )
        self._unreachable &= urls
        await asyncio.gather(*(self._ask(url) for url in urls))
        self._forget()

    def _is_vouched_for(self, member: WorkerMember, now_s: float) -> bool:
        """Whether the registry gives its worker a lease, and nothing speaks against that."""
        known = self._known.get(member.worker_id)
        return known is not None and known.leased_s >= now_s and known.broken_until_s <= now_s

    async def _ask(self, url: str) -> None:
        epochs = {known.member.worker_id: known.member.epoch for known in self._at(url)}
        try:
            async with self._asking:
                state = await patiently(self._fetch(url), self._settings.fetch_timeout_s)
        except Exception as error:  # also what a library raises at a URL from the registry
            now_s = self._clock()
            for known in self._at(url):
                known.failed_s = now_s
            if url not in self._unreachable:
                self._unreachable.add(url)
                logger.warning("worker at %s does not answer: %s", url, str(error) or type(error).__name__)
            return
        self._unreachable.discard(url)
        now_s = self._clock()
        member = state.member
        for known in self._at(url):
            if known.member.worker_id != member.worker_id:
                known.failed_s = now_s  # somebody else lives there now
        if not self._passes(member, self._namespaces()):
            self._known.pop(member.worker_id, None)
            return
        known = self._hear(member, now_s, denied=epochs.get(member.worker_id))
        known.ok_s = now_s
        if known.leased_s < now_s:
            known.load, known.load_s = state.load, now_s

    def _at(self, url: str) -> Iterable[_Known]:
        return [known for known in self._known.values() if known.member.url.rstrip("/") == url.rstrip("/")]

    def _hear(self, member: WorkerMember, now_s: float, *, denied: Epoch | None = None) -> _Known:
        """`member` is the worker from now on. `denied`: the epoch that it was asked about, if it is no more."""
        known = self._known.get(member.worker_id)
        if known is None:
            logger.info("worker %s (%s) at %s", member.worker_id, member.model, member.url)
            known = self._known[member.worker_id] = _Known(member, now_s)
        elif known.member != member:
            if denied == known.member.epoch != member.epoch:
                known.denied = [*known.denied[-MAX_DENIED:], denied]
            known.member = member
            known.load, known.load_s = WorkerLoad(), now_s
            known.broken_until_s, known.num_failures = -math.inf, 0
        return known

    def _lease(self, candidate: Candidate, now_s: float) -> bool:
        """Take what the registry says of a worker. False: the worker itself has said otherwise since."""
        member = candidate.member
        known = self._known.get(member.worker_id)
        if known is None or known.member is not member:
            if known is not None and self._settings.cluster_secret and _has_passed(member, known):
                return False
            known = self._hear(member, now_s)
            known.member = member
        known.leased_s = known.heard_s = now_s
        known.load, known.load_s = candidate.load, now_s - candidate.load_age_s
        return True

    def _live(self, known: _Known, now_s: float) -> bool:
        """Whether a worker without a lease in hand may still be a candidate."""
        if known.ok_s > known.failed_s and now_s - known.ok_s <= 3 * self._settings.poll_s:
            return True
        if known.failed_s > max(known.ok_s, known.leased_s):
            return False
        return now_s - max(known.heard_s, known.ok_s) <= self._settings.grace_s

    def _forget(self) -> None:
        now_s = self._clock()
        registered = {member.worker_id for member in self._index.members()}
        for worker_id, known in list(self._known.items()):
            last_s = max(known.heard_s, known.leased_s, known.ok_s)
            if worker_id not in registered and now_s - last_s > self._settings.forget_s:
                del self._known[worker_id]
                self.on_forgotten(worker_id)
                logger.info("worker %s is forgotten", worker_id)

    def _passes(self, member: WorkerMember, namespaces: Mapping[str, str]) -> bool:
        return self._vetting.passes(member, namespaces.get(member.model))


def _has_passed(member: WorkerMember, known: _Known) -> bool:
    """Whether the worker has left the epoch of `member`, as that of a replayed registry entry."""
    if member.epoch == known.member.epoch:
        return False
    return member.epoch_started_ms < known.member.epoch_started_ms or member.epoch in known.denied


def http_fetch(session: aiohttp.ClientSession) -> Fetch:
    """Asks workers over `session`."""

    async def fetch(url: str) -> WorkerState:
        try:
            async with session.get(url + "/state", allow_redirects=False) as response:
                body = await read_bounded(response.content, _MAX_STATE_BYTES)
                if response.status != 200:
                    raise FetchError(f"status {response.status}")
        except (aiohttp.ClientError, OSError, ValueError, WorkerLost) as error:
            raise FetchError(str(error) or type(error).__name__) from error
        try:
            return unpack(body, WorkerState)
        except WireError as error:
            raise FetchError(str(error)) from error

    return fetch
