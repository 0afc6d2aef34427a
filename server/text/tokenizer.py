"""Encode text for one model, with the tokenizer.json that its workers serve.

A text is cut at special tokens first, as the tokenizer itself does. So the ids of the whole are those of the segments
in a row. Segments are cached, so a new turn tokenises only its new text. Where the layout allows it, words are cached
too (`pretoken_cache`):

    <|im_start|> user\nhello <|im_end|> \n <|im_start|> assistant\n
    special      cached       special     cached   special      cached

Long texts are encoded window by window, in slices on the event loop, up to the limit of the context. Control tokens
that a client wrote cut nothing: their segment is encoded as text (`TextTokenizer`).

A text that cannot be cut is encoded whole, in a thread: the library releases the GIL. Its layout is unknown, or has
special tokens that depend on their neighbours.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Final

import tokenizers

from server.event_loop import TimeSlice, run_sliced
from server.text.control_tokens import TextTokenizer, any_of, holds
from server.text.detokenizer import TokenBytes
from server.text.length_bound import length_bound
from server.text.long_words import long_words
from server.text.pretoken_cache import WINDOW_CHARS, pretoken_cache, windows
from worker.wire import TokenizerBundle

INLINE_CHARS: Final = 8192
"""Shorter texts are tokenised in one go: about a millisecond."""
SEARCH_CHARS: Final = 1 << 16
"""Characters searched for special tokens at once."""
MAX_SEGMENT_CHARS: Final = 1 << 20
"""Longer segments are not cached."""
MAX_CACHED_BYTES: Final = 48 << 20
"""Bound on segments with their ids."""


class TokenizerError(ValueError):
    """The bundle holds no usable tokenizer."""


class TooManyTokensError(ValueError):
    """A text has more tokens than fit: `at_least` this number."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


class SegmentCache:
    """Token ids by segment text, least recently used out first, bounded by bytes."""

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[str, list[int]] = OrderedDict()

    def get(self, segment: str) -> list[int] | None:
        ids = self._entries.get(segment)
        if ids is not None:
            self._entries.move_to_end(segment)
        return ids

    def put(self, segment: str, ids: list[int]) -> None:
        """Keep the ids, unless they take more than a quarter of the bound."""
        cost = _cost(segment, ids)
        if cost > self._max_bytes // 4 or segment in self._entries:
            return
        self._entries[segment] = ids
        self.num_bytes += cost
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _cost(*self._entries.popitem(last=False))


def _cost(segment: str, ids: list[int]) -> int:
    """Return an upper bound in bytes: ids may be shared, and characters take up to four bytes."""
    return 200 + (len(segment) if segment.isascii() else 4 * len(segment)) + 40 * len(ids)


