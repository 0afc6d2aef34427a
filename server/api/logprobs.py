"""Log probabilities in the shapes that clients know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from server.api.job import Spread
from server.request.choice import TokenEntry
from server.text.detokenizer import TokenBytes
from worker.wire import TokenLogprobs

MINIMUM: Final = -9999.0
"""JSON has no infinity."""


def token_text(pieces: TokenBytes, token_id: int) -> str:
    return pieces[token_id].decode("utf-8", "replace")


def _distinct_text(pieces: TokenBytes, token_id: int) -> str:
    """As a key: tokens that are no text of their own are told apart by their bytes."""
    piece = pieces[token_id]
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _clamped(logprob: float) -> float:
    return logprob if logprob > MINIMUM else MINIMUM  # also for NaN


def chat_logprobs(pieces: TokenBytes, entries: Iterable[TokenEntry], num_top: int) -> Iterator[dict[str, Any]]:
    """`choices[].logprobs.content` of a chat answer."""
    for entry in entries:
        top = [_chat_token(pieces, token_id, logprob) for token_id, logprob in entry.logprobs.top[:num_top]]
        yield {**_chat_token(pieces, entry.token_id, entry.logprobs.logprob), "top_logprobs": top}


def _chat_token(pieces: TokenBytes, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(pieces, token_id),
        "logprob": _clamped(logprob),
        "bytes": list(pieces[token_id]),
    }


@dataclass(frozen=True, slots=True)
class Row:
    """One token of a completion or of its prompt. `logprobs` is None for the first token of a prompt."""

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int


def completion_logprobs(pieces: TokenBytes, num_top: int, rows: Callable[[], Iterator[Row]]) -> Spread:
    """`choices[].logprobs` of a completion: four lists of one item a token. `rows` begins anew for each."""
    return Spread(
        text_offset=(row.offset for row in rows()),
        token_logprobs=(None if row.logprobs is None else _clamped(row.logprobs.logprob) for row in rows()),
        tokens=(token_text(pieces, row.token_id) for row in rows()),
        top_logprobs=(_top(pieces, num_top, row) for row in rows()),
    )


def _top(pieces: TokenBytes, num_top: int, row: Row) -> dict[str, float] | None:
    if row.logprobs is None:
        return None
    top = {_distinct_text(pieces, id_): _clamped(value) for id_, value in row.logprobs.top[:num_top]}
    top[_distinct_text(pieces, row.token_id)] = _clamped(row.logprobs.logprob)
    return top


def prompt_logprobs(
    pieces: TokenBytes, prompt_ids: Sequence[int], positions: Iterable[TokenLogprobs | None], num_top: int
) -> Iterator[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token and the best; null for the first."""
    for token_id, logprobs in zip(prompt_ids, positions, strict=False):
        if logprobs is None:
            yield None
            continue
        ranked = {id_: (value, rank) for rank, (id_, value) in enumerate(logprobs.top[:num_top], 1)}
        ranked.setdefault(token_id, (logprobs.logprob, 0))
        yield {
            str(id_): {"logprob": _clamped(value), "rank": rank or None, "decoded_token": token_text(pieces, id_)}
            for id_, (value, rank) in ranked.items()
        }
