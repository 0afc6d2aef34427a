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
ENFORCED_FORMATS: Final = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""Formats that the grammar compiler enforces itself."""

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
_REGEX_TOKEN: Final = re.compile(
    rf"(?P<class>\[(?:\^|(?!\^))(?:{_ESCAPE}|[^\]\[\\])+\])|{_ESCAPE}"
    r"|(?P<open>\((?:\?(?::|P?<[A-Za-z_]\w*>))?)|(?P<close>\))|(?P<alternation>\|)|(?P<start>\^)|(?P<end>\$)"
    r"|(?P<quantifier>[*+?]\??|\{\d{1,5}(?:,\d{0,5})?\}\??)|[^\\\[\]{}()|^$*+?]",
    re.DOTALL,
)
_PROPERTY: Final = re.compile(r"\\(?:[pP](?:[A-Z]|\{\w+\})|u\{[0-9a-fA-F]+\})")
"""Escapes that Python's expressions lack."""


def enforceable_pattern(pattern: str) -> str | None:
    """Return an equivalent pattern that a grammar can enforce; None: there is none.

    Look-around, back references and word boundaries are refused: a grammar has none.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        return None
    pattern = _SAME.get(pattern, pattern)
    depth = position = 0
    at_start = True  # of a top-level alternative
    ended = is_repeatable = False
    while position < len(pattern):
        token = _REGEX_TOKEN.match(pattern, position)
        if token is None:
            return None
        position, kind = token.end(), token.lastgroup
        if kind == "alternation":
            at_start, ended, is_repeatable = depth == 0, False, False
            continue
        if ended or (kind == "start" and not at_start) or (kind == "end" and depth):
            return None
        if kind == "quantifier" and not is_repeatable:
            return None
        depth += {"open": 1, "close": -1}.get(kind or "", 0)
        if depth < 0 or (kind in ("class", "quantifier") and not _is_valid_token(token[0])):
            return None
        ended, at_start = kind == "end", False
        is_repeatable = kind not in ("open", "start", "end")
    return None if depth else pattern


def _is_valid_token(token: str) -> bool:
    """Return whether no range of a class or of a repetition is reversed, and a class has no set operation."""
    if any(operation in token for operation in ("&&", "--", "~~", "||")):
        return False
    try:
        re.compile(_PROPERTY.sub(r"\\w", token) if token.startswith("[") else f"a{token}")
    except re.error:
        return False
    return True
