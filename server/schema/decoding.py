"""Bytes to a checked type, with every way in which they fail to be one as a 400 that names the field."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import msgspec

from server.errors import ContextLengthError, InvalidRequestError, MediaTypeError
from server.pace import Steps, at_once, paced

MAX_DEPTH: Final = 64
"""Of a body, and of a JSON schema in it: what reads them behind us, the grammar compiler too, is recursive."""
_JSON: Final = b"application/json"
LARGE_BODY_BYTES: Final = 1 << 16
"""From here on a body is measured, slice by slice, before it is decoded."""
MAX_VALUES: Final = 1_250_000
"""Of a body: a million token ids, and what stands beside them. An id takes 40 bytes, and 80 ns to decode."""
MAX_CONTAINERS: Final = 150_000
"""Arrays and objects of a body: an empty object takes 20 times its bytes."""
_SLICE_BYTES: Final = 1 << 17
_STEPS: Final = bytes(1 if byte in b"[{" else 255 if byte in b"]}" else 0 for byte in range(256))
"""What a bracket adds to the depth, as signed bytes."""
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")


@dataclass(slots=True)
class Shape:
    """What valid JSON is made of, strings left out."""

    num_values: int = 0
    num_containers: int = 0
    depth: int = 0
    num_text_bytes: int = 0
    """Of the strings as they are written."""

    def check(self) -> None:
        """Raises InvalidRequestError for what would take long to decode, or many times its size."""
        if self.depth > MAX_DEPTH:
            raise InvalidRequestError(f"The body is nested more than {MAX_DEPTH} levels deep.")
        if self.num_values > MAX_VALUES:
            message = f"The body holds more than {MAX_VALUES} JSON values: send fewer token ids in one request."
            raise InvalidRequestError(message)
        if self.num_containers > MAX_CONTAINERS:
            message = f"The body holds more than {MAX_CONTAINERS} arrays and objects: send fewer messages or parts."
            raise InvalidRequestError(message)


def measure(body: bytes) -> Steps[Shape]:
    """In linear time, with a rest after every slice; of what is no JSON it says anything. Ends where `check` fails.

    Raises InvalidRequestError.
    """
    shape = Shape(num_values=1)
    depth = start = 0
    inside = False
    while start < len(body):
        part = body[start : start + _SLICE_BYTES]
        start += len(part)
        if start < len(body) and (len(part) - len(part.rstrip(b"\\"))) % 2:  # it ends within an escape
            part, start = part[:-1], start - 1
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        structure = b"".join(pieces[inside::2])
        inside ^= len(pieces) % 2 == 0
        brackets = structure.translate(None, _NO_BRACKETS)
        num_opened = brackets.count(b"[") + brackets.count(b"{")
        shape.num_containers += num_opened
        shape.num_values += structure.count(b",") + num_opened
        if brackets:
            depths = list(accumulate(array("b", brackets.translate(_STEPS)), initial=depth))
            shape.depth, depth = max(shape.depth, max(depths)), depths[-1]
        shape.num_text_bytes += len(part) - len(structure)
        shape.check()
        yield
    return shape


async def inspect(body: bytes, max_text_bytes: int | None = None, param: str | None = None) -> bool:
    """Whether the body is large. Raises InvalidRequestError for a large one that would take long to decode, or many
    times its size, and ContextLengthError, for `param`, for more text than is ever needed."""
    if len(body) < LARGE_BODY_BYTES:
        return False
    shape = await paced(measure(body))
    if max_text_bytes is not None and shape.num_text_bytes > max_text_bytes:
        message = f"The body's strings take {shape.num_text_bytes} bytes, and at most {max_text_bytes} are taken"
        raise ContextLengthError(f"{message} for the models served here: send less text.", param=param)
    return True


def decode_json(body: bytes, decoder: Callable[[bytes], Any], *, inspected: bool = False) -> Any:
    """`decoder(body)`. Raises InvalidRequestError, whatever the bytes are. `inspected`: by `inspect`."""
    try:
        decoded = decoder(body)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    if not inspected and body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        at_once(measure(body))
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
