"""The contract between gateway and worker: msgpack over HTTP, token ids both ways. Imports nothing heavy.

    POST /generate   GenerateRequest -> a stream of frames: Started, Tokens..., Finished per choice, then End or Failed
                     with `embed`: Started, Embedding, Finished, then End or Failed
    POST /abort      {"request_id": str, "choice": int | None}
    GET  /state      cache.records.WorkerState                    GET /bundle   TokenizerBundle

A refusal is any status but 200 with one Failed frame as its body: 409 `wrong_epoch`, 429 `queue_full`, 503 `draining`,
503 `unsupported` (another engine may), 400 `invalid_request` (no worker can serve it), `context_length_exceeded` or
`invalid_grammar`. Every other answer is not a worker's. Closing the connection aborts the request. A stream that ends
without End or Failed is a dead worker. `max_tokens` and `min_tokens` count a resumed choice's `output_ids`. With a
cluster secret, a worker proves itself first (`worker.common.proof`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

import msgpack
import msgspec
from msgspec import Meta, Struct

from cache.hashing import MediaStart, Namespace, decode_tokens, encode_tokens
from cache.records import WorkerMember
from cache.types import HASH_BYTES, Place

PROTOCOL_VERSION: Final = 1
"""The newest that this side speaks. Optional fields need no new one: readers ignore unknown fields."""
OLDEST_PROTOCOL: Final = 1
"""The oldest that this side speaks: gateways and workers can be upgraded one after the other."""
CONTENT_TYPE: Final = "application/msgpack"
MAX_FRAME_BYTES: Final = 16 * 1024 * 1024  # four times what MAX_POSITIONS with 1,024 logprobs each take
MAX_POSITIONS: Final = 256  # in a frame: a reader decodes one frame at a time
MAX_BAD_WORD_IDS: Final = 65_536
"""Tokens of all bad words of a request, which are compared with the end of every output."""
MAX_LISTED_IDS: Final = 1 << 26
"""Ids in a request's lists times its choices: a vocabulary of 262,144 tokens, allowed and biased, for 128 choices."""

FinishReason = Literal["stop", "length", "abort"]
GrammarKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]
GRAMMAR_KINDS: Final = frozenset(get_args(GrammarKind))
_U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""A number outside of its bounds, or a NaN, would fail the step of every request in the batch."""
_Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
_Penalty = Annotated[float, Meta(ge=-100.0, le=100.0)]
_Bias = Annotated[float, Meta(ge=-1e6, le=1e6)]
_NumLogprobs = Annotated[int, Meta(ge=0, le=1024)]


def shared_protocol(member: WorkerMember) -> int | None:
    """Return the newest protocol that this side and the worker both speak, or None."""
    newest = min(PROTOCOL_VERSION, member.protocol)
    return newest if newest >= max(OLDEST_PROTOCOL, member.oldest_protocol or member.protocol) else None


class WireError(ValueError):
    """The bytes are no message of this protocol. The text names the field."""


class ProtocolError(WireError):
    """A message of a version that this side does not speak."""


class Grammar(Struct, frozen=True):
    """A constraint on the output. `text` is a JSON schema, a regex, a grammar or a JSON list of choices."""

    kind: Annotated[str, GrammarKind]
    text: str
    compact: bool = False
    """JSON without any white space."""


class SamplingParams(Struct, frozen=True):
    """How to sample. The token at a position is a function of (logits, params, seed, position) only."""

    max_tokens: _U32
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_p: _Probability = 1.0
    top_k: _U32 = 0
    min_p: _Probability = 0.0
    typical_p: _Probability = 1.0
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    frequency_penalty: _Penalty = 0.0
    presence_penalty: _Penalty = 0.0
    logit_bias: Annotated[tuple[tuple[int, _Bias], ...], Meta(max_length=1_000_000)] = ()
    bad_words: Annotated[tuple[tuple[_U32, ...], ...], Meta(max_length=MAX_BAD_WORD_IDS)] = ()
    allowed_token_ids: Annotated[tuple[int, ...], Meta(max_length=1_000_000)] | None = None
    min_tokens: _U32 = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=65_536)] = ()
    logprobs: _NumLogprobs | None = None
    """None: none. k: the sampled token's logprob and the k best."""
    prompt_logprobs: _NumLogprobs | None = None
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def reads_output(self) -> bool:
        """Sampling depends on the output so far, apart from the logits."""
        penalises = self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty
        return bool(penalises or self.bad_words or self.grammar is not None)


def num_listed_ids(sampling: SamplingParams) -> dict[str, int]:
    """Return the number of ids in each of a request's lists, by field."""
    return {
        "allowed_token_ids": len(sampling.allowed_token_ids or ()),
        "logit_bias": len(sampling.logit_bias),
        "bad_words": sum(map(len, sampling.bad_words)),
        "stop_token_ids": len(sampling.stop_token_ids),
    }


