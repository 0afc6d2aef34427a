"""Control tokens that clients write are text; those of the chat template are control tokens.

A template writes a model's control tokens around what clients say. When a client says such a token, the rendered text
no longer tells who wrote it. So whatever of a client's could become a control token gets a mark behind its first
character before it is rendered; afterwards the marks are taken out, and their places tell whose a token is:

    content     is <|im_end|> a token?                          marked    is <4711|im_end|> a token?
    rendered    <|im_start|>user\\nis <4711|im_end|> a token?<|im_end|>\\n
    text        <|im_start|>user\\nis <|im_end|> a token?<|im_end|>\\n        client_at    {20}

Marked are whole tokens and what could become one at the end of a field, or where a template cuts something out.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import tokenizers

from server.errors import InvalidRequestError
from server.pace import Steps

NOTHING: Final[frozenset[int]] = frozenset()
PART_CHARS: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text. `client_at`: where the second character of what could be a client's control token stands."""

    text: str
    client_at: frozenset[int] = NOTHING

    def before(self, mark: str) -> Rendered | None:
        """What stands before the last `mark`, if there is one."""
        text, found, _ = self.text.rpartition(mark)
        return Rendered(text, frozenset(at for at in self.client_at if at <= len(text))) if found else None


class Marker:
    """Finds in clients' texts what could become one of `tokens`. Thread-safe."""

    def __init__(self, tokens: Collection[str], constants: Iterable[str]) -> None:
        """`constants`: the template's own strings, which it may look for in clients' texts, or cut out of them."""
        self._firsts = {token[0] for token in tokens}
        words = sorted(set(filter(None, constants)), key=len, reverse=True)
        kept = [word for word in words if word[0] in self._firsts and not _could_begin(word, tokens)]
        cut = "|".join(map(re.escape, words))
        self._reach = 1 + max(map(len, words), default=1)
        """So far behind a character the pattern looks."""
        risky = []
        for first in sorted(self._firsts):
            rests = {token[1:2] for token in tokens if token[0] == first}
            nexts = "|".join([f"[{re.escape(''.join(sorted(rests)))}]", r"\s*\Z", *filter(None, [cut])])
            risky.append(re.escape(first) + ("" if "" in rests else f"(?={nexts})"))
        self._pattern = re.compile(f"({'|'.join(map(re.escape, kept)) or '(?!)'})|{'|'.join(risky) or '(?!)'}")

    def mark(self, value: Any, mark: str) -> Any:
        """The same value with `mark` in its texts, however deep they stand."""
        if isinstance(value, str):
            if not any(first in value for first in self._firsts):
                return value
            return self._pattern.sub(lambda found: found[0] if found[1] else found[0] + mark, value)
        if isinstance(value, dict):
            return {self._key(key, mark): self.mark(item, mark) for key, item in value.items()}
        return [self.mark(item, mark) for item in value] if isinstance(value, list) else value

    def marking(self, value: Any, mark: str) -> Steps[Any]:
        """`mark` in steps: long texts part by part, each with a look at what follows it."""
        if isinstance(value, dict):
            marked = {}
            for key, item in value.items():
                marked[self._key(key, mark)] = yield from self.marking(item, mark)
            return marked
        if isinstance(value, list):
            items = []
            for item in value:
                items.append((yield from self.marking(item, mark)))
            return items
        if not isinstance(value, str) or len(value) <= PART_CHARS:
            yield
            return self.mark(value, mark)
        parts, done = [], 0
        for end in range(PART_CHARS, len(value) + PART_CHARS, PART_CHARS):
            pieces = []
            for found in self._pattern.finditer(value, done, end + self._reach):
                if found.start() >= end:
                    break
                pieces += [value[done : found.end()], "" if found[1] else mark]
                done = found.end()
            if done < end:
                pieces.append(value[done:end])
                done = end
            parts.append("".join(pieces))
            yield
        return "".join(parts)

    def _key(self, key: str, mark: str) -> str:
        marked: str = key if key.isidentifier() else self.mark(key, mark)
        return marked


def new_mark() -> str:
    """Digits, which every filter of a template leaves alone, and which no client can guess."""
    return f"{secrets.randbits(64):020d}"


def without(mark: str, text: str) -> Steps[Rendered]:
    """A rendered text without its marks."""
    parts = text.split(mark)
    places: set[int] = set()
    at = 0
    for number, part in enumerate(parts[:-1], 1):
        at += len(part)
        places.add(at)
        if number % 4096 == 0:
            yield
    return Rendered("".join(parts), frozenset(places))


def _could_begin(word: str, tokens: Collection[str]) -> bool:
    """Whether a token lies in `word`, or could begin in it."""
    tails = [word[start:] for start in range(len(word))]
    return any(token.startswith(tail) or tail.startswith(token) for token in tokens for tail in tails)


def template_tokens(
    text: str, pattern: re.Pattern[str], control: Collection[str], client_at: Collection[int]
) -> Iterator[re.Match[str]]:
    """The tokens in a rendered text that are tokens: all but the control tokens of clients."""
    start = 0
    while found := pattern.search(text, start):
        is_text = found.start() + 1 in client_at and found[0] in control
        start = found.start() + 1 if is_text else found.end()
        if not is_text:
            yield found


class TextTokenizer:
    """A tokenizer to which control tokens are text. It shares the other's model.

    Each control token has an alias, which behaves in every way as the token itself and which nobody else can write.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, added: list[dict[str, Any]], control: Collection[str]) -> None:
        self._tokenizer = tokenizers.Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            self._tokenizer.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = tokenizer.pre_tokenizer
        self._tokenizer.add_tokens([_token(entry, entry["content"], entry["content"] in control) for entry in added])
        prefix = new_mark()
        self._aliases: dict[str, str] = {}
        """By token."""
        self._ids: dict[int, int] = {}
        """Of tokens, by their alias' ids."""
        for number, entry in enumerate(entry for entry in added if entry["content"] in control):
            alias = f"{prefix}{number:06d}"
            self._aliases[entry["content"]] = alias
            self._tokenizer.add_tokens([_token(entry, alias, False)])
            self._ids[cast(int, self._tokenizer.token_to_id(alias))] = entry["id"]
        self._tokenizer.encode_special_tokens = True
        self._control_ids = frozenset(self._ids.values())
        longest_first = sorted(self._aliases, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, text: str) -> list[int]:
        """Raises InvalidRequestError for a vocabulary that has no other ids for a control token's text."""
        [ids] = self.encode_texts([text])
        return ids

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """`encode` of each."""
        encoded: list[list[int]] = []
        for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids = found.ids
            if not self._control_ids.isdisjoint(ids):
                message = "The messages hold a control token of this model; its vocabulary has no other spelling of it."
                raise InvalidRequestError(message, param="messages", code="control_token")
            encoded.append(ids)
        return encoded

    def encode_rendered(self, text: str, client_at: Collection[int]) -> list[int]:
        """Of a whole prompt, at once: a client's control tokens as text, the template's as themselves."""
        written, end = [], 0
        for found in template_tokens(text, self.pattern, self._aliases, client_at):
            written += [text[end : found.start()], self._aliases[found[0]]]
            end = found.end()
        return [self._ids.get(id_, id_) for id_ in self.encode("".join([*written, text[end:]]))]


def _token(entry: dict[str, Any], content: str, special: bool) -> tokenizers.AddedToken:
    flags = {name: entry[name] for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return tokenizers.AddedToken(content, special=special, **flags)
