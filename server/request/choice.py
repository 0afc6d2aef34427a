"""The specification of a generation, and one of its n choices: tokens as received, text as released."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from msgspec import Raw, Struct
from msgspec.structs import replace

from cache.hashing import MediaStart, hash_chain
from cache.types import BlockHash
from server.models.served_model import ServedModel
from server.request.hints import NO_HINTS, RoutingHints
from server.request_context import CURRENT
from server.router.types import RouteRequest, short_key
from server.text.detokenizer import Detokenizer, TextRules
from server.text.output_parser import OutputDelta
from worker.common.capabilities import needs_of
from worker.wire import ChoiceState, Embed, EngineCall, SamplingParams, TokenLogprobs, Tokens

MAX_PENDING_IDS: Final = 1024
"""Tokens of an unstreamed answer that wait to be decoded, so that no call decodes many."""

StopReason = Literal["stop", "length"]


class EngineTextRequest(Struct, frozen=True, eq=False, kw_only=True):
    """A client's request for the text of an engine's own API, and what it asked for of the answer."""

    call: EngineCall
    is_read: bool = False
    """The gateway reads the chat's events, and writes those of another API."""
    head: dict[str, Raw]
    """Fields of each event that have the gateway's values: id, created, model."""
    shows_usage: bool
    """The client has asked for the usage at a stream's end."""
    has_usage: bool
    """The engine is asked for it."""
    shows_ids: bool
    num_tokens: int = 0
    """The estimated length of a prompt that the gateway has no ids of."""
    is_resumable: bool
    """The answer has one choice, and its sampling does not depend on the output so far."""


class GenerationSpec(Struct, frozen=True, eq=False, kw_only=True):
    """One prompt and how to answer it. By default no token is sampled, as for embeddings."""

    request_id: str
    model: ServedModel
    prompt_ids: Sequence[int] = ()
    root: BlockHash
    seeds: tuple[int, ...] = (0,)
    """One per choice."""
    sampling: SamplingParams = SamplingParams(max_tokens=0)
    rules: TextRules = TextRules()
    prompt_param: str
    """The field that holds the prompt, named in the error when a worker refuses the prompt."""
    grammar_param: str = ""
    relaxed: tuple[str, ...] = ()
    """JSON pointers to schema parts that no grammar enforces."""
    clamps_max_tokens: bool = False
    """Workers with fewer tokens left than `sampling.max_tokens` may answer; they generate as much as fits."""
    first_index: int = 0
    """The index of the first choice in the response."""
    priority: int = 0
    tenant: str = ""
    """The opaque tag that names the tenant at workers."""
    weight: float = 1.0
    """The tenant's weight for its share of a busy fleet."""
    affinity_key: str | None = None
    """The name of the conversation in the body. A session header takes precedence."""
    thoughts: tuple[bytes, bytes] | None = None
    """The texts that begin and end the model's reasoning; None: it has none."""
    begins_in_thoughts: bool = False
    """The prompt has begun the reasoning."""
    embed: Embed | None = None
    """Set if the request is for an embedding instead of text."""
    text_request: EngineTextRequest | None = None
    """Set if the engine writes the text."""
    media: tuple[MediaStart, ...] = ()
    """The images in the prompt."""

    def route_request(self, hints: RoutingHints = NO_HINTS) -> RouteRequest:
        """Describe the prompt to the router."""
        session, context = hints.session or self.affinity_key, CURRENT.get(None)
        num_demanded = max(1, self.sampling.min_tokens) if self.clamps_max_tokens else self.sampling.max_tokens
        call, num_tokens = None, len(self.prompt_ids)
        if self.text_request is not None:
            call, num_tokens = self.text_request.call, num_tokens or self.text_request.num_tokens
        return RouteRequest(
            request_id=self.request_id,
            model=self.model.name,
            num_prompt_tokens=num_tokens,
            namespace=self.model.fingerprint,
            hashes=hash_chain(self.root, self.prompt_ids, self.model.bundle.block_size, self.media),
            affinity_key=short_key(f"{self.tenant}/{session}") if session else None,
            hard_affinity=hints.hard_affinity,
            needs=needs_of(call, self.embed, self.media, self.model.adapter),
            priority=self.priority,
            tenant=self.tenant,
            weight=self.weight,
            root=self.root,
            num_context_tokens=num_tokens + num_demanded,
            client_id=short_key("" if context is None else context.client_id),
            is_whole=call is not None and not (call.streams or call.pools),
        )

    def sampling_at(self, max_model_len: int) -> SamplingParams:
        """Return the parameters for a worker with this context length, which fits the request."""
        tokens_left = max_model_len - len(self.prompt_ids)
        if not self.clamps_max_tokens or self.sampling.max_tokens <= tokens_left:
            return self.sampling
        return replace(self.sampling, max_tokens=tokens_left)


class TokenEntry(Struct, eq=False):
    """A generated token with its log probabilities; `start` is its text's offset in the choice's text."""

    token_id: int
    logprobs: TokenLogprobs
    start: int


