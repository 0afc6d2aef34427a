"""Watches an engine: its counts, its process and its models.

A restart shows by the counts. In doubt, every fact that makes it this engine is read again (`facts.py`). The same
engine goes on; another one ends the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from worker.adapter.api import EngineApi, EngineLoad, EngineLostError, EngineRefusedError
from worker.adapter.facts import EngineIdentity
from worker.adapter.load import LoadAccount
from worker.contracts.engine import EngineDeadError

logger = logging.getLogger(__name__)

WATCH_S: Final = 1.0
"""Interval between two counts. A restart is noticed within twice this time."""
PROBE_S: Final = 1.5
"""An engine that takes longer to return its counts is slow: gateways prefer others."""
LIST_LORAS_S: Final = 2.0
"""Interval between two lists of its models, with the LoRA adapters."""
LOST_AFTER: Final = 3
"""Failed calls in a row, without a token, until the engine is lost. If its port is closed, it is lost at once."""
BYPASS_AFTER: Final = 3
"""Counts in a row with more requests than this adapter has sent, until it warns."""
WARN_AGAIN_S: Final = 60.0


class EngineWatch:
    """Decides whether the engine can serve. Owned by the event loop."""

    def __init__(
        self,
        api: EngineApi,
        identity: EngineIdentity | None,
        account: LoadAccount,
        *,
        on_restart: Callable[[], object],
        on_gone: Callable[[], object],
        on_loras: Callable[[Sequence[str]], object],
        on_change: Callable[[], object],
        on_replaced: Callable[[EngineDeadError], object],
    ) -> None:
        """`identity`: the facts that the worker has promised; None: they are never read again.

        `on_restart`: another process of the engine answers. `on_gone`: none does. `on_loras`: the LoRA adapters listed.
        `on_change`: the counts, or whether it can serve. `on_replaced`: another engine answers, so the worker must end.
        """
        self.counts = None if identity is None else identity.counts
        """The engine's counts as last read."""
        self.problem: str | None = None
        """Why the engine cannot serve, or None."""
        self.is_slow = False
        """The last call failed or timed out."""
        self._api = api
        self._identity = identity
        self._account = account
        self._on_restart = on_restart
        self._on_gone = on_gone
        self._on_loras = on_loras
        self._on_change = on_change
        self._on_replaced = on_replaced
        self._num_doubts = 0
        self._is_sure = asyncio.Event()
        """Nothing indicates that the engine is not the one of `identity`."""
        self._is_sure.set()
        self._confirmed_s = -1.0
        """Connections made before this time lead to that engine."""
        self._counting = asyncio.Lock()
        self._wake = asyncio.Event()
        self._num_bypassing = 0
        self._warned_s = 0.0

    async def run(self, is_silent_since: Callable[[float], bool]) -> None:
        """Ask the engine for its counts and models until cancelled, and for its facts in doubt.

        `is_silent_since(time)`: no request has got a token since then.
        """
        listed_s = 0.0
        num_failed, answered_s = 0, time.monotonic()
        while True:
            self._wake.clear()
            try:
                await self._probe()
                if time.monotonic() - listed_s >= LIST_LORAS_S:
                    listed_s = time.monotonic()
                    await self._list_models()
                if not self._is_sure.is_set():
                    await self._settle()
                num_failed, answered_s = 0, time.monotonic()
                self._set_slow(False)
            except (EngineLostError, EngineRefusedError) as error:
                num_failed += 1
                self._set_slow(True)
                is_gone = isinstance(error, EngineLostError) and error.gone
                if is_gone or (num_failed >= LOST_AFTER and is_silent_since(answered_s)):
                    self._mark_lost(str(error), is_gone)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), WATCH_S)

    async def confirm(self) -> None:
        """Wait until the engine at the end of each connection so far is known to be the same. Raises EngineLostError.

        A process keeps its connections, so connections made before a confirmed time need no check.
        """
        if self._identity is None:
            return
        needed_s = self._api.connected_s
        while self._confirmed_s < needed_s or not self._is_sure.is_set():
            await self._is_sure.wait()
            if self._identity.counts.started_s != 0.0:
                await self._count(needed_s)
            else:  # its counts do not identify the process
                await self._settle(needed_s)

    def doubt(self, why: str) -> None:
        """Hold back tokens of new connections, and refuse requests, until the facts have been read again."""
        if self._identity is None:
            return
        self._num_doubts += 1
        self.problem = self.problem or f"{why}: its facts are read again"
        if self._is_sure.is_set():
            self._is_sure.clear()
            self._wake.set()
        self._on_change()

    async def _probe(self) -> None:
        """Count within a deadline. Raises EngineLostError, EngineRefusedError."""
        try:
            async with asyncio.timeout(PROBE_S):
                await self._count()
        except TimeoutError as error:
            raise EngineLostError(f"no answer within {PROBE_S:g} s") from error

    async def _count(self, needed_s: float = math.inf) -> None:
        """Read the counts, unless the engine was confirmed after `needed_s`. Notice a restart."""
        async with self._counting:
            if self._confirmed_s >= needed_s:
                return
            begun_s = time.monotonic()
            counts = await self._api.load()
            before, self.counts = self.counts, counts
            if before is not None and _has_restarted(before, counts):
                self._on_restart()
            if self._is_sure.is_set():
                self._confirmed_s = begun_s
                self._recover()
        self._account.seed_rate(counts)
        self._warn_bypass(counts)
        self._on_change()

    async def _settle(self, needed_s: float = math.inf) -> None:
        """Read the facts, unless the engine was confirmed after `needed_s`. Another engine ends this worker."""
        assert self._identity is not None
        async with self._counting:
            if self._confirmed_s >= needed_s:
                return
            num_doubts, begun_s = self._num_doubts, time.monotonic()
            facts, counts = await self._identity.read(is_suspect=not self._is_sure.is_set())
            if changes := self._identity.facts.changes(facts):
                await self._end(changes)
            self._identity = replace(self._identity, counts=counts)
            if self._num_doubts == num_doubts and (self.counts is None or not _has_restarted(self.counts, counts)):
                self._confirmed_s = begun_s
                self._is_sure.set()
                self._recover()

    async def _end(self, changes: Sequence[str]) -> None:
        """Report that another engine answers, and wait until this worker is closed."""
        self.problem = f"this worker was started for another engine: {'; '.join(changes)}"
        self._is_sure.clear()
        logger.critical("%s. The worker exits, so that its supervisor starts it for the new engine", self.problem)
        self._on_replaced(EngineDeadError(self.problem))
        await asyncio.get_running_loop().create_future()

    async def _list_models(self) -> None:
        model = await self._api.model()
        if self._identity is not None and replace(model, loras=()) != self._identity.facts.model:
            self.doubt("the engine lists another model")
        else:
            self._on_loras(model.loras)

    def _set_slow(self, is_slow: bool) -> None:
        if is_slow != self.is_slow:
            self.is_slow = is_slow
            self._on_change()

    def _recover(self) -> None:
        if self.problem is not None:
            logger.warning("the engine answers again")
            self.problem = None
            self._on_change()

    def _mark_lost(self, why: str, is_gone: bool) -> None:
        """Mark the engine lost. If it is gone, its cache will be empty when it returns."""
        if self.problem is None:
            logger.error("the engine does not answer: %s", why)
        if is_gone and self.counts is not None:
            self.counts = None
            self._on_gone()
        self.problem = why
        self.doubt("the engine was lost")
        self._on_change()

    def _warn_bypass(self, counts: EngineLoad) -> None:
        """Warn about requests that bypass the gateway."""
        num_bypassing = counts.num_running + counts.num_waiting - self._account.num_open
        self._num_bypassing = self._num_bypassing + 1 if num_bypassing > 0 else 0
        if self._num_bypassing >= BYPASS_AFTER and time.monotonic() - self._warned_s > WARN_AGAIN_S:
            self._warned_s = time.monotonic()
            logger.warning(
                "%d requests bypass the gateway: the fleet's load estimates are too low."
                " Send all traffic through the gateway",
                num_bypassing,
            )


def _has_restarted(before: EngineLoad, now: EngineLoad) -> bool:
    """Return whether the counts are of two processes: another start time, another pool, or lower totals."""

    def process(counts: EngineLoad) -> tuple[float, int, int]:
        return counts.started_s, counts.num_blocks, counts.block_size

    return process(before) != process(now) or now.prefill_tokens < before.prefill_tokens
