"""Bytes to a checked type, with every way in which they fail to be one as a 400 that names the field."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from server.errors import InvalidRequestError, MediaTypeError

MAX_DEPTH: Final = 64
"""Of a body, and of a JSON schema in it: what reads them behind us, the grammar compiler too, is recursive."""
_JSON: Final = b"application/json"
_ESCAPE: Final = re.compile(rb"\\.")
_TEXT: Final = re.compile(rb'"[^"]*"')
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")


def decode_json(body: bytes, decoder: Callable[[bytes], Any]) -> Any:
    """`decoder(body)`. Raises InvalidRequestError, whatever the bytes are."""
    try:
        decoded = decoder(body)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    if is_deeper(body, MAX_DEPTH):
        raise InvalidRequestError(f"The body is nested more than {MAX_DEPTH} levels deep.")
    return decoded


def require_json(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises MediaTypeError for a body that does not say that it is JSON.

    A page of another site can send text, forms, and bodies without a type (a Blob) without asking first.
    """
    types = [value for name, value in headers if name == b"content-type"]
    if not types or not all(map(_is_json, types)):
        raise MediaTypeError("The body must be JSON: send it with `content-type: application/json`.")


def _is_json(media_type: bytes) -> bool:
    if media_type == _JSON:
        return True
    essence = media_type.partition(b";")[0].strip().lower()
    return essence == _JSON or (essence.startswith(b"application/") and essence.endswith(b"+json"))


def is_deeper(body: bytes, depth: int) -> bool:
    """Whether valid JSON nests its arrays and objects deeper. Linear for a given depth, and quick for few brackets."""
    if body.count(b"[") + body.count(b"{") <= depth:
        return False
    brackets = _TEXT.sub(b"", _ESCAPE.sub(b"", body)).translate(None, _NO_BRACKETS)
    for _ in range(depth):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    return bool(brackets)


def unsupported(field: str, why: str) -> InvalidRequestError:
    """A field that we know and do not offer."""
    return InvalidRequestError(f"{field} {why}.", param=field, code="unsupported_parameter")


def _validation_error(text: str) -> InvalidRequestError:
    """msgspec says "Expected `int`, got `str` - at `$.max_tokens`"; the path becomes `param`."""
    reason, _, path = text.partition(" - at `")
    param = path.rstrip("`").removeprefix("$").removeprefix(".")
    if missing := _MISSING.search(reason):
        param = f"{param}.{missing[1]}" if param else missing[1]
        reason = f"{missing[1]} is required"
    if not param:
        return InvalidRequestError(f"The body must be a JSON object: {reason}.")
    return InvalidRequestError(f"{param}: {reason}.", param=param)