class ChoiceDelta(Struct, eq=False):
    """New output of one choice since its last delta; only its last delta has a finish_reason."""

    choice: int
    """The choice's index in the response."""
    text: str
    token_ids: list[int]
    entries: list[TokenEntry]
    finish_reason: StopReason | None
    stop_reason: str | int | None = None
    """The stop string, or the id of the stop token, that ended the choice (vLLM's extension)."""
    event: bytes = b""
    """An event of the engine's own API, instead of everything else."""
    parts: Sequence[OutputDelta] = ()
    """Parts that an engine has read of its model's text, instead of the text."""
    call_ids: Sequence[str] = ()
    """The engine's ids of the calls that begin in `parts`."""
    logprobs: Sequence[Any] = ()
    """The engine's log probabilities, as a chat has them."""


class Choice:
    """One choice: takes frames, returns deltas. `reset` it for a restart on another worker.

    Where an engine writes the text, it only counts tokens: see `EngineAnswer`.
    """

    def __init__(self, spec: GenerationSpec, index: int) -> None:
        self.index = index
        self.seed = spec.seeds[index]
        self._spec = spec
        self._has_text = spec.text_request is None
        self._token_by_token = bool(spec.rules.stops) or spec.sampling.logprobs is not None
        self.reset()

    def reset(self) -> None:
        """Forget everything received."""
        self.output_ids: list[int] = []
        self.finish_reason: StopReason | None = None
        self.stop_reason: str | int | None = None
        self._detokenizer = Detokenizer(self._spec.model.tokenizer.token_bytes, self._spec.rules)
        self._num_decoded = 0
        """Output tokens that have become text."""
        self._num_delivered = 0
        """Output tokens in the deltas taken."""
        self._ended = False
        """The last delta was taken."""
        self._entries: list[TokenEntry] = []
        self._text = ""

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def state(self) -> ChoiceState:
        return ChoiceState(self.index, self.seed, tuple(self.output_ids))

    def take(self, frame: Tokens) -> bool:
        """Add tokens to an unfinished choice. Return True if a stop string among them has finished it."""
        if not self._token_by_token:
            self.output_ids += frame.token_ids
            if self._has_text and len(self.output_ids) - self._num_decoded >= MAX_PENDING_IDS:
                self._decode_pending()
            return False
        logprobs: Sequence[TokenLogprobs | None] = frame.logprobs or (None,) * len(frame.token_ids)
        for token_id, entry in zip(frame.token_ids, logprobs, strict=True):
            self.output_ids.append(token_id)
            if entry is not None:
                self._entries.append(TokenEntry(token_id, entry, self._detokenizer.num_chars))
            self._decode_pending()
            if self._detokenizer.stopped:
                self._finish_at_stop_string()
                return True
        return False

    def finish(self, reason: StopReason, stop_token_id: int | None = None) -> None:
        """End the choice. `stop_token_id`: its last token, if that token ended it."""
        if self._has_text:
            self._decode_pending()
        self._text += self._detokenizer.finish()
        if self._detokenizer.stopped:
            self._finish_at_stop_string()
            return
        self.finish_reason = reason
        special_ids = self._spec.model.tokenizer.token_bytes.special_ids
        if stop_token_id is not None and reason == "stop" and stop_token_id not in special_ids:
            self.stop_reason = stop_token_id

    def finish_if_complete(self, max_tokens: int) -> None:
        """End the choice if it has all its tokens: its Finished frame may be lost with its worker."""
        if self.output_ids and self.output_ids[-1] in self._spec.rules.terminal_ids:
            self.finish("stop", self.output_ids[-1])
        elif len(self.output_ids) >= max_tokens:
            self.finish("length", None)

    def take_delta(self) -> ChoiceDelta | None:
        """Return the new output, or None. Log probabilities wait for their token's text."""
        token_ids = self.output_ids[self._num_delivered :]
        if self._ended or not (token_ids or self.done):
            return None
        self._decode_pending()
        entries = self._entries
        self._entries = []
        if entries and not self.done:
            text_len = self._detokenizer.text_len
            ready = next((i for i, entry in enumerate(entries) if entry.start >= text_len), len(entries))
            self._entries = entries[ready:]
            entries = entries[:ready]
        text, self._text = self._text, ""
        self._num_delivered = len(self.output_ids)
        self._ended = self.done
        index = self._spec.first_index + self.index
        return ChoiceDelta(index, text, token_ids, entries, self.finish_reason, self.stop_reason)

    def _decode_pending(self) -> None:
        pending_ids = self.output_ids[self._num_decoded :]
        if pending_ids:
            may_stop = len(self.output_ids) > self._spec.sampling.min_tokens
            self._text += self._detokenizer.feed(pending_ids, may_stop=may_stop)
            self._num_decoded = len(self.output_ids)

    def _finish_at_stop_string(self) -> None:
        """Drop the log probabilities of tokens that begin after the cut."""
        self.finish_reason = "stop"
        self.stop_reason = self._detokenizer.matched
        text_len = self._detokenizer.text_len
        self._entries = [entry for entry in self._entries if entry.start < text_len]
