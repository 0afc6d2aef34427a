"""The hand-stepped engine with blocks that move: real stores, fetches and savers, whose turns the test gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

from cache.allocators.base import Allocator
from cache.allocators.hash import HashAllocator
from cache.block_record import RecordFormat, layout_fingerprint
from cache.stores.base import BlockStore
from cache.types import BlockId, ChainLink
from tests.worker.scheduler.arithmetic_runner import ArithmeticRunner
from tests.worker.scheduler.engine import HandEngine
from worker.contracts.metrics import WorkerMetrics
from worker.contracts.rates import PrefillRate
from worker.contracts.step import Runner
from worker.kv_transfer.fetches import PrefixFetch
from worker.kv_transfer.pool_blocks import Copier, PoolBlocks
from worker.kv_transfer.transfers import KVTransfers

BLOCK_SIZE = 4
PAYLOAD_BYTES = 4 * BLOCK_SIZE
SECRET = b"of the fleet"
LAYOUT = layout_fingerprint(
    namespace="n",
    files="f",
    numerics="cpu",
    dtype="int32",
    shape=(1, 1, 1, BLOCK_SIZE),
)
RECORD = RecordFormat(LAYOUT, PAYLOAD_BYTES, SECRET)


class TokenCopier:
    """Blocks of the arithmetic runner's pool, four bytes a token."""

    num_bytes = PAYLOAD_BYTES

    def __init__(self, runner: ArithmeticRunner) -> None:
        self._runner = runner

    def new_payload(self) -> memoryview:
        return memoryview(bytearray(PAYLOAD_BYTES))

    def read(self, block_id: BlockId, payload: memoryview) -> None:
        first = block_id * BLOCK_SIZE
        tokens = self._runner.kv[first : first + BLOCK_SIZE]
        payload[:] = b"".join(token.to_bytes(4, "little") for token in tokens)

    def write(self, block_id: BlockId, payload: memoryview) -> None:
        first = block_id * BLOCK_SIZE
        tokens = [int.from_bytes(payload[at : at + 4], "little") for at in range(0, PAYLOAD_BYTES, 4)]
        self._runner.kv[first : first + BLOCK_SIZE] = tokens


class BytesCopier:
    """A pool of bytes, 16 a block."""

    num_bytes = PAYLOAD_BYTES

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [bytearray(PAYLOAD_BYTES) for _ in range(num_blocks)]

    def new_payload(self) -> memoryview:
        return memoryview(bytearray(PAYLOAD_BYTES))

    def read(self, block_id: BlockId, payload: memoryview) -> None:
        payload[:] = self.blocks[block_id]

    def write(self, block_id: BlockId, payload: memoryview) -> None:
        self.blocks[block_id][:] = payload


class PeersInProcess:
    """Stands where the HTTP client stands: fetches from engines of this process, and checks records as it does."""

    def __init__(self, record: RecordFormat, peers: dict[str, MovingEngine], damages: Random | None = None) -> None:
        self._record = record
        self._peers = peers
        self._damages = damages

    @contextmanager
    def fetching(self, url: str, epoch: str, links: Sequence[ChainLink]) -> Iterator[PeersInProcess]:
        if url not in self._peers:
            raise ConnectionRefusedError(url)
        self._source = self._peers[url].transfers
        yield self

    def read(self, link: ChainLink, payload: memoryview, use: Callable[[memoryview], object]) -> bool:
        header = self._source.read_record(link, payload)
        if header is not None and self._damages is not None and self._damages.random() < 0.2:
            payload[self._damages.randrange(len(payload))] ^= 1 << self._damages.randrange(8)
        is_exact = header is not None and self._record.verifies(header, link, payload)
        if is_exact:
            use(payload)
        return is_exact


class MovingEngine(HandEngine):
    """A `HandEngine` whose blocks go to stores and come from them and from peers, one block a turn."""

    def __init__(
        self,
        stores: Sequence[BlockStore],
        peers: dict[str, MovingEngine],
        random: Random,
        record: RecordFormat,
        *,
        damages: bool = False,
        copier: Copier | None = None,
        **options,
    ) -> None:

        def make_transfers(allocator: Allocator, runner: Runner) -> KVTransfers:
            assert isinstance(allocator, HashAllocator)
            if copier is None:
                assert isinstance(runner, ArithmeticRunner)
            self.pool = PoolBlocks(allocator, copier or TokenCopier(runner))
            client = PeersInProcess(record, peers, random if damages else None)
            self.transfers = KVTransfers(self.pool, PrefillRate(1, 100.0), stores, record, client, WorkerMetrics())
            return self.transfers

        super().__init__(block_size=BLOCK_SIZE, make_transfers=make_transfers, **options)
        self.random = random
        self.stores = stores
        self._reads: dict[PrefixFetch, Iterator[None]] = {}

    def move_blocks(self, num_turns: int) -> None:
        """Give the fetch threads and the savers some turns, in any order."""
        fetches = self.transfers.fetches
        self.core._reporter.report()
        for saver in self.transfers.savers.values():
            for _ in range(self.random.randrange(num_turns)):
                if saver.queue:
                    saver.save(saver.queue.popleft(), self.pool.new_payload())
        for fetch in fetches.active:
            self._reads.setdefault(fetch, fetches.read_blocks(fetch, self.pool.new_payload()))
        for fetch in list(self._reads):
            for _ in range(self.random.randrange(num_turns)):
                if not self._read_block(fetch):
                    break
        fetches.poll(0.0)

    def _read_block(self, fetch: PrefixFetch) -> bool:
        """Give a fetch's thread one turn. Return whether it goes on."""
        try:
            next(self._reads[fetch])
        except (StopIteration, OSError):
            fetch.finished = True
            del self._reads[fetch]
            return False
        return True

    def purge(self) -> None:
        """Empty the pool and the stores."""
        purged = self.core.purge()
        self.core.mailbox.run()
        self._flush()
        purged.result()
