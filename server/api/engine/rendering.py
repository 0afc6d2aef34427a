"""Prompts that an engine renders: which worker is asked, and what its refusal means."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Final

from cache.records import Candidate
from server.api.engine.media import CHAT_PATH, Media
from server.api.formatting import encode_json
from server.errors import ApiError, InternalError, InvalidRequestError, RevisionGoneError, UnavailableError
from server.models.registry import Models
from server.models.served_model import ServedModel
from server.request.retry import MAX_WAITS
from server.router.queue import PAUSE_S
from server.schema.decoding import invalid
from server.workers.client import WorkerClient
from server.workers.connection import WorkerAbsent, WorkerLost, WorkerRefused
from server.workers.fleet import Fleet
from worker.common.capabilities import IMAGES, needs_of
from worker.wire import EngineCall, Rendered

log = logging.getLogger(__name__)

Digests = tuple[tuple[str, str], ...]
"""A digest of token ids for each shape that an engine has rendered."""
MAX_RENDER_ATTEMPTS: Final = 3  # as many workers may be lost


class EngineRenderer:
    """Asks the workers of a model for prompts."""

    def __init__(self, models: Models, client: WorkerClient, fleet: Fleet) -> None:
        self._models = models
        self._client = client
        self._fleet = fleet

    async def rendered(self, call: EngineCall, media: Media, model: ServedModel) -> Rendered:
        """Return the engine's prompts of a call. Raises ApiError, which names the image that the engine cannot read."""
        try:
            rendered = await self.render(call, model, has_images=bool(media.images))
        except (InvalidRequestError, InternalError) as refused:
            images = () if refused.code == "context_length_exceeded" else media.images
            for image in images:
                alone = {"messages": [{"role": "user", "content": [image.part]}], "max_tokens": 1}
                try:
                    await self.render(EngineCall(call.path, encode_json(alone)), model, has_images=True)
                except (InvalidRequestError, InternalError) as error:
                    why = f": {error.message}" if isinstance(error, InvalidRequestError) else ""
                    raise invalid(image.param, f"is an image that the engine cannot read{why}") from error
            raise
        num_read = sum(map(len, rendered.media))
        if num_read < len(media.images):
            message = f"The engine reads {num_read} of {len(media.images)} images: send them in messages of the user."
            raise InvalidRequestError(message, param=media.images[0].param)
        return rendered

    def able(
        self, model: ServedModel, path: str, *, has_images: bool = False, are_silent: bool = False
    ) -> list[Candidate]:
        """Return the workers, live or silent, that can serve calls of this route."""
        name, revision, needs = model.name, model.fingerprint, _needs(model, path, has_images=has_images)
        found = self._fleet.silent(name, revision) if are_silent else self._fleet.candidates(name, None, revision)
        return [each for each in found if needs.issubset(each.member.capabilities)]

    def digests(self, model: ServedModel) -> frozenset[Digests]:
        """Return those of all engines that can serve a model's chats: they identify their templates."""
        return frozenset(each.member.chat_probes for each in self.able(model, CHAT_PATH))

    async def render(self, call: EngineCall, model: ServedModel, *, has_images: bool = False) -> Rendered:
        """Ask the least loaded worker of the longest context for the prompt's ids, and others if it is lost.

        Raises ApiError.

        Silent workers, and another revision that is learnt, are waited for.
        """
        num_lost = num_waits = 0
        needs = _needs(model, call.path, has_images=has_images)
        while num_lost < MAX_RENDER_ATTEMPTS and num_waits <= MAX_WAITS:
            candidates = self.able(model, call.path, has_images=has_images)
            longest = max([each.member.max_model_len for each in candidates], default=0)
            candidates = [each for each in candidates if each.member.max_model_len == longest]
            candidates.sort(key=lambda each: (each.load.num_waiting, each.load.num_running, random.random()))
            for candidate in candidates[:MAX_RENDER_ATTEMPTS]:
                try:
                    return await self._client.render(candidate.member.url, call)
                except (WorkerRefused, WorkerLost) as error:
                    if isinstance(error, WorkerRefused) and not error.failed.retryable:
                        is_longest = longest == self._fleet.longest_context(model.name, model.fingerprint, needs)
                        if error.failed.code == "context_length_exceeded" and not is_longest:
                            break  # a worker with a longer context is away
                        raise _refusal(error) from error
                    num_lost += isinstance(error, WorkerLost) and not isinstance(error, WorkerAbsent)
                    log.info("worker %s rendered no prompt: %s", candidate.member.worker_id, error)
            if not self._models.is_served(model):
                raise RevisionGoneError
            silent = self.able(model, call.path, has_images=has_images, are_silent=True)
            num_waits += not (silent or self._models.is_learning(model.name))
            await asyncio.sleep(PAUSE_S)
        raise UnavailableError("No worker could render the prompt.", retry_after_s=1.0)


def _needs(model: ServedModel, path: str, *, has_images: bool = False) -> frozenset[str]:
    return needs_of(EngineCall(path, b""), None, [IMAGES] * has_images, model.adapter)


def _refusal(error: WorkerRefused) -> ApiError:
    """Return the client's error for an engine that refuses to render a prompt, in the engine's words."""
    failed = error.failed
    if failed.code not in ("context_length_exceeded", "invalid_request"):
        return InternalError("The engine met an internal error.")
    code = None if failed.code == "invalid_request" else failed.code
    return InvalidRequestError(failed.message, param=failed.param, code=code)
