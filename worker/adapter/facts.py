"""Facts about an engine: read at the start, and again whenever it may have been replaced.

A fleet promises one model, tokenizer and number format for each worker. Another engine at the same address must not
pass for the old one.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from cache.types import HASH_BYTES
from worker.adapter.api import EngineApi, EngineLoad, EngineLostError, EngineModel, EngineRefusedError, EventSource
from worker.adapter.http import understood
from worker.adapter.text import CHAT
from worker.common.chat_probes import CHAT_PROBES, probes_digest
from worker.files.errors import CheckpointError
from worker.files.model_files import folder_statuses
from worker.files.tokenizer_files import fields_of_folder, fingerprint
from worker.wire import ChoiceState, EngineCall, GenerateRequest, SamplingDefaults, SamplingParams

PROBE_TEXTS: Final = (
    "Hello, world! The quick brown fox jumps over 13 lazy dogs.",
    "  Größe: naïve café, 日本語のテキスト, emoji 🙂🙃\n\tdef f(x):\n\t\treturn x ** 2  # 100_000\r\n",
)
_NUM_PROMPT_TOKENS: Final = 7
_NUM_ANSWER_TOKENS: Final = 8
"""Prompt and answer are shorter than a block of any usual engine, so nothing is cached."""
_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that are constant for an engine."""

    version: str
    model: EngineModel
    """Without its LoRA adapters, which may change."""
    number_format: str
    """Dtype and quantisation; empty if unknown."""
    block_size: int
    ranks: tuple[int, ...]
    event_source: EventSource | None
    index_problem: str
    """Why its cache events give no prefix index; empty if they can."""
    drops_last_block: bool
    """It computes the last matching block again."""
    tokens: str
    """Digest of the engine's own ids of `PROBE_TEXTS`; empty if it has no tokenizer."""
    files: str
    """Digest of the local tokenizer files, and of the weights if these determine the revision."""
    defaults: SamplingDefaults | None
    """Sampling parameters that the engine fills in; None if unknown."""
    text_apis: tuple[str, ...]
    """See `WorkerMember`, as for `media`."""
    media: tuple[str, ...]
    chat_probes: str
    """See `WorkerMember`."""
    answer: str
    """Digest of a short greedy answer with log probabilities, if the number format is unknown."""

    def changes(self, now: EngineFacts) -> list[str]:
        """Return the differences, each as `name: old -> new`."""
        pairs = [(field.name, getattr(self, field.name), getattr(now, field.name)) for field in fields(self)]
        return [f"{name}: {old!s:.300} -> {new!s:.300}" for name, old, new in pairs if old != new]


