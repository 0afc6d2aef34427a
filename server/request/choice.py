"""One of the n answers to a prompt: its tokens as received, its text as released, and why it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from server.text.detokenizer import Detokenizer, TextRules, TokenBytes
from worker.wire import ChoiceState, Finished, Frame, TokenLogprobs, Tokens

StopReason = Literal["stop", "length"]


@dataclass(slots=True, eq=False)
class TokenEntry:
    """A generated token with its log probabilities; `start` is its text's offset in the choice's text."""

    token_id: int
    logprobs: TokenLogprobs
    start: int


@dataclass(slots=True, eq=False)
class ChoiceDelta:
    """What one choice gained since the last delta; the last one of a choice has a finish_reason."""

    choice: int
    text: str
    token_ids: list[int]
    entries: list[TokenEntry]
    finish_reason: StopReason | None
    stop_reason: str | int | None = None
    """The stop string, or the id of the stop token, that ended the choice (vLLM's extension)."""


def merged(frames: Sequence[Frame]) -> Iterator[Frame]:
    """The same with runs of tokens of one choice made one frame: a reader that lags gets many at once."""
    run: list[int] = []
    choice = -1
    for frame in frames:
        if type(frame) is Tokens and frame.logprobs is None:
            if run and frame.choice != choice:
                yield Tokens(choice, tuple(run))
                run = []
            choice = frame.choice
            run += frame.token_ids
            continue
        if run:
            yield Tokens(choice, tuple(run))
            run = []
        yield frame
    if run:
        yield Tokens(choice, tuple(run))


class Choice:
    """Fed with frames, drained of deltas. `reset` forgets everything, for a start on another worker."""

    __slots__ = (
        "_detokenizer",
        "_entries",
        "_fresh_ids",
        "_pieces",
        "_rules",
        "_text",
        "_with_logprobs",
        "finish_reason",
        "index",
        "output_ids",
        "reported",
        "seed",
        "stop_reason",
    )

    def __init__(self, index: int, seed: int, pieces: TokenBytes, rules: TextRules, *, with_logprobs: bool) -> None:
        self.index = index
        self.seed = seed
        self._pieces = pieces
        self._rules = rules
        self._with_logprobs = with_logprobs
        self.reset()

    def reset(self) -> None:
        self.output_ids: list[int] = []
        self.finish_reason: StopReason | None = None
        self.stop_reason: str | int | None = None
        self.reported = False
        """The delta with the finish_reason was handed out."""
        self._detokenizer = Detokenizer(self._pieces, self._rules)
        self._fresh_ids: list[int] = []
        self._entries: list[TokenEntry] = []
        self._text = ""

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def state(self) -> ChoiceState:
        return ChoiceState(self.index, self.seed, tuple(self.output_ids))

    def take(self, frame: Tokens) -> bool:
        """Tokens of an unfinished choice. True when a stop string among them has finished it."""
        if not self._rules.stops and not self._with_logprobs:
            self.output_ids.extend(frame.token_ids)
            self._fresh_ids.extend(frame.token_ids)
            self._text += self._detokenizer.feed(frame.token_ids)
            return False
        logprobs: Sequence[TokenLogprobs | None] = frame.logprobs or (None,) * len(frame.token_ids)
        for token_id, entry in zip(frame.token_ids, logprobs, strict=True):
            self.output_ids.append(token_id)
            self._fresh_ids.append(token_id)
            if entry is not None:
                self._entries.append(TokenEntry(token_id, entry, self._detokenizer.num_chars))
            self._text += self._detokenizer.feed((token_id,))
            if self._detokenizer.stopped:
                self._stop_at_string()
                return True
        return False

    def finish(self, frame: Finished) -> None:
        """The worker's last word; `frame.reason` is not abort."""
        assert frame.reason != "abort", "an aborted choice has no answer"
        self._finish(frame.reason, frame.stop_token_id)

    def finish_if_complete(self, max_tokens: int) -> None:
        """For tokens whose Finished frame was lost with its worker."""
        if self.output_ids and self.output_ids[-1] in self._rules.terminal_ids:
            self._finish("stop", self.output_ids[-1])
        elif len(self.output_ids) >= max_tokens:
            self._finish("length", None)

    def drain(self) -> ChoiceDelta | None:
        """What is new, or None. Log probabilities wait for the text of their token."""
        ended = self.done and not self.reported
        if not self._fresh_ids and not ended:
            return None
        entries = self._entries
        if entries and not self.done:
            text_len = self._detokenizer.text_len
            ready = next((i for i, entry in enumerate(entries) if entry.start >= text_len), len(entries))
            self._entries = entries[ready:]
            entries = entries[:ready]
        else:
            self._entries = []
        delta = ChoiceDelta(
            self.index, self._text, self._fresh_ids, entries, self.finish_reason if ended else None, self.stop_reason
        )
        self._fresh_ids = []
        self._text = ""
        self.reported = ended or self.reported
        return delta

    def _finish(self, reason: StopReason, stop_token_id: int | None) -> None:
        self._text += self._detokenizer.finish()
        if self._detokenizer.stopped:
            self._stop_at_string()
            return
        self.finish_reason = reason
        if stop_token_id is not None and reason == "stop" and stop_token_id not in self._pieces.special_ids:
            self.stop_reason = stop_token_id

    def _stop_at_string(self) -> None:
        """Tokens that begin behind the cut are no part of the answer."""
        self.finish_reason = "stop"
        self.stop_reason = self._detokenizer.matched
        text_len = self._detokenizer.text_len
        self._entries = [entry for entry in self._entries if entry.start < text_len]
