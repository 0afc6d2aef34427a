"""Models that this gateway serves, learned from their workers.

A worker is the only source of a model's tokenizer, template and limits. Workers with another namespace have another
revision of the model, which is learnt too. Requests are prepared for the revision with most ready workers, and between
equal ones for the one that started last. A revision without workers is forgotten, unless it is the only one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from cache.records import WorkerMember
from server.auth.identity import Identity
from server.config import GatewayConfig
from server.errors import ForbiddenError, InvalidRequestError, NotFoundError, UnavailableError
from server.models.served_model import ServedModel, WorkerFacts, build_model
from server.schema.decoding import MAX_VALUES, TextLimit
from server.text.template_sandbox import TemplateError
from server.text.tokenizer import TokenizerError
from server.workers.client import WorkerClient
from server.workers.connection import WorkerError
from worker.common.capabilities import GENERATING, IMAGES, adapters_in
from worker.wire import POOLING_PATHS

log = logging.getLogger(__name__)

ESCAPED_BYTES: Final = 6
"""JSON bytes for a byte of text: `\\u0061` is the longest way to write `a`; a letter of four bytes takes twelve."""
BATCH_TEXT_BYTES: Final = 20 << 20  # a batch has more text than one prompt
OTHER_TEXT_BYTES: Final = 12 << 20
"""Room for strings outside prompts: schemas, grammars, bad words, thoughts that a template drops."""
ID_BYTES: Final = 8
"""Maximum bytes per token id in JSON ("999999, ")."""
RETRY_S: Final = 5.0
"""Time until a worker with an unusable bundle is asked again."""
MAX_LEARNING: Final = 4
"""Bundles that are fetched at a time, each of up to `MAX_BUNDLE_BYTES`."""
MAX_LEARNING_OF_ONE: Final = 2
"""The limit for one model: the first worker may be slow."""
MAX_ASKED: Final = 10_000  # bounds the memory for invented names
NUM_NAMED: Final = 8
"""Models that an error lists."""


Revision = tuple[str, str]
"""A model's name, and the namespace that its workers announce."""
KnownWorker = tuple[WorkerMember, bool | None]
"""A worker, and whether it is ready; None: it is lost."""


def _url_and_epoch(member: WorkerMember) -> tuple[str, str]:
    return member.url, member.epoch


