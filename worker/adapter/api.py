"""An engine's HTTP API as the adapter sees it: `EngineApi`, its records and its failures."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from worker.wire import EngineCall, Failed, GenerateRequest, Rendered, SamplingDefaults

_TOO_LONG: Final = re.compile(
    r"context length|context size|context window|maximum model length|max_model_len|max_new_tokens. must be",
    re.IGNORECASE,
)
"""Parts of the errors of four engines for a request that does not fit."""


class EngineLostError(Exception):
    """The engine cannot be reached, or its answer is incomplete."""

    def __init__(self, message: str, *, gone: bool = False, closed: bool = False, unsent: bool = False) -> None:
        """`gone`: nothing listens there. `closed`: it has closed the connection without an answer.

        `unsent`: nothing was sent, as there was no connection.
        """
        super().__init__(message)
        self.gone = gone
        self.unsent = unsent
        self.closed = closed


class EngineRefusedError(Exception):
    """The engine has answered with an error. `status` is HTTP's."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        """`param`: the field of the body that the engine names."""
        super().__init__(f"the engine answered {status}: {message}")
        self.status = status
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The model, as the engine lists it."""

    name: str
    """Its served name."""
    source: str
    """The folder or Hugging Face id that it was loaded from."""
    max_model_len: int
    loras: tuple[str, ...] = ()
    """Names of the LoRA adapters that it serves, sorted."""
    aliases: tuple[str, ...] = ()
    """Its other names, sorted."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's own counts, of one data-parallel rank."""

    started_s: float = 0.0
    """When its process started: another value means another process. 0.0: unknown."""
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    block_size: int = 1
    """Tokens in a block of the engine."""
    usage: float = 0.0
    """The fraction of blocks that running requests hold."""
    prefill_tokens: float = 0.0
    prefill_s: float = 0.0
    num_prefills: int = 0
    """Totals since the start: tokens computed in prefills, their seconds, and their number, once requests have ended.

    Prefills that run next to each other count their seconds each.
    """
    reuses_prefixes: bool | None = None
    """Prefix caching is on; None: unknown."""
    speculates: bool = False
    work: float = 0.0
    """A total that grows while the engine computes prompts or answers; 0.0: it has none."""
    sleeps: bool = False
    """Its weights or caches are not on the device."""
    ranks: tuple[int, ...] = (0,)
    """The data-parallel ranks of its server, sorted."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where one rank of an engine publishes its cache events, by ZMQ."""

    endpoint: str
    replay_endpoint: str | None
    topic: str = ""
    """Empty: every topic of the endpoint."""
    binds: bool | None = None
    """The engine binds `endpoint`, or connects to it; None: by the form of the endpoint (`engine_binds`)."""
    host: str = "127.0.0.1"
    """Where an engine is reached that binds all addresses."""
    is_exposed: bool = False
    """The operator allows an endpoint that other machines or users can reach."""

    def connect_address(self, endpoint: str) -> str:
        """Return the address to connect to: the engine's host replaces a wildcard."""
        return endpoint.replace("[::]", "*").replace("*", self.host)


class ChoicePart(msgspec.Struct):
    """New tokens of a choice, and why it has ended."""

    index: int = 0
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None


class CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class EngineUsage(msgspec.Struct):
    """The counts at the end of an answer."""

    prompt_tokens_details: CachedTokens | None = None


class EnginePart(msgspec.Struct):
    """The fields that the worker reads of an event of an engine's API, or of a whole answer."""

    choices: tuple[ChoicePart, ...] = ()
    usage: EngineUsage | None = None
    error: Any = None

    @property
    def num_cached_tokens(self) -> int | None:
        """Return the prompt tokens that the engine has found cached; None: unknown."""
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens


Take = Callable[[bytes, EnginePart], None]
"""Receives each event, or the whole answer, with what the worker reads of it."""


class EngineApi(Protocol):
    """One data-parallel rank of one engine. Every call raises EngineLostError or EngineRefusedError.

    An engine that lacks a feature has the answer that is given here.
    """

    kind: str

    async def version(self) -> str:
        """Return the engine's version, and check that the version is supported. Call it first."""

    async def precision(self) -> str:
        """Return dtype and quantisation, for the numerics class; empty if unknown."""

    async def model(self) -> EngineModel:
        """Return the model that the engine serves."""

    async def load(self) -> EngineLoad:
        """Return the engine's own counts."""

    async def is_healthy(self) -> bool:
        """Ask the engine whether it can serve."""

    async def tokenize(self, text: str) -> list[int]:
        """Return the engine's own ids of `text`, without special tokens."""

    async def is_paused(self) -> bool:
        """Return whether the engine reports that it is paused. False if it does not answer."""
        return False

    async def probe(self, prompt_ids: Sequence[int] = (0,), salt: str = "") -> int | None:
        """Generate one token, or one embedding. Return the number of cached prompt tokens; None: unknown."""

    async def sampling_defaults(self) -> SamplingDefaults | None:
        """Return the engine's defaults of missing sampling parameters; None if unknown."""
        return None

    async def event_source(self) -> EventSource | None:
        """Return where the cache events come from, or None if unknown."""

    async def drops_last_block(self) -> bool:
        """Return whether it may compute the last matching block again, as vLLM does with EAGLE and MTP."""
        return False

    async def index_problem(self) -> str | None:
        """Return why the engine's cache events cannot give a prefix index, or None if they can."""
        return None

    async def reset(self) -> None:
        """Empty the prefix cache."""

    async def text_apis(self) -> tuple[str, ...]:
        """Return the paths of the APIs whose answers the engine can write for gateways, and what else they can."""

    async def render(self, call: EngineCall) -> Rendered:
        """Return the engine's own ids of a call's prompts."""

    async def generate(self, request: GenerateRequest, request_id: str, take: Take) -> None:
        """Hand each part of the answer to `take`, as it arrives. To cancel it aborts the request in the engine."""

    async def close(self) -> None:
        """Close the connections."""


def failed_by(error: EngineRefusedError) -> Failed:
    """Return the frame for an engine's error. One that a request can cause must not count as a lost engine."""
    if error.status in (401, 404):  # another key, or an unloaded LoRA adapter; a 403 may be about the request
        return Failed("not_ready", f"the engine refuses this worker: {error.message}", retryable=True)
    if error.status in (429, 503):
        return Failed("queue_full", error.message, retryable=True, retry_after_s=1.0)
    code = "engine_error" if error.status >= 500 else "invalid_request"
    if error.status in (400, 413, 422) and _TOO_LONG.search(error.message) is not None:
        code = "context_length_exceeded"
    return Failed(code, error.message, retryable=False, param=error.param)
