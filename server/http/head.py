"""The head of a request, read strictly by RFC 9112: an ambiguous head is refused.

Source: RFC 9112, 2.3, 3.2 and 6.1 to 6.3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

FRAMING: Final = (b"host", b"content-length", b"transfer-encoding")
"""The header fields that decide how a message is read; each may stand once."""
_HOST: Final = re.compile(rb"[A-Za-z0-9._-]{1,255}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#]*)([^#]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The checked parts of a head."""

    target: bytes
    """In origin form, or `*`."""
    authority: bytes | None
    """The host in the target, which replaces the header's (3.2.2)."""
    length: int | None
    """The body's length; None: it is chunked."""


def read_head(version: str, target: bytes, framing: Mapping[bytes, bytes]) -> RequestHead | None:
    """Return the head's parts, or None if it has to be refused. `framing` has the fields of `FRAMING`."""
    host, length, coding = map(framing.get, FRAMING)
    authority = None
    if absolute := _ABSOLUTE.fullmatch(target):
        authority, rest = absolute.groups()
        target = rest if rest.startswith(b"/") else b"/" + rest
    if (
        (not target.startswith(b"/") and target != b"*")
        or (version != "1.0" if host is None else _HOST.fullmatch(host) is None)
        or (authority is not None and _HOST.fullmatch(authority) is None)
        or (length is not None and (coding is not None or not length.isdigit()))
        or (coding is not None and (coding.lower() != b"chunked" or version == "1.0"))
    ):
        return None
    return RequestHead(target, authority, int(length or 0) if coding is None else None)
