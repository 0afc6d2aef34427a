"""Encode text for one model, with the tokenizer.json that its workers serve.

A text is cut at the tokenizer's special tokens first. That is the tokenizer's own first step too, so the ids of the
whole are the ids of the segments in a row. Segments are cached, so a new turn tokenises only what is new (and that
from a cache of words, where the layout allows it: `pretoken_cache`):

    <|im_start|> user\nhello <|im_end|> \n <|im_start|> assistant\n
    special      cached       special     cached   special      cached

Long texts are encoded in slices on the event loop. Words without an end go to a thread: the library releases the GIL.
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

from server.event_loop import Pace
from server.text.control_tokens import NO_OFFSETS, TextTokenizer, tokens_of_template
from server.text.detokenizer import TokenBytes
from server.text.length_bound import length_bound
from server.text.pretoken_cache import WINDOW_CHARS, pretoken_cache, windows
from worker.wire import TokenizerBundle

INLINE_CHARS: Final = 8192
"""Shorter texts are tokenised in one go: about a millisecond."""
MAX_CACHED_BYTES: Final = 48 << 20
"""Bound on segments with their ids."""


class TokenizerError(ValueError):
    """The bundle holds no tokenizer that we can use."""


class TooManyTokensError(ValueError):
    """A text does not fit; it has at least `at_least` tokens."""

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
    """Return an upper bound in bytes: ids may be shared, and characters take up to four bytes."""
    return 200 + (len(segment) if segment.isascii() else 4 * len(segment)) + 40 * len(ids)


class Tokenizer:
    """One model's tokenizer. The synchronous methods are thread-safe; `executor` runs the long texts."""

    def __init__(self, bundle: TokenizerBundle, executor: ThreadPoolExecutor, plain_conversation: str = "") -> None:
        """`plain_conversation`: a conversation as the chat template renders it."""
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
        self.token_bytes = TokenBytes(self._tokenizer, layout)
        self.bound = length_bound(layout)
        self._cache = SegmentCache()
        self._special_ids, self._cut = _cutter(layout)
        added: list[dict[str, Any]] = layout.get("added_tokens", [])
        control = [
            token
            for token in added
            if token["content"] and (token["special"] or token["content"] in plain_conversation)
        ]
        self.control_tokens = frozenset(token["content"] for token in control)
        """What the tokenizer calls special, and what marks turns: text, when a client writes it."""
        self._texts = TextTokenizer(self._tokenizer, added, self.control_tokens)
        normalized = any(token["normalized"] for token in control)
        self._cuts_client_tokens = self._cut is not None and not normalized
        """Prompts with a client's control tokens can be cut into segments."""
        self._can_spell_control = normalized and layout.get("normalizer") is not None
        """The normalizer may turn other text into control tokens, so no prompt can be cut."""
        self._pretokens = None if self._cut is None else pretoken_cache(layout, self.encode_texts)

    @property
    def caches_segments(self) -> bool:
        return self._cut is not None

    def encode_text(
        self, text: str, *, add_bos: bool = False, client_offsets: Collection[int] | None = None
    ) -> list[int]:
        """Encode a text at once. Special tokens in it are special, as in the model's own tokenizer.

        `client_offsets`: in a rendered prompt, where control tokens of clients stand, which are text.
        """
        if self._needs_aliases(client_offsets):
            ids = self._texts.encode_rendered(text, client_offsets or NO_OFFSETS)
        elif self._cut is None:
            [ids] = self.encode_texts([text])
        else:
            ids = self._encode_segments(self._cut, text, client_offsets or NO_OFFSETS)
        return self._with_bos(ids) if add_bos else ids

    async def encode(
        self,
        text: str,
        *,
        add_bos: bool = False,
        client_offsets: Collection[int] | None = None,
        room: int | None = None,
    ) -> list[int]:
        """Encode a text in slices, as `encode_text`. Raises TooManyTokensError early for more than `room` tokens."""
        if len(text) <= INLINE_CHARS:
            return self.encode_text(text, add_bos=add_bos, client_offsets=client_offsets)
        if room is not None and (at_least := self.least_tokens(text)) > room:
            raise TooManyTokensError(at_least)
        if self._needs_aliases(client_offsets):
            offsets = client_offsets or NO_OFFSETS
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(self.executor, self._texts.encode_rendered, text, offsets)
        elif self._cut is None:
            [ids] = await self._in_thread([text])
        else:
            ids = await self._encode_long(self._cut, text, client_offsets or NO_OFFSETS, room)
        return self._with_bos(ids) if add_bos else ids

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, without tokenising it."""
        return 0 if self.bound is None else self.bound.least_tokens(text)

    async def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode each text, off the event loop if they are many or long."""
        if sum(map(len, texts)) + 16 * len(texts) <= INLINE_CHARS // 2:
            return self.encode_texts(texts)
        return await self._in_thread(texts)

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Encode each text by the library, uncached. Call it in a thread for many or long ones."""
        return [item.ids for item in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def token_id(self, token: str) -> int | None:
        """Return the id of one token by its text; None when the vocabulary lacks it."""
        id_: int | None = self._tokenizer.token_to_id(token)
        return id_

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special)

    def _needs_aliases(self, client_offsets: Collection[int] | None) -> bool:
        """Return whether a rendered prompt must be encoded whole, the template's control tokens behind aliases."""
        if client_offsets is None:
            return False
        return self._can_spell_control or (bool(client_offsets) and not self._cuts_client_tokens)

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self.bos_id is None or (ids and ids[0] == self.bos_id):
            return ids
        return [self.bos_id, *ids]

    def _encode_segments(self, cut: re.Pattern[str], text: str, client_offsets: Collection[int]) -> list[int]:
        parts = self._parts(cut, text, client_offsets)
        segments = [part for part in parts[::2] if part]
        found = self._cache.get_many(segments)
        ids: list[int] = []
        known = iter(zip(segments, found, strict=True))
        for index, part in enumerate(parts):
            if index % 2:
                ids.append(self._special_ids[part])
            elif part:
                segment, segment_ids = next(known)
                ids += self._encode_segment(segment, bool(client_offsets)) if segment_ids is None else segment_ids
        return ids

    def _parts(self, cut: re.Pattern[str], text: str, client_offsets: Collection[int]) -> list[str]:
        """Return segments and special tokens in turn; the first and the last are segments."""
        if not client_offsets:
            return cut.split(text)
        parts, end = [], 0
        for token in tokens_of_template(text, cut, self.control_tokens, client_offsets):
            parts += [text[end : token.start()], token[0]]
            end = token.end()
        return [*parts, text[end:]]

    def _encode_segment(self, segment: str, may_hold_control: bool) -> list[int]:
        if may_hold_control and self._texts.pattern.search(segment):
            [ids] = self._texts.encode_texts([segment])
        elif self._pretokens is not None and segment.isascii():
            ids = self._pretokens.ids(segment)
        else:
            [ids] = self.encode_texts([segment])
        self._cache.put(segment, ids)
        return ids

    async def _encode_long(
        self, cut: re.Pattern[str], text: str, client_offsets: Collection[int], room: int | None
    ) -> list[int]:
        """Encode segment by segment, and new ones window by window. Raises TooManyTokensError."""
        ids: list[int] = []
        pace = Pace()
        start = at = 0
        while start < len(text):
            special = cut.search(text, at)
            if special is not None and special.start() + 1 in client_offsets and special[0] in self.control_tokens:
                at = special.start() + 1  # a client's: text
                await pace.rest()
                continue
            end = len(text) if special is None else special.start()
            if end > start:
                segment = text[start:end]
                holds_control = at > start and self._texts.pattern.search(segment) is not None
                await self._extend(ids, segment, holds_control, room, pace)
            if special is None:
                break
            ids.append(self._special_ids[special[0]])
            start = at = special.end()
            _check_room(ids, room)
            await pace.rest()
        return ids

    async def _extend(self, ids: list[int], segment: str, holds_control: bool, room: int | None, pace: Pace) -> None:
        """Append the ids of a segment. `holds_control`: it holds control tokens, which are text."""
        [known] = self._cache.get_many((segment,))
        if known is not None:
            ids.extend(known)
            _check_room(ids, room)
            return
        begun = len(ids)
        pretokens = self._pretokens
        encode = self._texts.encode_texts if holds_control else self.encode_texts
        for part in (segment,) if pretokens is None else windows(segment):
            if len(part) > 2 * WINDOW_CHARS:
                [fresh] = await asyncio.get_running_loop().run_in_executor(self.executor, encode, [part])
            elif pretokens is not None and not holds_control and part.isascii():
                fresh = pretokens.ids(part)
            else:
                [fresh] = encode([part])
            ids.extend(fresh)
            _check_room(ids, room)
            await pace.rest()
        self._cache.put(segment, ids[begun:])

    async def _in_thread(self, texts: list[str]) -> list[list[int]]:
        return await asyncio.get_running_loop().run_in_executor(self.executor, self.encode_texts, texts)


def _check_room(ids: list[int], room: int | None) -> None:
    if room is not None and len(ids) > room:
        raise TooManyTokensError(len(ids))


def _cutter(layout: dict[str, Any]) -> tuple[dict[str, int], re.Pattern[str] | None]:
    """Return the special tokens' ids and the pattern that cuts at them; None where segments are not independent."""
    added = [token for token in layout.get("added_tokens", ()) if not token["normalized"]]
    ids = {token["content"]: token["id"] for token in added}
    strips = any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
    if not ids or strips or _depends_on_place(layout):
        return ids, None
    longest_first = sorted(ids, key=len, reverse=True)
    return ids, re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def _depends_on_place(layout: dict[str, Any]) -> bool:
    """Find a Metaspace with prepend_scheme `first`, which treats a text's first segment in another way."""
    return '"first"' in json.dumps([layout.get("pre_tokenizer"), layout.get("normalizer")])