class Tokenizer:
    """One model's tokenizer, used on the event loop; `executor` runs the long texts."""

    def __init__(self, bundle: TokenizerBundle, executor: ThreadPoolExecutor, plain_conversation: str = "") -> None:
        """`plain_conversation`: a conversation as the chat template renders it."""
        self.is_engine_only = bool(bundle.engine_vocabulary)
        """Only the engine can read the vocabulary: here, only the control tokens are known."""
        try:
            tokenizer_json = (
                _empty_vocabulary(bundle.engine_vocabulary) if self.is_engine_only else bundle.tokenizer_json
            )
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
            layout: dict[str, Any] = json.loads(tokenizer_json)
        except Exception as error:  # the library raises bare Exceptions of its own
            raise TokenizerError(f"tokenizer_json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.executor = executor
        self.eos_ids = frozenset(bundle.eos_token_ids)
        self.bos_id = self._tokenizer.token_to_id(bundle.bos_token) if bundle.add_bos and bundle.bos_token else None
        self.token_bytes = TokenBytes(self._tokenizer, layout)
        self.bound = length_bound(layout)
        self._cache = SegmentCache()
        self._special_ids, self._cut = _cutter(layout)
        self._longest_special = max(map(len, self._special_ids), default=0)
        added: list[dict[str, Any]] = layout.get("added_tokens", [])
        control = [
            each for each in added if (text := each["content"]) and (each["special"] or text in plain_conversation)
        ]
        self.added_tokens = {token["content"]: token["id"] for token in added if token["content"].strip()}
        """The ids of tokens that no text is merged into, by their texts."""
        self.added_pattern = re.compile(f"({any_of(self.added_tokens).pattern})")
        self.shown_ids = lru_cache(64)(self._shown_ids)
        """Return the special tokens that a parser has to see for its markers, from a cache."""
        self.control_tokens = frozenset(token["content"] for token in control)
        """Special tokens, and tokens that mark turns. Written by a client, they count as text."""
        self._prefix, self._suffix = self._affixes()
        self._texts = TextTokenizer(self._tokenizer, added, self.control_tokens)
        self.can_spell_control = layout.get("normalizer") is not None and any(token["normalized"] for token in control)
        """The normalizer may turn other text into control tokens."""
        self._pretokens = None if self._cut is None else pretoken_cache(layout, self.encode_texts)
        self._long_words = None if self._pretokens is None else long_words(self._texts.tokenizer, layout)
        self._cuts_control = self._cut is not None and self.control_tokens <= self._special_ids.keys()

    async def encode(
        self,
        text: str,
        *,
        add_bos: bool = False,
        client_offsets: Sequence[int] | None = None,
        limit: float = math.inf,
    ) -> list[int]:
        """Encode a text. Special tokens in it are special, as in the model's own tokenizer.

        `client_offsets`: where clients' control tokens begin in a rendered prompt, sorted; they are text.
        Raises TooManyTokensError early for a long text with more than `limit` tokens.
        """
        is_long = len(text) > INLINE_CHARS
        if is_long and self.bound is not None and (at_least := await run_sliced(self.bound.least_tokens(text))) > limit:
            raise TooManyTokensError(at_least)
        has_client_tokens = client_offsets is not None and bool(client_offsets or self.can_spell_control)
        if self._cut is not None and (not has_client_tokens or (self._cuts_control and not self.can_spell_control)):
            ids = await self._encode_segments(self._cut, text, client_offsets or (), limit if is_long else None)
        elif has_client_tokens and is_long:
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(self.executor, self._texts.encode, text, client_offsets or ())
        elif has_client_tokens:
            ids = self._texts.encode(text, client_offsets or ())
        else:
            [ids] = await self.encode_batch([text])
        if not add_bos or self.bos_id is None or (ids and ids[0] == self.bos_id):
            return ids
        return [self.bos_id, *ids]

    async def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode each text, off the event loop if they are many or long."""
        if sum(map(len, texts)) + 16 * len(texts) <= INLINE_CHARS // 2:
            return self.encode_texts(texts)
        return await asyncio.get_running_loop().run_in_executor(self.executor, self.encode_texts, texts)

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Encode each text by the library, uncached. Call it in a thread for many or long ones."""
        return [item.ids for item in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def with_special_tokens(self, ids: list[int]) -> list[int]:
        """Add the special tokens that the tokenizer itself puts around a text, as embedding models expect."""
        return [*self._prefix, *ids, *self._suffix]

    def _affixes(self) -> tuple[list[int], list[int]]:
        plain, whole = (self._tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
        for begin in range(len(whole) - len(plain) + 1):
            if whole[begin : (end := begin + len(plain))] == plain:
                return whole[:begin], whole[end:]
        return [], []

    def _shown_ids(self, markers: tuple[str, ...]) -> frozenset[int]:
        """Find the tokens that are, or are in, one of some texts."""
        special = ((token, id_) for token, id_ in self.added_tokens.items() if id_ in self.token_bytes.special_ids)
        return frozenset(id_ for token, id_ in special if any(token in text for text in markers))

    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it; None for an id without one."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    async def _encode_segments(
        self, cut: re.Pattern[str], text: str, client_offsets: Sequence[int], limit: float | None
    ) -> list[int]:
        """Encode segment by segment, in slices if `limit` is given. Raises TooManyTokensError."""
        ids: list[int] = []
        time_slice = TimeSlice()
        start = at = 0
        holds_client_tokens = False
        while True:
            special = cut.search(text, at, at + SEARCH_CHARS)
            if special is None and at + SEARCH_CHARS < len(text):  # a token may begin where this has ended
                at += SEARCH_CHARS - self._longest_special
                await time_slice.rest()
                continue
            if special is not None:
                special = cut.match(text, special.start())  # a longer token may go on where the search has ended
            if special is not None and client_offsets and holds(client_offsets, special.start()):
                at = special.start() + 1
                holds_client_tokens = True
                if limit is not None:
                    await time_slice.rest()
                continue
            end = len(text) if special is None else special.start()
            if start < end:
                await self._extend(ids, text, start, end, limit, time_slice, as_text=holds_client_tokens)
            if special is not None:
                ids.append(self._special_ids[special[0]])
                start = at = special.end()
                holds_client_tokens = False
            if limit is not None:
                _check_length(ids, limit)
                await time_slice.rest()
            if special is None:
                return ids

    async def _extend(
        self, ids: list[int], text: str, start: int, end: int, limit: float | None, turn: TimeSlice, *, as_text: bool
    ) -> None:
        """Append the ids of a segment, in windows if it is new; `as_text`: it holds control tokens of a client."""
        segment = text[start:end] if end - start <= MAX_SEGMENT_CHARS else None
        if segment is not None and (known := self._cache.get(segment)) is not None:
            ids += known
            return
        begun = len(ids)
        shared: dict[int, int] = {}
        for bounds in ((start, end),) if self._pretokens is None else windows(text, start, end):
            for fresh in self._parts(text, *bounds, as_text=as_text):
                if limit is None:
                    ids += fresh
                else:  # one object for each id: a million objects of their own take 32 MB
                    ids += [shared.setdefault(id_, id_) for id_ in fresh]
                    _check_length(ids, limit)
                    await turn.rest()
            if limit is not None:
                await turn.rest()
        if as_text:
            self._texts.check(ids[begun:])
        if segment is not None:
            self._cache.put(segment, ids[begun:])

    def _parts(self, text: str, start: int, end: int, *, as_text: bool) -> Iterator[list[int]]:
        """Yield the ids of a window, in several parts if it is long."""
        if end - start > 2 * WINDOW_CHARS and self._long_words is not None:
            yield from self._long_words.ids(text, start, end)
            return
        part = text[start:end]
        if as_text:
            yield from self._texts.encode_as_text([part])
        elif self._pretokens is not None and part.isascii():
            yield self._pretokens.ids(part)
        else:
            yield from self.encode_texts([part])


def _check_length(ids: list[int], limit: float) -> None:
    if len(ids) > limit:
        raise TooManyTokensError(len(ids))


def _empty_vocabulary(engine_vocabulary: bytes) -> bytes:
    """Return a tokenizer.json with the added tokens of a vocabulary that only the engine can read."""
    steps = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"))
    added = json.loads(engine_vocabulary)["added_tokens"]
    model = {"type": "BPE", "vocab": {}, "merges": []}
    return json.dumps(steps | {"version": "1.0", "model": model, "added_tokens": added}).encode()


def _cutter(layout: dict[str, Any]) -> tuple[dict[str, int], re.Pattern[str] | None]:
    """Return the special tokens' ids and the pattern that cuts at them; None where segments are not independent."""
    added = [token for token in layout.get("added_tokens", ()) if not token["normalized"]]
    ids = {token["content"]: token["id"] for token in added}
    strips = any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
    # a Metaspace with prepend_scheme `first` treats a text's first segment in another way
    depends_on_place = '"first"' in json.dumps([layout.get("pre_tokenizer"), layout.get("normalizer")])
    return ids, None if not ids or strips or depends_on_place else any_of(ids)