class FactsReader:
    """Reads the facts of one engine."""

    def __init__(self, api: EngineApi, folder: Path, *, digests_weights: bool, renders: bool = False) -> None:
        """`folder`: the tokenizer's files. `digests_weights`: the revision is a digest of the weights in it.

        `renders`: the digest of chat prompts is a fact. A template that writes the date has none.
        """
        self._renders = renders
        self._api = api
        self._folder = folder
        self._digests_weights = digests_weights

    async def read(
        self, known: EngineFacts | None = None, started_s: float = 0.0, *, is_suspect: bool = True
    ) -> tuple[EngineFacts, EngineLoad]:
        """Return the facts and the counts of one process. Raises EngineLostError, EngineRefusedError.

        The answer is copied from `known` for a process that is not suspect or started at `started_s`.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                before = await self._api.load()
                is_same = not is_suspect or (started_s != 0.0 and before.started_s == started_s)
                facts = await self._read(before, known if is_same else None)
                after = await self._api.load()
        except TimeoutError as error:
            raise EngineLostError(f"the engine's facts could not be read within {_TIMEOUT_S:.0f} s") from error
        if (after.started_s, after.block_size) != (before.started_s, before.block_size):
            raise EngineLostError("the engine restarted while its facts were read")
        return facts, after

    async def _read(self, load: EngineLoad, known: EngineFacts | None) -> EngineFacts:
        api = self._api
        version = await api.version()
        model = replace(await api.model(), loras=())
        number_format = await api.number_format()
        probes = await self._probe_ids()
        text_apis = await api.text_apis()
        facts = EngineFacts(
            version=version,
            model=model,
            number_format=number_format,
            block_size=load.block_size,
            ranks=await api.ranks(),
            event_source=await api.event_source(),
            index_problem=await api.index_problem() or "",
            drops_last_block=await api.drops_last_block(),
            tokens=_digest(probes) if probes else "",
            files=await asyncio.to_thread(self._digest_files),
            defaults=await api.sampling_defaults(),
            text_apis=text_apis,
            media=await api.media() if CHAT in text_apis else (),
            chat_probes=await prompts_digest(api) if self._renders and CHAT in text_apis else "",
            answer="",
        )
        if number_format:
            return facts
        return replace(facts, answer=await self._answer(probes) if known is None else known.answer)

    async def _probe_ids(self) -> list[list[int]]:
        try:
            return [await self._api.tokenize(text) for text in PROBE_TEXTS]
        except EngineRefusedError as error:
            if error.status == 404:  # started without a tokenizer
                return []
            raise

    async def _answer(self, probes: list[list[int]]) -> str:
        """Return the digest of a greedy answer; empty if the engine cannot give one."""
        prompt_ids = (probes[0] if probes else list(range(3, 100)))[:_NUM_PROMPT_TOKENS]
        request = probe(prompt_ids, secrets.token_bytes(HASH_BYTES), _NUM_ANSWER_TOKENS, logprobs=0)
        found: list[Any] = []
        chunks = self._api.generate(request, request.choices[0], f"facts-{secrets.token_hex(8)}")
        try:
            with understood("a short answer"):
                async for chunk in chunks:
                    found += zip(chunk.token_ids, chunk.logprobs or (None,) * len(chunk.token_ids), strict=True)
        except EngineRefusedError as error:
            if error.status in (400, 404, 405, 422):
                return ""
            raise
        return _digest([(token_id, None if logprob is None else logprob.logprob) for token_id, logprob in found])

    def _digest_files(self) -> str:
        try:
            parts = [fingerprint(*fields_of_folder(self._folder, is_of_engine=True).values())]
            if self._digests_weights:
                parts.append(repr(folder_statuses(self._folder)))
        except (CheckpointError, OSError) as error:
            return f"unreadable: {error}"
        return _digest(parts)


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The facts that a worker has promised, and the counts of the process that they were last read from."""

    reader: FactsReader
    facts: EngineFacts
    counts: EngineLoad

    async def read(self, *, is_suspect: bool) -> tuple[EngineFacts, EngineLoad]:
        """Read the facts again. Only a suspect that is another process must generate an answer.

        Raises EngineLostError, EngineRefusedError.
        """
        return await self.reader.read(self.facts, self.counts.started_s, is_suspect=is_suspect)


async def prompts_digest(api: EngineApi) -> str:
    """Return the digest of the engine's ids of `CHAT_PROBES`. Raises EngineLostError."""
    prompts: list[tuple[int, ...] | None] = []
    for body in CHAT_PROBES:
        try:
            prompts.append((await api.render(EngineCall(CHAT, msgspec.json.encode(body)))).prompts[0])
        except EngineRefusedError:
            prompts.append(None)
    return probes_digest(prompts)


def probe(prompt_ids: list[int], root: bytes, num_tokens: int, logprobs: int | None = None) -> GenerateRequest:
    """Return a request for a greedy answer of exactly `num_tokens`."""
    return GenerateRequest(
        request_id="probe",
        gateway_id="",
        epoch="",
        root=root,
        prompt_ids=prompt_ids,
        choices=(ChoiceState(index=0, seed=0),),
        sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs),
    )


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
