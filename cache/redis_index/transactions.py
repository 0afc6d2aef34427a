"""Commands of a worker to Redis: each call returns one reply per command, or None after any error."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

from redis.exceptions import ResponseError

from cache.redis_index import schema
from cache.redis_index.client import Argument, RedisClient, RedisDownError, Reply

logger = logging.getLogger(__name__)

Command = Sequence[Argument]


class Transactions:
    """Sends commands of one worker. Owned by its `IndexWriter`."""

    def __init__(self, client: RedisClient, timeout_s: float, name: str, count: Callable[[str], None]) -> None:
        """`name` is the worker's, for the log; `count` counts "refused"."""
        self._client = client
        self._timeout_s = timeout_s
        self._name = name
        self._count = count
        self._is_refused = False

    async def ask(self, *commands: Command) -> list[Reply] | None:
        """Return one reply per command, or None without a connection or in time."""
        try:
            return await self._client.call(*commands, timeout_s=self._timeout_s)
        except RedisDownError as error:
            logger.debug("not published: %s", error)
            return None

    async def run(self, commands: list[Command]) -> list[Reply] | None:
        """Return the replies of one MULTI, one per command, or None after any error."""
        replies = await self.ask(("MULTI",), *commands, ("EXEC",))
        if replies is None:
            return None
        results = replies[-1]
        if not isinstance(results, list) or len(results) != len(commands):
            refusals = [reply for reply in replies if isinstance(reply, ResponseError)]
            if refusals:
                self._refused(refusals[0])
            else:
                self._client.reconnect(f"{schema.brief(results)} to a MULTI of {len(commands)} commands")
            return None
        errors = [result for result in results if isinstance(result, ResponseError)]
        if not errors:
            return results
        self._refused(errors[0])
        is_other_type = [isinstance(r, ResponseError) and str(r).startswith("WRONGTYPE") for r in results]
        if any(is_other_type):  # such keys are foreign
            await self.ask(("UNLINK", *{command[1] for command in itertools.compress(commands, is_other_type)}))
        return None

    def accepted(self) -> None:
        """Log the next refusal again."""
        self._is_refused = False

    def _refused(self, reply: Reply) -> None:
        self._count("refused")
        if not self._is_refused:
            self._is_refused = True
            logger.warning("Redis refuses what %s publishes: %s", self._name, schema.brief(reply))
