"""Log probabilities in the shapes that clients know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from server.generation.choice import TokenEntry
from server.text.pieces import PieceTable
from worker.wire import TokenLogprobs

MINIMUM: Final = -9999.0
"""JSON has no infinity."""


def token_text(pieces: PieceTable, token_id: int) -> str:
    return pieces[token_id].decode("utf-8", "replace")


def _distinct_text(pieces: PieceTable, token_id: int) -> str:
    """As a key: tokens that are no text of their own are told apart by their bytes."""
    piece = pieces[token_id]
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _clamped(logprob: float) -> float:
    return logprob if logprob > MINIMUM else MINIMUM  # also for NaN


def chat_logprobs(pieces: PieceTable, entries: Iterable[TokenEntry], num_top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    content = []
    for entry in entries:
        top = [_chat_token(pieces, token_id, logprob) for token_id, logprob in entry.logprobs.top[:num_top]]
        content.append({**_chat_token(pieces, entry.token_id, entry.logprobs.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(pieces: PieceTable, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(pieces, token_id),
        "logprob": _clamped(logprob),
        "bytes": list(pieces[token_id]),
    }


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, built entry by entry; the four lists have one item a token."""

    def __init__(self, pieces: PieceTable, num_top: int) -> None:
        self._pieces = pieces
        self._num_top = num_top
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top_logprobs: list[dict[str, float] | None] = []
        self._text_offset: list[int] = []

    def add(self, token_id: int, logprobs: TokenLogprobs | None, offset: int) -> None:
        """`logprobs` is None for the first token of a prompt."""
        self._tokens.append(token_text(self._pieces, token_id))
        self._text_offset.append(offset)
        if logprobs is None:
            self._token_logprobs.append(None)
            self._top_logprobs.append(None)
            return
        top = {_distinct_text(self._pieces, id_): _clamped(value) for id_, value in logprobs.top[: self._num_top]}
        top[_distinct_text(self._pieces, token_id)] = _clamped(logprobs.logprob)
        self._token_logprobs.append(_clamped(logprobs.logprob))
        self._top_logprobs.append(top)

    def fields(self) -> dict[str, Any]:
        return {
            "text_offset": self._text_offset,
            "token_logprobs": self._token_logprobs,
            "tokens": self._tokens,
            "top_logprobs": self._top_logprobs,
        }


def prompt_logprobs(
    pieces: PieceTable, prompt_ids: Sequence[int], positions: Sequence[TokenLogprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token and the best; null for the first."""
    answers: list[dict[str, Any] | None] = []
    for token_id, logprobs in zip(prompt_ids, positions, strict=False):
        if logprobs is None:
            answers.append(None)
            continue
        ranked = {id_: (value, rank) for rank, (id_, value) in enumerate(logprobs.top[:num_top], 1)}
        ranked.setdefault(token_id, (logprobs.logprob, 0))
        answers.append(
            {
                str(id_): {"logprob": _clamped(value), "rank": rank or None, "decoded_token": token_text(pieces, id_)}
                for id_, (value, rank) in ranked.items()
            }
        )
    return answers
