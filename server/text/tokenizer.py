"""Text to token ids for one model, from the bundle its workers serve; long texts off the event loop.

A text is cut at the tokenizer's special tokens first: that is the tokenizer's own first step too, so that the ids of
the whole are the ids of the segments in a row. Segments are kept, so that a new turn tokenises only what is new (and
that word by word, from a cache of words, where the layout allows it: `words`):

    <|im_start|> user\nhello <|im_end|> \n <|im_start|> assistant\n
    special      cached       special     cached   special      cached
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import tokenizers

from server.text.control_tokens import NOTHING, TextTokenizer, template_tokens
from server.text.pieces import PieceTable
from server.text.words import words_of
from worker.wire import TokenizerBundle

INLINE_CHARS: Final = 8192
"""Shorter texts are tokenised on the event loop: about a millisecond, less than a thread's hand-over under load."""
MAX_CACHED_TOKENS: Final = 2_000_000
"""About 80 MB of segments."""


class TokenizerError(ValueError):
    """The bundle holds no tokenizer that we can use."""


class SegmentCache:
    """Token ids by segment text, least recently used out first, bounded by tokens. Thread-safe."""

    def __init__(self, max_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._entries: OrderedDict[str, list[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get_many(self, segments: Sequence[str]) -> list[list[int] | None]:
        with self._lock:
            found: list[list[int] | None] = []
            for segment in segments:
                ids = self._entries.get(segment)
                if ids is not None:
                    self._entries.move_to_end(segment)
                found.append(ids)
            return found

    def put(self, segment: str, ids: list[int]) -> None:
        cost = len(ids) + 1
        if cost > self._max_tokens // 4:
            return
        with self._lock:
            if segment in self._entries:
                return
            self._entries[segment] = ids
            self._num_tokens += cost
            while self._num_tokens > self._max_tokens:
                _, dropped = self._entries.popitem(last=False)
                self._num_tokens -= len(dropped) + 1


class Tokenizer:
    """One model's tokenizer. The synchronous methods are thread-safe; `executor` runs the long texts."""

    def __init__(self, bundle: TokenizerBundle, executor: ThreadPoolExecutor, turns: str = "") -> None:
        """`turns`: what the chat template writes around a plain conversation."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(bundle.tokenizer_json)
            layout: dict[str, Any] = json.loads(bundle.tokenizer_json)
        except Exception as error:  # the library raises bare Exceptions of its own
            raise TokenizerError(f"tokenizer_json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.executor = executor
        self.vocab_size = bundle.vocab_size
        self.eos_ids = frozenset(bundle.eos_token_ids)
        self.bos_id = self._tokenizer.token_to_id(bundle.bos_token) if bundle.add_bos and bundle.bos_token else None
        self.pieces = PieceTable(self._tokenizer, layout)
        self._cache = SegmentCache()
        self._special_ids, self._cut = _cutter(layout)
        added: list[dict[str, Any]] = layout.get("added_tokens", [])
        control = [token for token in added if token["content"] and (token["special"] or token["content"] in turns)]
        self.control_tokens = frozenset(token["content"] for token in control)
        """Those that clients' texts shall not hold: what the tokenizer calls special, and what marks turns."""
        self._texts = TextTokenizer(self._tokenizer, added, self.control_tokens)
        normalized = any(token["normalized"] for token in control)
        self._renders_whole = self._cut is None or normalized
        """A prompt with control tokens of a client is encoded at once."""
        self._may_spell = normalized and layout.get("normalizer") is not None
        """A normalizer may make control tokens of other texts."""
        self._words = None if self._cut is None else words_of(layout, self._encode_texts)

    @property
    def caches_segments(self) -> bool:
        return self._cut is not None

    def encode_text(self, text: str, *, add_bos: bool = False, client_at: Collection[int] | None = None) -> list[int]:
        """The ids of a text; special tokens in it are special, as in the model's own tokenizer.

        But in a rendered prompt, for which `client_at` is given, those of clients are text (`Rendered`).
        """
        if client_at is not None and (self._may_spell or (client_at and self._renders_whole)):
            ids = self._texts.encode_rendered(text, client_at)
        else:
            ids = self._encode_whole(text) if self._cut is None else self._encode_segments(text, client_at or NOTHING)
        if add_bos and self.bos_id is not None and (not ids or ids[0] != self.bos_id):
            ids.insert(0, self.bos_id)
        return ids

    async def encode(self, text: str, *, add_bos: bool = False, client_at: Collection[int] | None = None) -> list[int]:
        """`encode_text`, in a thread when the text is long."""
        if len(text) <= INLINE_CHARS or self._is_cached(text, client_at or NOTHING):
            return self.encode_text(text, add_bos=add_bos, client_at=client_at)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self.executor, lambda: self.encode_text(text, add_bos=add_bos, client_at=client_at)
        )

    def token_id(self, token: str) -> int | None:
        """The id of one token by its text, None when the vocabulary has no such token."""
        id_: int | None = self._tokenizer.token_to_id(token)
        return id_

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special)

    def _encode_whole(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _encode_segments(self, text: str, client_at: Collection[int]) -> list[int]:
        parts = self._parts(text, client_at)
        segments = [part for part in parts[::2] if part]
        found = self._cache.get_many(segments)
        missing = [segment for segment, ids in zip(segments, found, strict=True) if ids is None]
        fresh = iter(self._encode_missing(missing, with_control=bool(client_at)))
        cached = iter(found)
        ids: list[int] = []
        for index, part in enumerate(parts):
            if index % 2:
                ids.append(self._special_ids[part])
            elif part:
                known = next(cached)
                ids.extend(next(fresh) if known is None else known)
        return ids

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        return [item.ids for item in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _parts(self, text: str, client_at: Collection[int]) -> list[str]:
        """Segments with the tokens between them."""
        assert self._cut is not None
        if not client_at:
            return self._cut.split(text)
        parts, end = [], 0
        for token in template_tokens(text, self._cut, self.control_tokens, client_at):
            parts += [text[end : token.start()], token[0]]
            end = token.end()
        return [*parts, text[end:]]

    def _encode_missing(self, segments: list[str], *, with_control: bool = False) -> list[list[int]]:
        if not segments:
            return []
        words = self._words
        if with_control and any(map(self._texts.pattern.search, segments)):
            encoded = [
                self._texts.encode(segment)
                if self._texts.pattern.search(segment)
                else self._encode_missing([segment])[0]
                for segment in segments
            ]
        elif words is not None and all(map(str.isascii, segments)):
            encoded = [words.ids(segment) for segment in segments]
        else:
            encoded = self._encode_texts(segments)
        for segment, ids in zip(segments, encoded, strict=True):
            self._cache.put(segment, ids)
        return encoded

    def _is_cached(self, text: str, client_at: Collection[int]) -> bool:
        """Whether little enough is new to tokenise it here."""
        if self._cut is None:
            return False
        segments = [part for part in self._parts(text, client_at)[::2] if part]
        found = self._cache.get_many(segments)
        new_chars = sum(len(segment) for segment, ids in zip(segments, found, strict=True) if ids is None)
        return new_chars <= INLINE_CHARS


def _cutter(layout: dict[str, Any]) -> tuple[dict[str, int], re.Pattern[str] | None]:
    """The special tokens' ids and the pattern that cuts at them; no pattern where segments are not independent."""
    added = [token for token in layout.get("added_tokens", ()) if not token["normalized"]]
    ids = {token["content"]: token["id"] for token in added}
    strips = any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
    if not ids or strips or _depends_on_place(layout):
        return ids, None
    longest_first = sorted(ids, key=len, reverse=True)
    return ids, re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def _depends_on_place(layout: dict[str, Any]) -> bool:
    """A Metaspace with prepend_scheme `first` treats the text's first segment alone in another way."""
    return '"first"' in json.dumps([layout.get("pre_tokenizer"), layout.get("normalizer")])
