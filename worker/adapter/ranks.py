"""`python -m worker.adapter.ranks`: waits for an engine and prints its data-parallel ranks.

`headstart serve` starts a worker for each. It takes a worker's options and prints one line:
{"event": "engine", "ranks": [0, 1], "publishes": true}
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from worker.adapter.api import EngineLostError, EngineRefusedError
from worker.adapter.connect import open_api, wait_for_engine
from worker.common.capabilities import GENERATING
from worker.config import WorkerConfig, parse


async def ask(config: WorkerConfig) -> dict[str, object]:
    """Return the ranks of the engine, and whether it advertises the cache events that its model has."""
    api = open_api(config)
    try:
        await wait_for_engine(api, config, lambda line: print(line, file=sys.stderr, flush=True))
        pools = GENERATING.isdisjoint(await api.text_apis())
        publishes = await api.event_source() is not None or pools or await api.index_problem()
        return {"ranks": (await api.load()).ranks, "publishes": bool(publishes)}
    finally:
        await api.close()


def main(argv: Sequence[str]) -> int:
    """Return 2 for bad options, and 1 for an engine that fails."""
    try:
        answer = asyncio.run(ask(parse(argv)))
    except (ValueError, EngineLostError, EngineRefusedError) as error:
        print(error, file=sys.stderr, flush=True)
        return 2 if isinstance(error, ValueError) else 1
    print(json.dumps({"event": "engine"} | answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
