"""One task that owns an allocator, for those who share a pool across tasks of one event loop.

    async with PoolOwner(make_allocator("hash", 1000, 16)) as pool:
        async with await pool.allocate(len(prompt_ids), prompt_ids, root) as allocation:
            ...                                        freed here, and at the latest when nobody refers to it any more

Commands wait in one queue and are done in order, each as a whole, so an allocator needs no lock and callers see the
pool as if they were alone. A caller that is cancelled while it waits leaves nothing behind.
Source: TGI v3, BlockAllocator, whose BlockAllocation frees itself when it is dropped.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from cache.allocator import Allocation, Allocator, BlockCopy
from cache.events import BlockEvent
from cache.types import BlockHash, BlockId

T = TypeVar("T")


class PoolClosedError(RuntimeError):
    """The owner of the pool has ended."""


class OwnedAllocation:
    """An allocation that is freed by its owner task exactly once: by `free`, at the end of `async with`, or when lost.

    What it tells is of the time of the last command that was awaited on it.
    """

    __slots__ = ("__weakref__", "_allocation", "_finalizer", "_owner")

    def __init__(self, owner: PoolOwner, allocation: Allocation) -> None:
        self._owner = owner
        self._allocation = allocation
        self._finalizer = weakref.finalize(self, owner._free_lost, allocation)
        self._finalizer.atexit = False  # the pool ends with the process

    @property
    def block_table(self) -> Sequence[BlockId]:
        return self._allocation.block_table

    @property
    def num_cached_tokens(self) -> int:
        return self._allocation.num_cached_tokens

    @property
    def capacity(self) -> int:
        return self._allocation.capacity

    def slots(self, start: int, stop: int) -> list[int]:
        return self._allocation.slots(start, stop)

    async def extend(self, num_tokens: int) -> bool:
        return await self._owner._call(lambda _: self._allocation.extend(num_tokens))

    async def commit(self, token_ids: Sequence[int], num_computed: int) -> None:
        await self._owner._call(lambda _: self._allocation.commit(token_ids, num_computed))

    async def fork(self) -> OwnedAllocation:
        return await self._owner._call(lambda _: OwnedAllocation(self._owner, self._allocation.fork()))

    def free(self) -> None:
        """Never waits: the command is queued behind those given before. A second call does nothing."""
        if self._finalizer.detach() is not None:
            self._owner._commands.put_nowait(self._allocation.free)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()


class PoolOwner:
    """Runs while its `async with` block does. Its methods are those of `cache.allocator.Allocator`, to be awaited."""

    __slots__ = ("_allocator", "_commands", "_loop", "_task")

    def __init__(self, allocator: Allocator) -> None:
        """Nobody else may use `allocator` from now on."""
        self._allocator = allocator
        self._commands: asyncio.Queue[Callable[[], None] | None] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name="pool owner")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commands that were given before are done; those given later raise PoolClosedError."""
        task, self._task = self._task, None
        if task is not None:
            asyncio.get_running_loop().call_soon(self._commands.put_nowait, None)  # behind what was lost until now
            await task

    async def allocate(
        self,
        num_tokens: int,
        token_ids: Sequence[int],
        root: BlockHash,
        *,
        reuse: bool = True,
        hashes: Sequence[BlockHash] | None = None,
    ) -> OwnedAllocation | None:
        """None: it does not fit."""

        def command(allocator: Allocator) -> OwnedAllocation | None:
            allocation = allocator.allocate(num_tokens, token_ids, root, reuse=reuse, hashes=hashes)
            return None if allocation is None else OwnedAllocation(self, allocation)

        return await self._call(command)

    async def find(self, token_ids: Sequence[int], root: BlockHash) -> int:
        return await self._call(lambda allocator: allocator.find(token_ids, root))

    async def num_free_blocks(self) -> int:
        return await self._call(lambda allocator: allocator.num_free_blocks)

    async def take_events(self) -> list[BlockEvent]:
        return await self._call(lambda allocator: allocator.take_events())

    async def take_copies(self) -> list[BlockCopy]:
        return await self._call(lambda allocator: allocator.take_copies())

    async def reset(self) -> bool:
        return await self._call(lambda allocator: allocator.reset())

    async def check_integrity(self) -> None:
        await self._call(lambda allocator: allocator.check_integrity())

    async def _call(self, command: Callable[[Allocator], T]) -> T:
        """Have the owner do `command`; an error of the command is raised here, not in the owner."""
        if self._task is None:
            raise PoolClosedError("the pool's owner has ended: use the pool inside its `async with` block")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            if answer.cancelled():  # before anything was taken
                return
            try:
                answer.set_result(command(self._allocator))
            except Exception as error:
                answer.set_exception(error)

        self._commands.put_nowait(run)
        return await answer

    def _free_lost(self, allocation: Allocation) -> None:
        """Called when the garbage collector finds it, hence in any thread and perhaps after the end of the loop."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._commands.put_nowait, allocation.free)

    async def _run(self) -> None:
        try:
            while (command := await self._commands.get()) is not None:
                command()
                del command  # it refers to its answer, an allocation that its caller may lose before the next command
        finally:  # also when the loop is shut down: whoever waits gets an answer
            self._task = None
            while not self._commands.empty():
                if (command := self._commands.get_nowait()) is not None:
                    command()
