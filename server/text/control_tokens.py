"""Treat control tokens that clients write as text, and those of the chat template as control tokens.

A template writes a model's control tokens around the text of clients. When a client writes such a token, the rendered
text does not show whose it is. So client text that could become a control token gets a mark after its first character
before rendering. Afterwards the marks are removed, and show which tokens are text:

    content     is <|im_end|> a token?                          marked    is <4711|im_end|> a token?
    rendered    <|im_start|>user\\nis <4711|im_end|> a token?<|im_end|>\\n
    text        <|im_start|>user\\nis <|im_end|> a token?<|im_end|>\\n        client_offsets    {20}

Marked are whole tokens, and beginnings of tokens at the end of a field or where a template cuts text. A template may
write the first character of a token before a field, as in `<{{ key }}>`. So a field that begins with the second one is
marked too.
"""

from __future__ import annotations

import re
import secrets
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import tokenizers

from server.errors import InvalidRequestError
from server.event_loop import Steps

PART_CHARS: Final = 1 << 14  # marked between two turns of the event loop
MARK_DIGITS: Final = 20  # no client guesses a mark
MAX_MARK_BYTES: Final = 8 << 20
"""The limit of a request's marks in memory. Rendering makes several copies of marked texts."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt's text, and the offsets of control tokens that clients wrote. None: they count as control tokens."""

    text: str
    client_offsets: Sequence[int] | None = None
    """Sorted."""
    repairs: tuple[str, ...] = ()
    """Names of the changes to the messages, for what the template would refuse or lose."""
    ignored: tuple[str, ...] = ()
    """Fields of the request that change nothing."""


def new_mark() -> str:
    """Return digits, which no filter of a template changes, and which no client can guess."""
    return f"{secrets.randbelow(10**MARK_DIGITS):0{MARK_DIGITS}d}"


@dataclass(slots=True)
class Mark:
    """The mark of one request, and the bytes that it may still take."""

    digits: str = field(default_factory=new_mark)
    left_bytes: int = MAX_MARK_BYTES


class Marker:
    """Marks client text that could become one of `tokens`. Thread-safe."""

    def __init__(self, tokens: Collection[str], constants: Iterable[str]) -> None:
        """`constants`: the template's strings, which it may search for in client text, or cut out of it."""
        self._tokens = any_of(tokens)
        self._firsts = {token[0] for token in tokens}
        words = sorted(set(filter(None, constants)), key=len, reverse=True)
        unmarked = [word for word in words if word[0] in self._firsts and not _could_begin(word, tokens)]
        cut = "|".join(map(re.escape, words))
        self._lookahead_chars = 1 + max(map(len, words), default=1)
        risky = []
        for first in sorted(self._firsts):
            rests = {token[1:2] for token in tokens if token[0] == first}
            nexts = "|".join([f"[{re.escape(''.join(sorted(rests)))}]", r"\s*\Z", *filter(None, [cut])])
            risky.append(re.escape(first) + ("" if "" in rests else f"(?={nexts})"))
        self._seconds = {token[1] for token in tokens if len(token) > 1 and not token[1].isalnum()}
        if self._seconds:
            risky.append(f"\\A(?=[{re.escape(''.join(sorted(self._seconds)))}])")
        self._pattern = re.compile(f"({'|'.join(map(re.escape, unmarked)) or '(?!)'})|{'|'.join(risky) or '(?!)'}")

    def marking(self, value: Any, mark: Mark) -> Steps[Any]:
        """Return the same value with `mark` in all its texts, in steps: part by part in a long text.

        Raises InvalidRequestError for too many marks. Such a text is longer than any context: nearly every mark stands
        for a token or more.
        """
        if isinstance(value, str):
            return (yield from self._mark_text(value, mark))
        if isinstance(value, dict):
            names = list(value)
            for number, name in enumerate(names):
                if not name.isidentifier():
                    names[number] = yield from self._mark_text(name, mark)
            items = yield from self.marking(list(value.values()), mark)
            return dict(zip(names, items, strict=True))
        if not isinstance(value, list):
            return value
        marked = []
        for number, item in enumerate(value, 1):
            marked.append(item if self._is_safe(item) else (yield from self.marking(item, mark)))
            if number % 64 == 0:
                yield
        return marked

    def _is_safe(self, value: Any) -> bool:
        """Return whether a value holds no first character of a control token, and begins with no second one."""
        if not isinstance(value, str):
            return not isinstance(value, (dict, list))
        if value[:1] in self._seconds:
            return False
        for first in self._firsts:  # noqa: SIM110 (quicker than a generator)
            if first in value:
                return False
        return True

    def _mark_text(self, text: str, mark: Mark) -> Steps[str]:
        num_bytes = len(mark.digits) * (1 if text.isascii() else 4)

        def marked(match: re.Match[str]) -> str:
            if match[1]:
                return match[0]
            mark.left_bytes -= num_bytes
            if mark.left_bytes < 0:
                message = "The messages hold too many beginnings of control tokens: send less text."
                raise InvalidRequestError(message, param="messages", code="control_token")
            return match[0] + mark.digits

        return (yield from replaced_by_part(self._pattern, text, self._lookahead_chars, marked))

    def unmark(self, text: str, mark: str) -> Steps[RenderedPrompt]:
        """Return a rendered text without its marks, and the control tokens that were marked."""
        texts: list[str] = []
        marked, offsets = array("I"), array("I")
        num_chars = start = 0
        while start < len(text):
            end = start + PART_CHARS
            cut = text.find(mark, max(start, end - len(mark) + 1), end + len(mark) - 1)
            if cut >= 0:  # no mark is cut in two
                end = cut + len(mark)
            parts = text[start:end].split(mark)
            at = num_chars
            for part in parts[:-1]:
                at += len(part)
                marked.append(at)
            texts.append("".join(parts))
            num_chars += len(texts[-1])
            start = end
            yield
        text = "".join(texts)
        for number, at in enumerate(marked, 1):
            if at and self._tokens.match(text, at - 1):
                offsets.append(at - 1)
            if number % 4096 == 0:
                yield
        return RenderedPrompt(text, offsets)


