"""What an operator may tell one worker through a gateway: drain, and purge its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import aiohttp

from cache.records import WorkerMember
from server.errors import NotFoundError, UnavailableError

ACTIONS: Final = ("drain", "purge")
TIMEOUT_S: Final = 10.0


class WorkerActions:
    """Calls workers over `session`."""

    def __init__(self, session: aiohttp.ClientSession, workers: Callable[[], Sequence[WorkerMember]]) -> None:
        self._session = session
        self._workers = workers

    async def act(self, worker_id: str, action: str) -> dict[str, Any]:
        """`action` is one of ACTIONS; the worker's answer. Raises NotFoundError, UnavailableError."""
        assert action in ACTIONS, action
        member = next((member for member in self._workers() if member.worker_id == worker_id), None)
        if member is None:
            raise NotFoundError(f"There is no worker {worker_id!r:.200}; GET /workers lists them.")
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._session.post(f"{member.url}/{action}", timeout=timeout, allow_redirects=False) as response:
                if response.status != 200:
                    raise UnavailableError(f"Worker {worker_id} answered {response.status} to {action}.")
                answer: dict[str, Any] = await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise UnavailableError(
                f"Worker {worker_id} at {member.url} cannot be reached: {error or 'timeout'}."
            ) from error
        return {"worker": worker_id, **answer}
