"""One data-parallel rank: a queue, prefills one after the other, and a model that only hashes."""

from __future__ import annotations

import argparse
import asyncio
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

from tests.fake_engine.events import Events
from tests.fake_engine.pool import Pool


class Rank:
    """One data-parallel rank."""

    def __init__(self, number: int, args: argparse.Namespace) -> None:
        self.args = args
        self.pool = Pool(args.num_blocks, args.block_size)
        if args.no_prefix_caching:
            self.pool.chain = lambda *prompt: []  # type: ignore[method-assign]
        self.slots = asyncio.Semaphore(args.max_num_seqs)
        self.prefill = asyncio.Lock()
        self.num_running = self.num_waiting = 0
        self.num_aborted = 0
        self.cached_tokens = 0
        self.num_prefills = self.prefill_tokens = 0
        self.prefill_s = 0.0
        self.events: Events | None = None
        if args.events:
            endpoint, replay = _of_rank(args.events, number), args.replay and _of_rank(args.replay, number)
            self.events = Events(endpoint, replay, args.topic, number)
        self.pending_clear = False
        self.num_steps = 0
        self.usage = 0.0
        """The fraction of the pool in use, as the core last reported."""
        self.works = asyncio.Event()
        self.works.set()

    def stop(self, is_stopped: bool) -> None:
        """Stop the core: requests wait, and counts stay as they are. The HTTP server answers."""
        if is_stopped:
            self.works.clear()
        else:
            self.works.set()

    async def step(self, seconds: float) -> None:
        """Do a part of the work."""
        await asyncio.sleep(seconds)
        await self.works.wait()
        self.num_steps += 1
        self.usage = self.pool.num_held / self.pool.num_blocks

    def publish(self, events: list[dict[str, Any]]) -> None:
        if self.pending_clear:  # vLLM reports a reset with the next step
            events = [{"type": "AllBlocksCleared"}, *events]
            self.pending_clear = False
        if self.events is not None:
            self.events.publish(events)

    def close(self) -> None:
        if self.events is not None:
            self.events.close()

    def reset(self) -> None:
        """Empty the cache. As with vLLM, the next step reports it."""
        self.pool.reset()
        self.pending_clear = True

    async def generate(
        self, token_ids: list[int], params: dict[str, Any], salt: str, lora: str | None
    ) -> AsyncIterator[Any]:
        """Yield (token ids, finish reason, stop reason), at last the number of cached tokens."""
        self.num_waiting += 1
        try:
            await self.slots.acquire()
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        held: list[int] = []
        ended = False
        try:
            hashes = self.pool.chain(token_ids, salt, lora)
            held = self.pool.match(hashes[: (len(token_ids) - 1) // self.pool.block_size])
            num_cached = len(held) * self.pool.block_size
            self.cached_tokens += num_cached
            async with self.prefill:
                begun_s = time.monotonic()
                left_s = self.args.request_s + (len(token_ids) - num_cached) / self.args.prefill_tokens_per_s
                while left_s > 0.0:
                    await self.step(min(left_s, self.args.chunk_s))
                    left_s -= self.args.chunk_s
                prefill_s = time.monotonic() - begun_s
            self._store(token_ids, hashes, held, salt, lora)
            context = list(token_ids)
            plan = self._planned(params)
            for number in range(params["max_tokens"]):
                await self.step(self.args.token_s)
                token_id = plan[number] if number < len(plan) else self._next(context, params, number)
                context.append(token_id)
                if len(context) % self.pool.block_size == 0:
                    self._store(context, self.pool.chain(context, salt, lora), held, salt, lora)
                is_eos = (
                    token_id in self.args.eos and not params.get("ignore_eos") and number >= params.get("min_tokens", 0)
                )
                is_stop = token_id in (params.get("stop_token_ids") or ())
                if (plan and number + 1 == len(plan)) or is_eos or is_stop:
                    ended = True
                    yield [token_id], "stop", token_id if is_stop and not is_eos else None
                    break
                last = number + 1 == params["max_tokens"]
                ended = last
                yield [token_id], "length" if last else None, None
            self.num_prefills, self.prefill_s = self.num_prefills + 1, self.prefill_s + prefill_s
            self.prefill_tokens += len(token_ids) - num_cached
            yield num_cached
        finally:
            self.num_aborted += not ended
            self.num_running -= 1
            self.pool.release(held)
            self.slots.release()
            if self.works.is_set():
                self.usage = self.pool.num_held / self.pool.num_blocks

    def _planned(self, params: dict[str, Any]) -> list[int]:
        wanted = params.get("structured_outputs") or {}
        if "choice" in wanted:
            text = wanted["choice"][0]
        elif wanted:
            text = "{}" if "regex" not in wanted else "123"
        else:
            return []
        return [*self.args.tokenizer.encode(text, add_special_tokens=False).ids, self.args.eos[0]]

    def _next(self, context: list[int], params: dict[str, Any], number: int) -> int:
        message = repr(context[-8:]).encode() + f"{self.args.weights}{self.args.dtype}{self.args.quantization}".encode()
        if params.get("temperature", 1.0):
            message += f"{params.get('seed')} {number}".encode()
        value = zlib.crc32(message)
        if value % self.args.mean_tokens == 0 and not params.get("ignore_eos"):
            return int(self.args.eos[0])
        allowed = params.get("allowed_token_ids")
        return allowed[value % len(allowed)] if allowed else 1000 + value % 20_000

    def _store(self, token_ids: list[int], hashes: list[int], held: list[int], salt: str, lora: str | None) -> None:
        """Publish the full blocks that this request has computed, as one event behind their parent."""
        size, first = self.pool.block_size, len(held)
        if first == len(hashes):
            return
        removed: list[int] = []
        for block_hash in hashes[first:]:
            held.append(self.pool.store(block_hash, removed))
        keys: list[list[str] | None] = []
        for number in range(first, len(hashes)):
            key = ([lora] if lora else []) + ([salt] if salt and number == 0 else [])
            keys.append(key or None)
        stored = {
            "type": "BlockStored",
            "block_hashes": hashes[first:],
            "parent_block_hash": hashes[first - 1] if first else None,
            "token_ids": token_ids[first * size : len(hashes) * size],
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": lora,
            "extra_keys": keys,
            "group_idx": 0,
        }
        gone = [{"type": "BlockRemoved", "block_hashes": removed, "medium": "GPU", "group_idx": 0}] if removed else []
        self.publish([*gone, stored])


def _of_rank(endpoint: str, rank: int) -> str:
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}" if rank else endpoint
