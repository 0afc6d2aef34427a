"""Text to token ids for one model, from the bundle its workers serve; long texts in slices, and words without an end in
a thread: the tokenizer's own code releases the GIL.

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

from server.pace import Pace
from server.text.bounds import length_bound
from server.text.control_tokens import NOTHING, TextTokenizer, template_tokens
from server.text.pieces import PieceTable
from server.text.words import WINDOW_CHARS, windows, words_of
from worker.wire import TokenizerBundle

INLINE_CHARS: Final = 8192
"""Shorter texts are tokenised in one go: about a millisecond."""
MAX_CACHED_BYTES: Final = 48 << 20
"""Of segments with their ids."""
MAX_DROPPED: Final = 1 << 16
"""Ids ahead of those that are kept, before they are dropped."""


class TokenizerError(ValueError):
    """The bundle holds no tokenizer that we can use."""


class TooManyTokensError(ValueError):
    """A text does not fit. `at_least`: so many tokens it has for certain."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


class SegmentCache:
    """Token ids by segment text, least recently used out first, bounded by bytes. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
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

    def get(self, segment: str) -> list[int] | None:
        return self.get_many((segment,))[0]

    def put(self, segment: str, ids: list[int]) -> None:
        cost = _cost(segment, ids)
        if cost > self._max_bytes // 4:
            return
        with self._lock:
            if segment in self._entries:
                return
            self._entries[segment] = ids
            self.num_bytes += cost
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _cost(*self._entries.popitem(last=False))


def _cost(segment: str, ids: list[int]) -> int:
    """In bytes, at most: ids may be shared, and characters take up to four bytes."""
    return 200 + (len(segment) if segment.isascii() else 4 * len(segment)) + 40 * len(ids)


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
        self.bound = length_bound(layout)
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
        self._words = None if self._cut is None else words_of(layout, self.encode_texts)

    @property
    def caches_segments(self) -> bool:
        return self._cut is not None

    def encode_text(self, text: str, *, add_bos: bool = False, client_at: Collection[int] | None = None) -> list[int]:
        """The ids of a text; special tokens in it are special, as in the model's own tokenizer.

        But in a rendered prompt, for which `client_at` is given, those of clients are text (`Rendered`).
        """
        if client_at is not None and self._encodes_rendered(client_at):
            ids = self._texts.encode_rendered(text, client_at)
        else:
            ids = self._encode_whole(text) if self._cut is None else self._encode_segments(text, client_at or NOTHING)
        if add_bos and self.bos_id is not None and (not ids or ids[0] != self.bos_id):
            ids.insert(0, self.bos_id)
        return ids

    async def encode(
        self,
        text: str,
        *,
        add_bos: bool = False,
        client_at: Collection[int] | None = None,
        room: int | None = None,
        keep_last: int | None = None,
    ) -> list[int]:
        """`encode_text` in slices. Raises TooManyTokensError early for more than `room` tokens.

        `keep_last`: of the ids, only so many at the end are wanted; some more may come.
        """
        if len(text) <= INLINE_CHARS:
            return self.encode_text(text, add_bos=add_bos, client_at=client_at)
        if room is not None and (at_least := self.least_tokens(text)) > room:
            raise TooManyTokensError(at_least)
        if client_at is not None and self._encodes_rendered(client_at):
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(self.executor, self._texts.encode_rendered, text, client_at)
        elif self._cut is None:
            [ids] = await self._in_thread([text])
        else:
            ids = await self._encode_long(self._cut, text, client_at or NOTHING, room, keep_last)
        if add_bos and self.bos_id is not None and (not ids or ids[0] != self.bos_id):
            ids.insert(0, self.bos_id)
        return ids

    def _encodes_rendered(self, client_at: Collection[int]) -> bool:
        """Whether a rendered prompt is encoded as a whole, its control tokens behind aliases."""
        return self._may_spell or bool(client_at and self._renders_whole)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least, told without tokenising it."""
        return 0 if self.bound is None else self.bound.least_tokens(text)

    async def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Of each text, off the event loop if it is many or much."""
        if sum(map(len, texts)) + 16 * len(texts) <= INLINE_CHARS // 2:
            return self.encode_texts(texts)
        return await self._in_thread(texts)

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Of each text, by the tokenizer itself. Call it in a thread for many or long ones."""
        return [item.ids for item in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

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
            encoded = self.encode_texts(segments)
        for segment, ids in zip(segments, encoded, strict=True):
            self._cache.put(segment, ids)
        return encoded

    async def _encode_long(
        self, cut: re.Pattern[str], text: str, client_at: Collection[int], room: int | None, keep_last: int | None
    ) -> list[int]:
        """Segment by segment, and those that are new window by window. Raises TooManyTokensError."""
        ids: list[int] = []
        pace = Pace()
        start = at = 0
        while start < len(text):
            special = cut.search(text, at)
            if special is not None and special.start() + 1 in client_at and special[0] in self.control_tokens:
                at = special.start() + 1  # a client's: text
                await pace.rest()
                continue
            end = len(text) if special is None else special.start()
            if end > start:
                segment = text[start:end]
                with_control = at > start and self._texts.pattern.search(segment) is not None
                await self._extend(ids, segment, with_control, room, keep_last, pace)
            if special is None:
                break
            ids.append(self._special_ids[special[0]])
            start = at = special.end()
            _check_room(ids, room)
            await pace.rest()
        return ids

    async def _extend(
        self,
        ids: list[int],
        segment: str,
        with_control: bool,
        room: int | None,
        keep_last: int | None,
        pace: Pace,
    ) -> None:
        """By the ids of a segment. `with_control`: it holds control tokens, which are text."""
        known = self._cache.get(segment)
        if known is not None:
            ids.extend(known)
            _check_room(ids, room)
            return
        begun = len(ids)
        words, num_dropped = self._words, 0
        encode = self._texts.encode_texts if with_control else self.encode_texts
        for part in (segment,) if words is None else windows(segment):
            if len(part) > 2 * WINDOW_CHARS:
                [fresh] = await asyncio.get_running_loop().run_in_executor(self.executor, encode, [part])
            elif words is not None and not with_control and part.isascii():
                fresh = words.ids(part)
            else:
                [fresh] = encode([part])
            ids.extend(fresh)
            _check_room(ids, room)
            if keep_last is not None and (num_more := len(ids) - keep_last) > MAX_DROPPED:
                del ids[:num_more]
                num_dropped += num_more
            await pace.rest()
        if not num_dropped:
            self._cache.put(segment, ids[begun:])

    async def _in_thread(self, texts: list[str]) -> list[list[int]]:
        return await asyncio.get_running_loop().run_in_executor(self.executor, self.encode_texts, texts)


def _check_room(ids: list[int], room: int | None) -> None:
    if room is not None and len(ids) > room:
        raise TooManyTokensError(len(ids))


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
