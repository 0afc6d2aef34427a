"""The chains of an engine that exchanges no blocks: prompts, which a worker that joins computes with one token each.

A prompt is computed under the salt that it had at the peer, so tenants stay apart. Requests come first: a prefill waits
until the engine is idle, and a request that comes ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Final

import msgspec

from cache.hashing import decode_tokens
from cache.records import WorkerMember
from worker.adapter.api import EngineApi
from worker.adapter.blocks import EngineBlocks
from worker.adapter.facts import probe
from worker.adapter.load import LoadAccount
from worker.adapter.recent_prompts import RecentPrompts
from worker.adapter.watch import EngineWatch
from worker.contracts.exchange import ChainsWanted, Handover, OfferedChain
from worker.kv_transfer.peers import ChainClient
from worker.kv_transfer.warm_start import POOL_SHARE
from worker.wire import Failed, GenerateRequest

logger = logging.getLogger(__name__)

_IDLE_POLL_S: Final = 0.05


class PromptChains:
    """`worker.contracts.exchange.ChainExchange` over an `EngineApi`. Owned by the event loop."""

    def __init__(
        self,
        api: EngineApi,
        blocks: EngineBlocks,
        account: LoadAccount,
        watch: EngineWatch,
        peers: ChainClient,
        member: WorkerMember,
        refusal: Callable[[GenerateRequest], Failed | None],
    ) -> None:
        """`refusal` returns why the engine cannot serve a request, or None."""
        self.layout = member.namespace
        self.prompts = RecentPrompts(member.block_size)
        """The prompts that the engine has computed since its cache was last empty."""
        self._api = api
        self._blocks = blocks
        self._account = account
        self._peers = peers
        self._block_size = member.block_size
        self._watch = watch
        self._refusal = refusal
        self._adoptions: set[asyncio.Task[int]] = set()
        self._num_prefills = 0
        """Those at the engine."""

    @property
    def num_blocks(self) -> int:
        counts = self._watch.counts
        return 0 if counts is None else counts.num_blocks * counts.block_size // self._block_size

    def give_way(self) -> None:
        """End all prefills of prompts of peers, as a request has come."""
        for adoption in self._adoptions:
            adoption.cancel()

    async def latest_chains(self, max_blocks: int) -> list[OfferedChain]:
        return self.prompts.latest(max_blocks)

    def ask_chains(self, url: str, wanted: ChainsWanted, timeout_s: float) -> Handover:
        return self._peers.ask_chains(url, wanted, timeout_s)

    async def adopt(self, url: str, epoch: str, chain: OfferedChain) -> int:
        """Compute a prompt in a task of its own, which `give_way` cancels. Return the blocks that were missing."""
        adoption = asyncio.current_task()
        assert adoption is not None
        self._adoptions.add(adoption)
        try:
            request = msgspec.structs.replace(
                probe(decode_tokens(chain.token_ids), chain.root, 1), adapter=chain.adapter
            )
            hashes, num_tokens = chain.block_hashes(), len(request.prompt_ids)
            num_missing = num_tokens - self._blocks.num_matched_tokens(hashes, num_tokens + 1)
            if self._refusal(request) is None and (not num_missing or num_missing <= self._room()):
                if num_missing:
                    await self._wait_idle()
                    await self._prefill(request)
                self.prompts.note(request, hashes, is_latest=False)  # for the next worker that joins
                return num_missing // self._block_size
        except Exception as error:  # the next request with this prompt computes it
            logger.warning("a prompt of a peer was not computed: %s: %s", type(error).__name__, error)
        finally:
            self._adoptions.remove(adoption)
        return 0

    def _room(self) -> float:
        """Return the tokens up to the share of the pool that a warm start may fill."""
        counts = self._watch.counts
        if counts is None:
            return 0.0
        return (POOL_SHARE * counts.num_blocks - self._blocks.tree.num_held) * counts.block_size

    async def _wait_idle(self) -> None:
        """Wait until the engine has no requests, also of others than this adapter."""
        while True:
            counts = await self._api.load()
            if max(self._account.num_open, counts.num_running + counts.num_waiting) <= self._num_prefills:
                return
            await asyncio.sleep(_IDLE_POLL_S)

    async def _prefill(self, request: GenerateRequest) -> None:
        self._num_prefills += 1
        self._account.num_open += 1
        try:
            stream = self._api.generate(request, request.choices[0], f"warm-{secrets.token_hex(8)}")
            async with contextlib.aclosing(stream):  # type: ignore[type-var]
                async for _ in stream:
                    pass
        finally:
            self._num_prefills -= 1
            self._account.num_open -= 1
