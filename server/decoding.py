"""Bytes to a checked type, with every way in which they fail to be one as a 400 that names the field."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from server.errors import InvalidRequestError

_MISSING: Final = re.compile(r"missing required field `([^`]*)`")


def decode_json(body: bytes, decoder: Callable[[bytes], Any]) -> Any:
    """`decoder(body)`. Raises InvalidRequestError, whatever the bytes are."""
    try:
        return decoder(body)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None


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