def replaced_by_part(
    pattern: re.Pattern[str], text: str, lookahead_chars: int, replace: Callable[[re.Match[str]], str]
) -> Steps[str]:
    """Return a text with each match replaced, in steps, part by part: all matches of a long text take much memory.

    `lookahead_chars`: characters that a match needs after its first one.
    """
    replaced: list[str] = []
    done = 0
    for end in range(PART_CHARS, len(text) + PART_CHARS, PART_CHARS):
        parts: list[str] = []
        for match in pattern.finditer(text, done, end + lookahead_chars):
            if match.start() >= end:
                break
            parts += [text[done : match.start()], replace(match)]
            done = match.end()
        replaced.append("".join([*parts, text[done:end]]))  # few long texts take less than many short ones
        done = max(done, end)
        yield
    return "".join(replaced)


def holds(offsets: Sequence[int], at: int) -> bool:
    """Return whether `at` is one of the sorted `offsets`."""
    index = bisect_left(offsets, at)
    return index < len(offsets) and offsets[index] == at


def any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Return the pattern that finds the longest of `tokens` that begin at a position."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _could_begin(word: str, tokens: Collection[str]) -> bool:
    """Return whether `word` contains a token, or its end could begin one."""
    tails = [word[start:] for start in range(len(word))]
    return any(token.startswith(tail) or tail.startswith(token) for token in tokens for tail in tails)


class TextTokenizer:
    """A tokenizer of rendered prompts that encodes clients' control tokens as text. Shares the original's model.

    Each control token has an alias that behaves as the token itself, and that no client can write.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, added: list[dict[str, Any]], control: Collection[str]) -> None:
        self.tokenizer = tokenizers.Tokenizer(tokenizer.model)
        """Without a post-processor."""
        if tokenizer.normalizer is not None:
            self.tokenizer.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self.tokenizer.pre_tokenizer = tokenizer.pre_tokenizer
        self.tokenizer.add_tokens([_token(entry, entry["content"], entry["content"] in control) for entry in added])
        prefix = new_mark()
        self._alias_by_token: dict[str, str] = {}
        self._id_by_alias_id: dict[int, int] = {}
        for number, entry in enumerate(entry for entry in added if entry["content"] in control):
            alias = f"{prefix}{number:06d}"
            self._alias_by_token[entry["content"]] = alias
            self.tokenizer.add_tokens([_token(entry, alias, False)])
            self._id_by_alias_id[cast(int, self.tokenizer.token_to_id(alias))] = entry["id"]
        self.tokenizer.encode_special_tokens = True
        self._control_ids = frozenset(self._id_by_alias_id.values())
        self._tokens = any_of(self._alias_by_token)

    def encode(self, text: str, client_offsets: Sequence[int]) -> list[int]:
        """Encode a whole prompt: control tokens of clients as text, those of the template as themselves.

        Raises InvalidRequestError if the vocabulary can only spell a client's control token as that token.
        """
        written: list[str] = []
        start = end = 0
        while found := self._tokens.search(text, start):
            if holds(client_offsets, found.start()):
                start = found.start() + 1
                continue
            written += [text[end : found.start()], self._alias_by_token[found[0]]]
            start = end = found.end()
        [ids] = self.encode_as_text(["".join([*written, text[end:]])])
        self.check(ids)
        return [self._id_by_alias_id.get(id_, id_) for id_ in ids]

    def encode_as_text(self, texts: list[str]) -> list[list[int]]:
        """Encode texts whose control tokens are all text."""
        return [item.ids for item in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def check(self, ids: list[int]) -> None:
        """Raises InvalidRequestError for text that became a control token."""
        if not self._control_ids.isdisjoint(ids):
            message = "The messages hold a control token of this model; its vocabulary has no other spelling of it."
            raise InvalidRequestError(message, param="messages", code="control_token")


def _token(entry: dict[str, Any], content: str, special: bool) -> tokenizers.AddedToken:
    flags = {name: entry[name] for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return tokenizers.AddedToken(content, special=special, **flags)
