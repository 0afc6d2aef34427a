"""The engine as `worker.http` and the publisher see it. Imports neither torch nor the scheduler.

Another engine, such as an adapter next to a vLLM server, serves this worker's HTTP API by implementing `Engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NewType, Protocol

from cache.records import WorkerLoad, WorkerMember
from cache.types import Epoch
from worker.contracts.exchange import BlockExchange
from worker.contracts.rates import QueuePace
from worker.publishing.inbox import PublisherInbox
from worker.wire import Failed, Frame, GenerateRequest, TokenizerBundle

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

MAX_RECORDED_STEPS: Final = 64
"""The most steps of each kind that a StepLog records, and the most batches: a span each, so a trace stays readable."""

SUSPECT_NOTICE_S: Final = 0.02
"""Time for Started to reach the gateway before a step that the process may not survive."""

StepKind = Literal["prefill", "decode", "mixed"]

RequestKey = NewType("RequestKey", int)
"""Number of a request in this process, in order of arrival. The wire's request_id is the client's and may repeat."""


class EngineDeadError(RuntimeError):
    """The device has stopped computing, or an invariant of the engine is broken."""


class RefusedError(Exception):
    """The request gets no stream, but one Failed frame."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class EngineOutput(NamedTuple):
    """A frame for the client of a request."""

    key: RequestKey
    frame: Frame


class StepRecord(NamedTuple):
    """A step as one request saw it. Times on the monotonic clock."""

    begun_s: float
    ended_s: float
    num_tokens: int
    """Tokens of this request."""
    num_sequences: int
    """Sequences of the whole batch."""
    num_batch_tokens: int


@dataclass(slots=True, eq=False)
class RecordedSteps:
    """Counts steps, and records the first of them."""

    num_steps: int = 0
    records: list[StepRecord] = field(default_factory=list)

    def add(self, record: StepRecord) -> None:
        self.num_steps += 1
        if len(self.records) < MAX_RECORDED_STEPS:
            self.records.append(record)


@dataclass(slots=True, eq=False)
class BatchLog:
    """Consecutive steps of one kind, over the same traced requests and as many sequences. The engine writes it."""

    kind: StepKind
    num_sequences: int
    members: list[StepLog]
    """Logs of the traced requests."""
    begun_s: float
    ended_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    is_exported: bool = False
    """Set only by the HTTP side."""


@dataclass(slots=True, eq=False)
class StepLog:
    """Steps of a traced request. The engine only appends: the log is complete after the request's last frame."""

    span: SpanContext | None = None
    """The request's, for its batches to link to."""
    batches: list[BatchLog] = field(default_factory=list)
    """The first of them."""
    is_closed: bool = False
    """Set only by the HTTP side, when the request's stream has ended."""
    prefill: RecordedSteps = field(default_factory=RecordedSteps)
    decode: RecordedSteps = field(default_factory=RecordedSteps)
    begun_s: float | None = None
    """When the request left the queue."""
    first_token_s: float | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineSinks:
    """Where an engine sends what it makes. Any thread may call them; all return at once."""

    deliver: Callable[[list[EngineOutput]], object] = lambda outputs: None
    """Takes outputs. Never called after `on_death`."""
    on_death: Callable[[BaseException], object] = lambda error: None
    publisher: PublisherInbox | None = None
    """Takes cache events and load. None: the worker has no index."""


class Engine(Protocol):
    """An engine as the HTTP side sees it. All methods return at once and may be called from any thread."""

    @property
    def member(self) -> WorkerMember:
        """The registry entry, with the current epoch."""

    @property
    def bundle(self) -> TokenizerBundle:
        """The tokenizer and template, for gateways."""

    @property
    def load(self) -> WorkerLoad:
        """The load as last reported."""

    @property
    def pace(self) -> QueuePace:
        """How fast its queue drains, as last reported."""

    @property
    def index_problem(self) -> str | None:
        """Why the index lacks blocks of this engine, or None."""

    @property
    def not_ready_reason(self) -> str | None:
        """Why the engine can take no request now, though the process works; or None."""

    @property
    def exchange(self) -> BlockExchange | None:
        """The exchange of blocks with peers. None: the engine exchanges no blocks."""

    def start(self) -> None:
        """Begin to serve."""

    async def supervise(self) -> None:
        """Watch the started engine until cancelled. Ends the process, or raises, when it hangs or cannot go on."""

    async def close(self) -> None:
        """End the engine after its current step. Open requests get no further frames."""

    def refusal(self, request: GenerateRequest) -> Failed | None:
        """Return why the engine can never serve this request, or None."""

    async def prepare(self, request: GenerateRequest) -> Any:
        """Compile the grammar and read the long lists of a request, for `submit`. Raises RefusedError."""

    async def render(self, call: bytes) -> bytes:
        """Return the prompts of a call of the engine's own API, both in msgpack. Raises RefusedError or WireError."""

    def submit(self, key: RequestKey, request: GenerateRequest, prepared: Any, steps: StepLog | None = None) -> None:
        """Queue a request that `refusal` accepts. `key` is new and ascending; `steps` receives its trace.

        A dead engine fails the request at once, so that another worker can take it.
        """

    def abort(self, key: RequestKey, choice: int | None = None) -> None:
        """End a request, or one choice of it, before the next step. Ignores unknown keys: it may be over."""

    def drain(self) -> None:
        """Report as draining."""

    def fail_all(self, failed: Failed) -> Future[None]:
        """End every request with this frame."""

    def purge(self) -> Future[Epoch]:
        """Empty the cache and begin a new epoch. Running requests compute their tokens again."""

    async def liveness(self) -> str | None:
        """Return what is wrong with the engine, or None. Probe the device after a long idle time."""

    def debug_state(self) -> Future[dict[str, Any]]:
        """Return the queues, block tables and pool counts as JSON values."""
