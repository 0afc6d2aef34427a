"""The schemas by which others keep prefixes in Redis."""

from __future__ import annotations

import json
import os

from benchmarks.dev.index_load.timing import Timing, timed, timing
from cache.redis_index.client import RedisClient, pack


async def measure_peers(client: RedisClient, num_workers: int, num_blocks: int) -> dict[str, Timing]:
    """Time lookups in what other routers keep in Redis, all workers holding all blocks: one pipeline, decoded."""
    blocks = [os.urandom(8) for _ in range(num_blocks)]
    fields = [json.dumps({"pod": f"10.0.0.{n}:8000", "tier": "gpu", "speculative": False}) for n in range(num_workers)]
    await client.call(("FLUSHALL",), timeout_s=30)
    for block in blocks:
        flat = [part for field in fields for part in (field, "")]
        await client.call(
            ("HSET", b"json:" + block, *flat),
            ("SADD", b"set:" + block, *(str(n) for n in range(num_workers))),
            ("SET", b"bits:" + block, b"\xff" * (-(-num_workers // 8))),
            timeout_s=30,
        )
    hkeys = pack(("HKEYS", b"json:" + block) for block in blocks)
    smembers = pack(("SMEMBERS", b"set:" + block) for block in blocks)
    mget = pack([("MGET", *(b"bits:" + block for block in blocks))])

    async def json_fields() -> int:
        holders = None
        depth = 0
        for reply in await client.submit([hkeys], num_blocks):
            pods = {json.loads(field)["pod"] for field in reply}
            holders = pods if holders is None else holders & pods
            depth += len(holders)
        return depth

    async def sets() -> int:
        holders = None
        depth = 0
        for reply in await client.submit([smembers], num_blocks):
            holders = set(reply) if holders is None else holders.intersection(reply)
            depth += len(holders)
        return depth

    async def bitmaps() -> int:
        holders = (1 << num_workers) - 1
        depth = 0
        for bits in (await client.submit([mget], 1))[0]:
            holders &= int.from_bytes(bits, "big")
            depth += holders.bit_count()
        return depth

    return {
        "hash_per_block_json": timing(await timed(json_fields, 15)),
        "set_per_block": timing(await timed(sets, 50)),
        "mget_bitmaps": timing(await timed(bitmaps, 200)),
    }
