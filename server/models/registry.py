"""Models that this gateway serves, learned from their workers.

A worker is the only source of a model's tokenizer, template and limits. The first worker that answers defines the
model. While a worker of this namespace lives, workers with another namespace are refused, and that is logged. When none
has been seen for a while (the model was replaced), the next worker defines it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from cache.records import WorkerMember
from server.auth.identity import Identity
from server.config import GatewayConfig
from server.errors import ForbiddenError, InvalidRequestError, NotFoundError, UnavailableError
from server.models.served_model import ServedModel, build_model
from server.schema.decoding import TextLimit
from server.text.chat_template import TemplateError
from server.text.tokenizer import TokenizerError
from server.workers.client import WorkerClient
from server.workers.connection import WorkerError
from worker.wire import POOLING_PATHS

log = logging.getLogger(__name__)

ESCAPED_BYTES: Final = 6
"""JSON bytes for a byte of text: `\\u0061` is the longest way to write `a`; a letter of four bytes takes twelve."""
BATCH_TEXT_BYTES: Final = 20 << 20
OTHER_TEXT_BYTES: Final = 12 << 20
"""Room for strings outside prompts: schemas, grammars, bad words, thoughts that a template drops."""
UNPIN_AFTER_S: Final = 10.0
MAX_LEARNING: Final = 4
"""Bundles that are fetched at a time, each of up to `MAX_BUNDLE_BYTES`."""
MAX_LEARNING_OF_ONE: Final = 2
"""The limit for one model: the first worker may be slow."""
MAX_ASKED: Final = 10_000
COMPLETIONS_PATH: Final = "/v1/completions"
NUM_NAMED: Final = 8
"""Models that an error lists."""


def _place(member: WorkerMember) -> tuple[str, str]:
    return member.url, member.epoch


class Models:
    """Models by name and alias, and the LoRA adapters of their workers. One task calls `follow`; all others read."""

    def __init__(
        self,
        client: WorkerClient,
        executor: ThreadPoolExecutor,
        config: GatewayConfig,
        may_have: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """`may_have` returns whether a worker may serve a model or adapter of this name that is not learnt yet."""
        self._client = client
        self._may_have = may_have
        self._executor = executor
        self._config = config
        self._aliases = config.aliases or {}
        self._by_name: dict[str, ServedModel] = {}
        self._adapters: dict[str, ServedModel] = {}
        self._embedding_sizes: dict[str, set[int]] = {}
        """By model: the numbers in an embedding of each known worker; 0: it generates text."""
        self._own_sizes: dict[str, int] = {}
        """By model: the most numbers in an embedding of the workers that take token ids."""
        self._text_apis: dict[str, frozenset[str]] = {}
        """By model: APIs of its workers' engines, by path."""
        self._seeing: frozenset[str] = frozenset()
        """Models whose workers' engines take images."""
        self._seen_s: dict[str, float] = {}
        self._failed_until_s: dict[tuple[str, str], float] = {}

    def get(self, name: str, identity: Identity | None = None) -> ServedModel:
        """Return the model that a request names, by alias too.

        Raises NotFoundError, or UnavailableError while a worker may have it. The error lists the key's models.
        """
        own = self._aliases.get(name, name)
        model = self._by_name.get(own) or self._adapters.get(own)
        if model is None:
            if self._may_have(own):
                raise UnavailableError("This gateway has not learnt the model from a worker yet.", retry_after_s=2.0)
            names = ", ".join(each for each, _ in self.names(identity)[:NUM_NAMED]) or "none"
            message = (
                f"The model {name!r:.200} does not exist or is not served here. GET /v1/models lists: {names:.500}."
            )
            raise NotFoundError(message, param="model", code="model_not_found")
        return model

    def allowed(self, name: str, identity: Identity) -> ServedModel:
        """Return the model if this key may use it. Raises NotFoundError, UnavailableError or ForbiddenError."""
        model = self.get(name, identity)
        if not identity.may_use(name, model.adapter or model.name):
            raise ForbiddenError(f"This key may not use the model {name!r:.200}.", param="model")
        return model

    def readable(self, name: str, identity: Identity) -> ServedModel:
        """Return `allowed`. Raises InvalidRequestError too, if only the model's engine can read its vocabulary."""
        model = self.allowed(name, identity)
        model.check_readable(name)
        return model

    def embedding_size(self, name: str, model: ServedModel) -> int:
        """Return the most numbers in an embedding of the model. Raises InvalidRequestError when it only makes text."""
        size = self._own_sizes.get(model.name, 0)
        if not size or model.adapter:
            message = f"The model {name!r:.200} makes no embeddings: ask for an embedding model."
            raise InvalidRequestError(message, param="model")
        return size

    def check_generates(self, name: str, model: ServedModel) -> None:
        """Raises InvalidRequestError when no known worker of the model generates text."""
        sizes = self._embedding_sizes.get(model.name)
        if sizes and 0 not in sizes:
            paths = ", ".join(sorted(self._text_apis.get(model.name, ()))) or "/v1/embeddings"
            message = f"The model {name!r:.200} generates no text: use {paths}, or ask for another model."
            raise InvalidRequestError(message, param="model")

    def engine_writes(self, path: str, model: ServedModel) -> bool:
        """Return whether an engine writes the answers of this route for the model."""
        if path not in self._text_apis.get(model.name, ()):
            return False
        if path in POOLING_PATHS:
            return True
        is_unknown = path != COMPLETIONS_PATH and (model.template is None or model.tool_format is None)
        is_unknown |= model.tokenizer.is_of_engine
        return self._config.text == "engine" or (self._config.text == "auto" and is_unknown)

    @property
    def has_images(self) -> bool:
        """Return whether any request may have images."""
        return bool(self._seeing) and self._config.text != "gateway"

    def takes_images(self, path: str, model: ServedModel) -> bool:
        """Return whether a request of this route for the model may have images, which an engine reads."""
        is_offered = path in self._text_apis.get(model.name, ()) and path not in (COMPLETIONS_PATH, *POOLING_PATHS)
        return is_offered and self.has_images and model.name in self._seeing

    def has_engine_text(self, path: str) -> bool:
        """Return whether an engine may answer requests of this route."""
        return (self._config.text != "gateway" or path in POOLING_PATHS) and any(self._text_apis.values())

    def names(self, identity: Identity | None = None) -> list[tuple[str, ServedModel]]:
        """Return every name that a request may use, aliases last; with an identity, those that its key may use."""
        named = self._adapters | self._by_name
        both = [*named.items(), *((alias, named[own]) for alias, own in self._aliases.items() if own in named)]
        if identity is None:
            return both
        return [(name, model) for name, model in both if identity.may_use(name, model.adapter or model.name)]

    def text_limit(self) -> TextLimit:
        """Return the largest text that a useful body can have."""
        models = self._by_name.values()
        bounds = [model.prompt_bytes for model in models]
        known = [bound for bound in bounds if bound is not None]
        num_bytes = ESCAPED_BYTES * max(known) + OTHER_TEXT_BYTES if known and len(known) == len(bounds) else None
        return TextLimit(num_bytes, max((model.max_model_len for model in models), default=None))

    def batch_text_limit(self) -> TextLimit:
        """Return `text_limit` for a body with many prompts. Decoded text may take four times its bytes."""
        limit = self.text_limit()
        num_bytes = None if limit.num_bytes is None else max(limit.num_bytes, BATCH_TEXT_BYTES)
        return TextLimit(num_bytes, limit.max_model_len)

    def namespaces(self) -> dict[str, str]:
        """Return, by model name, the fingerprint that its workers must announce."""
        after_s = time.monotonic() - UNPIN_AFTER_S
        return {name: model.fingerprint for name, model in self._by_name.items() if self._seen_s[name] >= after_s}

    async def admit(self, member: WorkerMember) -> ServedModel | None:
        """Learn a worker's model unless it is known; None when the worker's bundle cannot be used."""
        if not self._is_new(member):
            known = self._by_name.get(member.model)
            return known if known is not None and known.fingerprint == member.namespace else None
        try:
            bundle = await self._client.bundle(member.url)
            if bundle.namespace.fingerprint != member.namespace:
                raise TokenizerError("the bundle's namespace is not the one that the worker announces")
            model = await asyncio.get_running_loop().run_in_executor(
                self._executor, build_model, bundle, self._executor, self._config
            )
        except Exception as error:  # a malformed bundle may raise anything
            key, now_s = _place(member), time.monotonic()
            kept = {failed: until_s for failed, until_s in self._failed_until_s.items() if until_s > now_s}
            self._failed_until_s = kept | {key: now_s + 5.0}
            cause = None if isinstance(error, (WorkerError, TokenizerError, TemplateError)) else error
            message = "worker %s at %s: its model %s is not usable: %s"
            log.error(message, member.worker_id, member.url, member.model, error, exc_info=cause)
            return None
        if not self._is_new(member):  # while this ran, another worker has defined it
            return await self.admit(member)
        self._by_name[member.model] = replace(model, takes_grammars="grammar:grammar" not in member.unsupported)
        self._seen_s[member.model] = time.monotonic()
        log.info("model %s learnt from worker %s (%s)", member.model, member.worker_id, member.namespace)
        return model

    def _is_new(self, member: WorkerMember) -> bool:
        """Return whether the worker's model is to be learnt from it now; note that a known one was seen."""
        known = self._by_name.get(member.model)
        now_s = time.monotonic()
        if known is not None and known.fingerprint == member.namespace:
            self._seen_s[member.model] = now_s
            return False
        if known is not None and member.model in self.namespaces():
            return False
        return self._failed_until_s.get(_place(member), 0.0) <= now_s

    async def follow(self, workers: Callable[[], Sequence[WorkerMember]], interval_s: float) -> None:
        """Learn the models of all workers, a few at a time, first from those not asked lately. Never returns."""
        learning: dict[asyncio.Task[ServedModel | None], WorkerMember] = {}
        asked_s: dict[tuple[str, str], float] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                members = workers()
                self._learn_tasks(members)
                learning = {task: member for task, member in learning.items() if not task.done()}
                busy = {_place(member) for member in learning.values()}
                num_of = Counter(member.model for member in learning.values())
                new = [member for member in members if self._is_new(member) and _place(member) not in busy]
                begun: set[str] = set()
                for member in sorted(new, key=lambda each: asked_s.get(_place(each), 0.0)):
                    if len(learning) == MAX_LEARNING:
                        break
                    # One of a model in a round: mostly it answers before the next.
                    if member.model not in begun and num_of[member.model] < MAX_LEARNING_OF_ONE:
                        begun.add(member.model)
                        learning[group.create_task(self.admit(member))] = member
                        asked_s.pop(_place(member), None)
                        asked_s[_place(member)] = time.monotonic()
                        if len(asked_s) > MAX_ASKED:
                            del asked_s[next(iter(asked_s))]
                self._learn_adapters(members)
                await asyncio.sleep(interval_s)

    def _learn_adapters(self, members: Sequence[WorkerMember]) -> None:
        """Serve the adapters that the workers list now. A model's own name comes before an adapter's."""
        bases = {name: self._by_name[m.model] for m in members if m.model in self._by_name for name in m.adapters}
        before = self._adapters
        self._adapters = {
            name: known if (known := before.get(name)) and known.bundle is base.bundle else base.with_adapter(name)
            for name, base in bases.items()
        }

    def _learn_tasks(self, members: Sequence[WorkerMember]) -> None:
        sizes: dict[str, set[int]] = {}
        apis: dict[str, frozenset[str]] = {}
        for member in members:
            sizes.setdefault(member.model, set()).add(member.embedding_size)
            apis[member.model] = apis.get(member.model, frozenset()).union(member.text_apis)
        self._embedding_sizes, self._text_apis = sizes, apis
        self._seeing = frozenset(member.model for member in members if "image" in member.media)
        self._own_sizes = {name: max(of_model) for name, of_model in sizes.items() if not apis[name]}
        takers = {member.model for member in members if "grammar:grammar" not in member.unsupported}
        for name, model in self._by_name.items():
            if name in sizes and model.takes_grammars != (name in takers):
                self._by_name[name] = replace(model, takes_grammars=name in takers)
