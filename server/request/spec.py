"""One prompt and how to answer it, and what the router is asked about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.hashing import hash_chain
from cache.types import BlockHash, WorkerIncarnation
from server.models import ServedModel
from server.router.placement import RouteRequest
from server.text.detokenizer import TextRules
from worker.wire import SamplingParams


@dataclass(frozen=True, slots=True)
class ParamNames:
    """The request's fields that a worker's refusal may be about."""

    prompt: str
    grammar: str


@dataclass(frozen=True, slots=True, eq=False)
class GenerationSpec:
    """One prompt and how to answer it."""

    request_id: str
    model: ServedModel
    prompt_ids: Sequence[int]
    root: BlockHash
    seeds: tuple[int, ...]
    """One a choice."""
    sampling: SamplingParams
    rules: TextRules
    params: ParamNames
    first_index: int = 0
    """What the first choice is called in the answer; the deltas' `choice` counts from here."""
    priority: int = 0
    tenant: str = ""
    """What workers know the tenant by."""
    affinity_key: str | None = None
    end_of_thought_id: int | None = None
    """The token that ends the model's thoughts, when it has any and this is one token."""


def route_request(
    spec: GenerationSpec,
    hashes: Sequence[BlockHash],
    numerics: str | None = None,
    excluded: frozenset[WorkerIncarnation] = frozenset(),
) -> RouteRequest:
    return RouteRequest(
        request_id=spec.request_id,
        model=spec.model.name,
        num_prompt_tokens=len(spec.prompt_ids),
        hashes=hashes,
        numerics=numerics,
        excluded=excluded,
        affinity_key=spec.affinity_key,
    )


def prompt_hashes(spec: GenerationSpec) -> list[BlockHash]:
    return hash_chain(spec.root, spec.prompt_ids, spec.model.bundle.block_size)