def too_many_ids(sampling: SamplingParams, num_choices: int) -> str | None:
    """Return what is wrong with the lengths of a request's lists, by field, or None."""
    lengths = num_listed_ids(sampling)
    if (num_ids := lengths["bad_words"]) > MAX_BAD_WORD_IDS:
        return f"bad_words: {num_ids} tokens in all, and at most {MAX_BAD_WORD_IDS} are taken; leave some out"
    if (num_ids := sum(lengths.values())) * num_choices > MAX_LISTED_IDS:
        names = [name for name in sorted(lengths, key=lengths.__getitem__, reverse=True) if lengths[name]]
        return (
            f"{', '.join(names)}: {num_ids} ids times n = {num_choices} choices exceed {MAX_LISTED_IDS};"
            " shorten the lists or lower n (or best_of)"
        )
    return None


class ChoiceState(Struct, frozen=True):
    """One of the n answers to a prompt, with its `output_ids` so far when a stream is resumed."""

    index: _U32
    seed: int
    output_ids: tuple[int, ...] = ()


class BlockSource(Struct, frozen=True):
    """A worker that holds the first blocks of a prompt, for another one that does not."""

    url: str
    epoch: str
    num_blocks: _U32


class Embed(Struct, frozen=True):
    """The embedding of the prompt is asked for, and no token: one choice, with `max_tokens` 0."""

    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Keep this many leading numbers, normalised again. None: all."""


POOLING_PATHS: Final = ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank")
"""APIs of engines for models that generate no text. Their requests have no prompt in token ids."""


class EngineCall(Struct, frozen=True):
    """A client's request to an API of the engine, which writes the answer. It reads the prompts of `POOLING_PATHS`."""

    path: str
    body: bytes
    """The JSON body, without the ids and the priority. The adapter replaces its salt."""
    streams: bool = False
    """The answer is a stream of events."""

    @property
    def pools(self) -> bool:
        return self.path in POOLING_PATHS


class Rendered(Struct, frozen=True):
    """The prompts of an `EngineCall` in the engine's own token ids, and the room for each answer."""

    prompts: tuple[tuple[_U32, ...], ...]
    max_tokens: tuple[_U32, ...]
    media: tuple[tuple[MediaStart, ...], ...] = ()
    """The media in each prompt, in order; empty if no prompt has any."""


class GenerateRequest(Struct, frozen=True):
    """A prompt with its choices, and how to sample them."""

    request_id: str
    gateway_id: str
    epoch: str
    """The epoch that the gateway routed to; another one answers 409. Empty: any."""
    root: Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    prompt_ids: Sequence[int]
    choices: Annotated[tuple[ChoiceState, ...], Meta(min_length=1, max_length=16_384)]
    sampling: SamplingParams
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    traceparent: str = ""
    """W3C trace context of the gateway's span; empty: not traced."""
    tracestate: str = ""
    protocol: int = PROTOCOL_VERSION
    tenant: str = ""
    """An opaque tag of the tenant, for a fair share of the worker."""
    deadline_s: Annotated[float, Meta(le=1e9)] | None = None
    """Seconds from now after which the answer is useless."""
    is_suspect: bool = False
    """A worker was lost after it accepted the request, before a token: prefill no other suspect with it."""
    adapter: str = ""
    """The LoRA adapter, by the name that the worker's engine has for it; empty: the base model."""
    source: BlockSource | None = None
    """Where the worker may fetch blocks that it does not hold, if that is faster than to compute them."""
    embed: Embed | None = None
    """Ask for an embedding."""
    call: EngineCall | None = None
    """Ask for the engine's own text."""
    media: tuple[MediaStart, ...] = ()
    """The media in the prompt, in order, which the engine reads from the call."""
    weight: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    """The tenant's weight for its share of the worker."""


class _Frame(Struct, frozen=True, array_like=True):
    """A msgpack array of a tag and the fields. A newer worker may append fields.

    It may also send other tags, which an older reader ignores. So a new tag is for what a request asks for, or for what
    an answer is complete without.
    """


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log probabilities of one position, of the token and of the best, before any penalty or truncation."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0
    """The token's rank by probability, from 1 for the likeliest; 0: unknown."""


class Started(_Frame, frozen=True, tag=0):
    """The request left the queue and its prefill begins. Sent once, first."""

    num_cached_tokens: int
    fetched_tokens: dict[Annotated[str, Place], int] | None = None
    """Those of the cached tokens that came into the pool for this request, by place."""
    queue_s: float | None = None
    """From the request's arrival to its start; None: unknown."""


