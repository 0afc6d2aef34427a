"""`python -m worker.adapter COMMAND OPTIONS`: asks an engine what it is, with the options of a worker.

doctor   checks whether the engine can be a worker, and prints a JSON object for each check (`worker.common.checks`)
ranks    waits for the engine, and prints {"event": "engine", "ranks": [0, 1], "publishes": true}: its data-parallel
         ranks, for each of which `headstart serve` starts a worker
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from worker.adapter.api import EngineLostError, EngineRefusedError
from worker.adapter.connect import open_api, wait_for_engine
from worker.adapter.doctor import checks
from worker.common.capabilities import GENERATING
from worker.common.checks import print_check
from worker.config import WorkerConfig, parse


async def doctor(config: WorkerConfig) -> None:
    async for check in checks(config):
        print_check(check)


async def ranks(config: WorkerConfig) -> None:
    api = open_api(config)
    try:
        await wait_for_engine(api, config, lambda line: print(line, file=sys.stderr, flush=True))
        pools = GENERATING.isdisjoint(await api.text_apis())
        publishes = await api.event_source() is not None or pools or await api.index_problem()
        answer = {"event": "engine", "ranks": (await api.load()).ranks, "publishes": bool(publishes)}
        print(json.dumps(answer), flush=True)
    finally:
        await api.close()


def main(argv: Sequence[str]) -> int:
    """Return 2 for options that cannot work, and 1 for an engine that fails."""
    command, *options = argv
    try:
        asyncio.run({"doctor": doctor, "ranks": ranks}[command](parse(options)))
    except (ValueError, EngineLostError, EngineRefusedError) as error:
        print(error, file=sys.stderr, flush=True)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