def _revision(member: WorkerMember) -> Revision:
    return member.model, member.namespace


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
        self._revisions: dict[Revision, ServedModel] = {}
        self._by_name: dict[str, ServedModel] = {}
        """The revision of each model that serves. One without workers stays: they may come back."""
        self._adapters: dict[str, ServedModel] = {}
        self._named_by_engines: dict[str, ServedModel] = {}
        """Models by further names, which their engines have for them."""
        self._learning: set[str] = set()
        """Models with a ready worker of a revision that is not learnt yet."""
        self._failed: dict[tuple[str, str], tuple[float, str]] = {}
        """Workers with an unusable bundle: when to ask again, and the reason."""

    def get(self, name: str, identity: Identity | None = None) -> ServedModel:
        """Return the model that a request names, by alias too.

        Raises NotFoundError, or UnavailableError while a worker may have it. The error lists the key's models.
        """
        own = self._aliases.get(name, name)
        model = self._by_name.get(own) or self._adapters.get(own) or self._named_by_engines.get(own)
        if model is None:
            names = ", ".join(each for each, _ in self.names(identity)[:NUM_NAMED]) or "none"
            listed = f"GET /v1/models lists: {names:.500}."
            if self._may_have(own):
                message = f"The model {name!r:.200} is not served here yet: a worker may have it. {listed}"
                raise UnavailableError(message, retry_after_s=2.0)
            message = f"The model {name!r:.200} does not exist or is not served here. {listed}"
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

    def check_generates(self, name: str, model: ServedModel) -> None:
        """Raises InvalidRequestError when no known worker of the model generates text."""
        facts = model.facts
        if facts.capabilities and facts.capabilities.isdisjoint(GENERATING):
            paths = ", ".join(facts.engine_paths) or POOLING_PATHS[0]
            message = f"The model {name!r:.200} generates no text: use {paths}, or ask for another model."
            raise InvalidRequestError(message, param="model")

    def engine_writes(self, path: str, model: ServedModel) -> bool:
        """Return whether an engine writes the model's answers on this route. Raises InvalidRequestError if it cannot.

        Another engine writes all text of its model.
        """
        apis = model.facts.engine_paths
        if path not in apis and path not in POOLING_PATHS and (text_apis := GENERATING.intersection(apis)):
            served = ", ".join(sorted(text_apis))
            raise InvalidRequestError(f"The engine of the model {model.name!r:.200} offers {served}, not {path}.")
        return path in apis

    @property
    def has_engine_text(self) -> bool:
        """Return whether an engine may answer requests."""
        return any(model.facts.engine_paths for model in self._by_name.values())

    def names(self, identity: Identity | None = None) -> list[tuple[str, ServedModel]]:
        """Return every name that a request may use, once; with an identity, those that its key may use."""
        named = self._named_by_engines | self._adapters | self._by_name
        both = [*(named | {alias: named[own] for alias, own in self._aliases.items() if own in named}).items()]
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

    def max_body_bytes(self) -> int | None:
        """Return the size of the largest useful body, token ids included. None: it is unknown, or has images."""
        text = self.batch_text_limit().num_bytes
        has_images = any(IMAGES in model.facts.capabilities for model in self._by_name.values())
        return None if text is None or has_images else text + ID_BYTES * MAX_VALUES

    def is_served(self, model: ServedModel) -> bool:
        """Return whether requests for the model are still prepared for this revision of it."""
        served = self._by_name.get(model.name)
        return served is not None and served.fingerprint == model.fingerprint

    def is_learning(self, name: str) -> bool:
        """Return whether a ready worker has another revision of the model, which this gateway learns now."""
        return name in self._learning

    def state_of(self, member: WorkerMember) -> tuple[str, str]:
        """Return "serving", "standby", "learning" or "refused", and why it does not serve."""
        learnt = self._revisions.get(_revision(member))
        if learnt is None:
            _, reason = self._failed.get(_url_and_epoch(member), (0.0, ""))
            return ("refused", reason) if reason else ("learning", "this gateway has not learnt its model yet")
        if self.is_served(learnt):
            return "serving", ""
        return "standby", "another revision of its model serves: it has more ready workers, or started last"

    def revision(self, member: WorkerMember) -> str | None:
        """Return the name of the worker's revision; None while it is not learnt."""
        learnt = self._revisions.get(_revision(member))
        return None if learnt is None else learnt.bundle.revision

    async def admit(self, member: WorkerMember) -> ServedModel | None:
        """Learn a worker's revision unless it is known; None when the worker's bundle cannot be used."""
        if not self._is_new(member):
            return self._revisions.get(_revision(member))
        try:
            bundle = await self._client.bundle(member.url)
            if (bundle.model, bundle.namespace.fingerprint) != _revision(member):
                raise TokenizerError("the bundle's namespace is not the one that the worker announces")
            model = await asyncio.get_running_loop().run_in_executor(
                self._executor, build_model, bundle, self._executor, self._config
            )
        except Exception as error:  # a malformed bundle may raise anything
            now_s = time.monotonic()
            kept = {place: each for place, each in self._failed.items() if each[0] > now_s - RETRY_S}
            self._failed = kept | {_url_and_epoch(member): (now_s + RETRY_S, f"its model is not usable: {error}")}
            cause = None if isinstance(error, (WorkerError, TokenizerError, TemplateError)) else error
            message = "worker %s at %s is refused: its model %s is not usable: %s"
            log.error(message, member.worker_id, member.url, member.model, error, exc_info=cause)
            return None
        if _revision(member) not in self._revisions:  # else another worker was faster
            learnt = self._revisions[_revision(member)] = replace(model, facts=WorkerFacts.of([member]))
            self._by_name.setdefault(member.model, learnt)
            log.info("model %s learnt from worker %s (%s)", member.model, member.worker_id, member.namespace)
            if learnt.tool_format is None and not learnt.facts.engine_paths:  # else its engine reads them
                log.warning(
                    "model %s: the format of its tool calls is unknown, so that they come as content; "
                    "--tool-parser names one",
                    member.model,
                )
            if learnt.facts.engine_paths and self._config.template_of(member.model) is not None:
                log.warning(
                    "model %s: --chat-template has no effect, as its engine renders: give it there", member.model
                )
        return self._revisions[_revision(member)]

    def _is_new(self, member: WorkerMember) -> bool:
        """Return whether the worker's revision is to be learnt from it now."""
        again_s, _ = self._failed.get(_url_and_epoch(member), (0.0, ""))
        return _revision(member) not in self._revisions and again_s <= time.monotonic()

    async def follow(self, workers: Callable[[], Sequence[KnownWorker]], interval_s: float) -> None:
        """Learn the models of all workers, a few at a time, first from those not asked lately. Never returns.

        `workers` returns all that are known.
        """
        learning: dict[asyncio.Task[ServedModel | None], WorkerMember] = {}
        asked_s: dict[tuple[str, str], float] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                known = workers()
                self.choose(known)
                learning = {task: member for task, member in learning.items() if not task.done()}
                busy = {_url_and_epoch(member) for member in learning.values()}
                num_of = Counter(_revision(member) for member in learning.values())
                ready = [member for member, is_ready in known if is_ready]
                new = [member for member in ready if self._is_new(member) and _url_and_epoch(member) not in busy]
                begun: set[Revision] = set()
                for member in sorted(new, key=lambda each: asked_s.get(_url_and_epoch(each), 0.0)):
                    if len(learning) == MAX_LEARNING:
                        break
                    # One of a revision in a round: mostly it answers before the next.
                    revision = _revision(member)
                    if revision not in begun and num_of[revision] < MAX_LEARNING_OF_ONE:
                        begun.add(revision)
                        learning[group.create_task(self.admit(member))] = member
                        asked_s.pop(_url_and_epoch(member), None)
                        asked_s[_url_and_epoch(member)] = time.monotonic()
                        if len(asked_s) > MAX_ASKED:
                            del asked_s[next(iter(asked_s))]
                await asyncio.sleep(interval_s)

    def choose(self, known: Sequence[KnownWorker]) -> None:
        """Choose the revision of each model that serves, and take what its workers can do from them."""
        members_of: defaultdict[Revision, list[WorkerMember]] = defaultdict(list)
        started_ms: defaultdict[Revision, list[int]] = defaultdict(list)
        longest = Counter[Revision]()
        for member, is_ready in known:
            if (key := _revision(member)) in self._revisions:
                longest[key] = max(longest[key], member.max_model_len)
                if is_ready is None:
                    continue
                members_of[key].append(member)
                if is_ready:
                    started_ms[key].append(member.epoch_started_ms)
        new = [member for member, is_ready in known if is_ready and _revision(member) not in self._revisions]
        self._learning = {member.model for member in new if _url_and_epoch(member) not in self._failed}
        best: dict[str, tuple[int, int, str]] = {}
        for (name, namespace), starts in started_ms.items():
            best[name] = max(best.get(name, (0, 0, "")), (len(starts), min(starts), namespace))
        for name, (num_ready, _, namespace) in best.items():
            if self._by_name[name].fingerprint != namespace:
                log.info("model %s: its revision %s serves now: ready workers: %d", name, namespace, num_ready)
                self._by_name[name] = self._revisions[name, namespace]
        for key, members in members_of.items():
            if (facts := WorkerFacts.of(members, longest[key])) != self._revisions[key].facts:
                self._revisions[key] = replace(self._revisions[key], facts=facts)
        kept = {key: model for key, model in self._revisions.items() if key in members_of or self.is_served(model)}
        self._revisions = kept
        self._by_name = {name: kept[name, model.fingerprint] for name, model in self._by_name.items()}
        self._take_adapters(members_of)

    def _take_adapters(self, members_of: Mapping[Revision, Sequence[WorkerMember]]) -> None:
        """Serve the adapters that the workers of each serving revision list. A model's name comes before an adapter's.

        Those of a revision without workers stay: they may come back.
        """
        by_name = self._by_name.values()
        self._named_by_engines = {name: model for model in by_name for name in sorted(model.facts.aliases)}
        before = self._adapters
        alone = {name for name, model in self._by_name.items() if (name, model.fingerprint) not in members_of}
        bases = {name: self._by_name[model.name] for name, model in before.items() if model.name in alone}
        for model in self._by_name.values():
            for member in members_of.get((model.name, model.fingerprint), ()):
                bases |= dict.fromkeys(adapters_in(member.capabilities), model)
        self._adapters = {}
        for name, base in bases.items():
            known = before.get(name)
            if known is None or known.bundle is not base.bundle:
                known = base.with_adapter(name)
            self._adapters[name] = known if known.facts == base.facts else replace(known, facts=base.facts)