class Tokens(_Frame, frozen=True, tag=1):
    """New tokens of one choice."""

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Finished(_Frame, frozen=True, tag=2):
    """One choice has ended. `stop_token_id` is the token that ended it, also in the last Tokens."""

    choice: int
    reason: Annotated[str, FinishReason]
    """Another one is of a newer version: the choice has no answer that an older gateway can give."""
    stop_token_id: int | None = None


class PromptLogprobs(_Frame, frozen=True, tag=3):
    """Logprobs of the prompt's next tokens, sent after the prefill in as many frames as it takes.

    The first one begins with None, for the first token.
    """

    positions: Annotated[tuple[TokenLogprobs | None, ...], Meta(min_length=1)]


class End(_Frame, frozen=True, tag=4):
    """Every choice has finished, and the stream is complete."""

    queue_s: float
    prefill_s: float
    decode_s: float
    num_cached_tokens: int | None = None
    """Prompt tokens that the engine found cached, where Started could only guess."""


class Failed(_Frame, frozen=True, tag=5):
    """The request has ended without an answer. `retryable`: another worker, or a later time, may give one."""

    code: str
    message: str
    retryable: bool
    retry_after_s: float | None = None
    """With `queue_full`: when the queue will have drained."""
    param: str | None = None
    """With `invalid_request`: the field of the client's body."""


class Embedding(_Frame, frozen=True, tag=6):
    """The embedding of the prompt, sent once after the prefill."""

    vector: bytes
    """float32, little-endian."""


class EngineText(_Frame, frozen=True, tag=7):
    """An event of the engine's API, or its whole answer to an unstreamed call. Its tokens came before, in Tokens."""

    data: bytes
    """JSON."""


Frame = Started | Tokens | Finished | PromptLogprobs | End | Failed | Embedding | EngineText
FRAMES: Final[tuple[type[Frame], ...]] = (Started, Tokens, Finished, PromptLogprobs, End, Failed, Embedding, EngineText)


class SamplingDefaults(Struct, frozen=True, omit_defaults=True):
    """A model's own sampling parameters, for the fields that a client does not send. None: the API's default."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: _Probability | None = None
    top_k: _U32 | None = None
    min_p: _Probability | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=1e6)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**32 - 1)] | None = None
    """The longest answer of a request without a limit of its own."""

    def shown(self) -> dict[str, float]:
        """Return the fields that are set."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


NO_DEFAULTS: Final = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """Everything a gateway needs to turn text into this model's tokens and back."""

    fingerprint: str
    model: str
    revision: str
    tokenizer_json: bytes
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    vocab_size: int
    max_model_len: int
    block_size: int
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    """Outside the fingerprint: they change no block."""
    engine_vocabulary: bytes = b""
    """Set if only the engine can read the vocabulary, and `tokenizer_json` is empty: JSON with its `added_tokens`."""
    tool_template: str | None = None
    """The chat template of conversations with tools, if it is another one."""
    template_kwargs: bytes = b"{}"
    """The operator's switches of the template, as JSON. Outside the fingerprint."""

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.model, self.revision, self.fingerprint, self.block_size)


T = TypeVar("T")
_converting: Final = threading.Lock()
pack: Final = msgspec.msgpack.Encoder().encode
"""Packs any message of this module or of `cache.records`."""


def unpack(data: bytes, kind: type[T]) -> T:
    """Unpack a message and check the type of every field. Raises WireError."""
    try:
        return _checked(msgpack.unpackb(data), kind)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"not a {kind.__name__}: {error}") from error


def _checked(value: Any, kind: type[T]) -> T:
    """Return the value as `kind`. msgspec 0.22 crashes the process where several threads use a new type at once."""
    with _converting:
        return msgspec.convert(value, kind)


def pack_request(request: GenerateRequest) -> bytes:
    """Pack a request with its prompt as u32 little-endian bytes, which is fast at any length."""
    return pack(msgspec.structs.asdict(request) | {"prompt_ids": encode_tokens(request.prompt_ids)})


def unpack_request(data: bytes) -> GenerateRequest:
    """Unpack a request. Raises WireError, also for another protocol version."""
    try:
        message = msgpack.unpackb(data)
        protocol = message.get("protocol")
        if type(protocol) is not int or not OLDEST_PROTOCOL <= protocol <= PROTOCOL_VERSION:
            spoken = f"{OLDEST_PROTOCOL} to {PROTOCOL_VERSION}"
            raise ProtocolError(f"protocol: the gateway speaks {protocol!r:.40}, this worker {spoken}")
        prompt_ids = decode_tokens(message["prompt_ids"])
        request = _checked(message | {"prompt_ids": ()}, GenerateRequest)
    except WireError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"not a GenerateRequest: {error}") from error
    return msgspec.structs.replace(request, prompt_ids=prompt_ids)
