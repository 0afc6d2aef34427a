"""Turns recorded requests into bodies of the same form, whose prose is generated text of as many tokens."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any, Final

from tests import smollm2
from tests.json_texts import texts

PROSE: Final = frozenset(("text", "content", "description", "instructions", "output", "thinking", "system"))
_TAG: Final = re.compile(r"</?[a-z_-]+>")
_WORD: Final = re.compile(r"</?[a-z_-]+>|[A-Za-z]+")
_MONTHS: Final = "January|February|March|April|May|June|July|August|September|October|November|December"
_DAYS: Final = "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"
_KEPT: Final = frozenset(f"{_MONTHS}|{_DAYS}".split("|"))
_ID: Final = re.compile(r"(?=[0-9A-Za-z]*\d)[0-9A-Za-z]{8,}|\b[0-9a-f]{4}\b")
_CLIENT_LINE: Final = re.compile(r"x-anthropic-billing-header: ")


def scrubbed(value: Any, salt: bytes, key: str = "") -> Any:
    """Return a value with its prose and its ids replaced, the same by the same where `salt` is the same."""
    if isinstance(value, dict):
        return {name: scrubbed(part, salt, name) for name, part in value.items()}
    if isinstance(value, list):
        return [scrubbed(part, salt, key) for part in value]
    if not isinstance(value, str):
        return value
    if key in PROSE and not _CLIENT_LINE.match(value):
        return generated(value, salt)
    if key.startswith("x-codex") or key in ("user_id", "id", "tool_use_id", "tool_call_id", "call_id") or "-" in value:
        return _ID.sub(lambda match: _same_form(match[0], salt), value)
    return value


def generated(text: str, salt: bytes) -> str:
    """Replace each word by one of as many tokens, chosen by it and the three before; tags and dates stay."""
    before: list[str] = []

    def replaced(match: re.Match[str]) -> str:
        word = match[0]
        before.append(word)
        if word.startswith("<") or word in _KEPT:
            return word
        return _word(word, " ".join(before[-4:]), salt)

    return _WORD.sub(replaced, text)


@functools.lru_cache(1 << 16)
def _word(word: str, context: str, salt: bytes) -> str:
    length = _num_tokens(word)
    chosen = ""
    for attempt in range(200):
        digest = hashlib.blake2b(f"{attempt} {context}".encode(), key=salt).digest()
        pieces = _pieces()
        chosen = "".join(pieces[int.from_bytes(digest[2 * n : 2 * n + 3]) % len(pieces)] for n in range(length))
        chosen = chosen.upper() if word.isupper() and len(word) > 1 else chosen.title() if word.istitle() else chosen
        if _num_tokens(chosen) == length and chosen.lower() != word.lower():
            break
    return chosen


@functools.cache
def _pieces() -> list[str]:
    vocabulary = smollm2.tokenizer().get_vocab()
    return sorted(token[1:] for token in vocabulary if re.fullmatch("Ġ[a-z]{3,7}", token) and token[1:] in vocabulary)


@functools.lru_cache(1 << 16)
def _num_tokens(word: str) -> int:
    return len(smollm2.tokenizer().encode(f" {word}").ids)


def _same_form(text: str, salt: bytes) -> str:
    digest = hashlib.blake2b(text.encode(), key=salt).hexdigest()
    letters = "0123456789abcdef" if re.fullmatch("[0-9a-f]+", text) else "0123456789abcdefghijklmnopqrstuv"
    numbers = [int(digest[n % 120 : n % 120 + 4], 16) for n in range(len(text))]
    return "".join(
        str(number % 10) if old.isdigit() else old if old in "xyzXYZ" else letters[10 + number % (len(letters) - 10)]
        for old, number in zip(text, numbers, strict=True)
    )


def shingles(found_in: Iterable[str]) -> set[bytes]:
    """Return five bytes of the hash of each run of eight words, tags left out."""
    found = set()
    for text in found_in:
        words = re.findall("[a-z]+", _TAG.sub(" ", text).lower())
        for start in range(len(words) - 7):
            found.add(hashlib.sha256(" ".join(words[start : start + 8]).encode()).digest()[:5])
    return found


def main() -> None:
    """python -m tests.clients.scrub NAME VERSION: read {conversation, path, headers, body} a line, write the data."""
    import gzip
    import os
    import sys

    folder = "tests/data/agents"
    name, version = sys.argv[1:]
    requests = [json.loads(line) for line in sys.stdin]
    salt = os.urandom(16)
    known: set[bytes] = set()
    for request in requests:
        known |= shingles(text for text in texts(request["body"], PROSE) if not _CLIENT_LINE.match(text))
    kept = {"program": name, "version": version, "requests": scrubbed(requests, salt)}
    with open(f"{folder}/{name}.json.gz", "wb") as file:
        file.write(gzip.compress(json.dumps(kept, ensure_ascii=False).encode(), 9, mtime=0))
    with open(f"{folder}/{name}.shingles", "wb") as file:
        file.write(b"".join(sorted(known)))


if __name__ == "__main__":
    main()
