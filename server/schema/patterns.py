"""The regular expressions of JSON Schemas that a grammar can enforce."""

from __future__ import annotations

import re
from typing import Final

_DAY: Final = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
FORMAT_PATTERNS: Final = {"date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}T{_TIME}$"}
"""Formats whose own grammars accept too much: lower-case letters, and the 29th of every February."""
MAX_PATTERN_CHARS: Final = 1 << 14
"""The compiler refuses much longer patterns."""

_SECONDS: Final = r"\d+(?:[.,]\d+)?S"
_HOURS: Final = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
_DAYS: Final = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
_SAME: Final = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|{_DAYS}(?:{_HOURS})?|{_HOURS})$"
    ),
}
"""Patterns with a look-ahead, of pydantic's Decimal, zod's email and zod's duration, and the same without one."""
_ESCAPE: Final = (
    r"\\(?:[-^$\\.*+?()\[\]{}|/_@: \"'%#&~`!=,;dDwWsSafnrtv]|x[0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r"|u\{[0-9a-fA-F]{1,6}\}|[pP](?:[A-Z]|\{\w+\}))"
)
_TOKEN: Final = re.compile(
    rf"\[(?:\^|(?!\^))(?:(?!&&|--|~~|\|\|)(?:{_ESCAPE}|[^\]\[\\]))+\]|{_ESCAPE}|\((?:\?(?::|P?<[A-Za-z_]\w*>))?"
    r"|(?:[*+?]|\{\d{1,5}(?:,\d{0,5})?\})\??(?![*+?{])|[^\\\[\]{}(*+?]",
    re.DOTALL,
)
"""A token of a pattern that a grammar has. Look-around, back references, `\\b`, set operations and flags are none."""
_PROPERTY: Final = re.compile(r"\\(?:[pP](?:[A-Z]|\{\w+\})|u\{[0-9a-fA-F]+\})")
"""Escapes that Python's expressions lack."""


def enforceable_pattern(pattern: str) -> str | None:
    """Return an equivalent pattern that a grammar can enforce; None: there is none."""
    pattern = _SAME.get(pattern, pattern)
    tokens = _TOKEN.findall(pattern)
    if len(pattern) > MAX_PATTERN_CHARS or "".join(tokens) != pattern:
        return None
    depth = 0
    for before, token, after in zip(["|", *tokens], tokens, [*tokens[1:], "|"], strict=False):
        if (token == "^" and (depth or before != "|")) or (token == "$" and (depth or after != "|")):
            return None
        depth += token.startswith("(") - (token == ")")
    try:
        re.compile("".join("(?:" if token.startswith("(") else _PROPERTY.sub(r"\\w", token) for token in tokens))
    except (re.error, OverflowError, RecursionError):
        return None
    return pattern
