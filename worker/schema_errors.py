"""The place and the reason, in our words, of what the grammar library refuses in a JSON Schema."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any, Final

from worker.common.json_schema import Path, children, pointer

_MAX_PROBES: Final = 200
_MAX_SEARCH_S: Final = 1.0
_ROOT: Final = "x-root"

_WORDS: Final = (
    (r"Unimplemented keys: \[(.*)\].*", r"a grammar cannot hold \1"),
    (r"Unknown format: (.*)", r"a grammar cannot hold the format \1"),
    (r"Unsatisfiable schema: (.*)", r"no value fits: \1"),
    (r"(?:All options in|No options in) anyOf.*", "no value fits any of its options"),
    (r"Pointer '(.*)' does not exist", r"the reference #\1 points to nothing"),
    (r"Resource '(.*)' is not present.*", r"the reference \1 points to nothing in the schema"),
    (r"circular references with sibling keys.*", "a circular reference cannot be combined with other keywords"),
    (r"Invalid type: (.*)", r"\1 is no type"),
    (r"Expected (?:positive integer|u64) for '(\w+)'.*", r"\1 must be an integer from 0"),
    (r"Expected (\w+) for '([^']+)'.*", r"\2 must be: \1"),
    (r"recursion limit exceeded.*", "it nests too deeply"),
    (r"schema too large.*", "it has too many parts"),
    (r"Failed to generate regex for .*", "its bounds have too many digits"),
    (r"(?:fuel exhausted|too many|lexer|initial lexer).*", "it is too complex for a grammar"),
    (r"Unable to determine if regex is empty.*", "the pattern is too complex for a grammar"),
    (r"NoExtension\w*.*", "no text fits it"),
    (r"(?:InternalError|LexerTooComplex|ParserTooComplex)\W?.*", "it is too complex for a grammar"),
    (r"min/maxProperties only .*", "minProperties and maxProperties need all of properties in required"),
    (r"patternProperty regexes (.*) are not disjoint", r"the patterns \1 overlap"),
    (r"Value for 'multipleOf' has .*", "multipleOf has too many digits"),
)


def in_words(reason: str) -> str:
    """Return a reason of the library without the library's names."""
    for pattern, words in _WORDS:
        if (found := re.fullmatch(pattern, reason, re.DOTALL)) is not None:
            return found.expand(words)[:300]
    return reason


def failing_place(schema: dict[str, Any], error_of: Callable[[str], str]) -> Path:
    """Return the path of the innermost schema that does not compile by itself, where that is soon found.

    `error_of` compiles a schema's text, and returns what is wrong with it.
    """
    written = json.dumps(schema).replace('"$ref": "#', f'"$ref": "#/{_ROOT}')
    until_s = time.monotonic() + _MAX_SEARCH_S
    path: Path = ()
    node, num_probes = schema, 0
    while True:
        for step, child in children(node):
            if not isinstance(child, dict):
                continue
            num_probes += 1
            if num_probes > _MAX_PROBES or time.monotonic() > until_s:
                return path
            if error_of(f'{{"$ref": {json.dumps(pointer((_ROOT, *path, *step)))}, "{_ROOT}": {written}}}'):
                path, node = (*path, *step), child
                break
        else:
            return path


def named(path: Path) -> str:
    """Write a path as steps with dots, shortened."""
    return json.dumps(".".join(step[:64] for step in path[-16:]), ensure_ascii=True)[1:-1]
