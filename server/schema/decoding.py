"""Decode request bodies. Invalid bytes of any kind give a 400 that names the field."""

from __future__ import annotations

import codecs
import json
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Raw

from server.errors import ContextLengthError, InvalidRequestError, MediaTypeError
from server.event_loop import Steps, run_now, run_sliced

MAX_DEPTH: Final = 96
"""The limit for a body, and for a JSON schema in it: later readers are recursive.

The grammar compiler takes 128 levels, of which a list of calls has eight.
"""
_JSON: Final = re.compile(rb"\s*application/(?:json|[^;]*\+json)\s*(?:;|\Z)", re.IGNORECASE)
LARGE_BODY_BYTES: Final = 1 << 16
"""Larger bodies are measured slice by slice before they are decoded."""
MAX_VALUES: Final = 1_250_000
"""The limit for a body: a million token ids and some more. An id takes 40 bytes, and 80 ns to decode."""
MAX_STRINGS: Final = 750_000
"""The limit for a body, names of fields included: a string takes 60 bytes and some."""
MAX_CONTAINERS: Final = 150_000
"""The limit for a body's arrays and objects: an empty object takes 20 times its bytes."""
_SLICE_BYTES: Final = 1 << 17  # measured between two rests of the loop
_STEPS: Final = bytes(1 if byte in b"[{" else 255 if byte in b"]}" else 0 for byte in range(256))
"""The change of depth at each byte, as signed bytes."""
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_LONE_SURROGATE: Final = re.compile(
    rb"\\u(?:[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u)[dD][c-fC-F][0-9a-fA-F]{2})"
)
"""In a body that does not decode: the decoder takes whole pairs."""
_CONTINUATIONS: Final = bytes(range(0x80, 0xC0))
_NOT_FOUR_BYTES: Final = bytes(range(0xF0))
_ONE_BYTE: Final = bytes(range(0xC4))
_HIGH_SURROGATE: Final = re.compile(rb"\\u[dD][89abAB]")
_WIDE_ESCAPE: Final = re.compile(rb"\\u(?!00)")
MAX_WIDE_BYTES: Final = 40 << 20
"""Strings may take this much memory, or the body's size if that is more. One wide character makes its string wide."""
_OTHER_TEXT: Final = re.compile(rb"\xef\xbb\xbf|\xff\xfe|\xfe\xff|.?\0", re.DOTALL)
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")
NULL: Final = Raw(b"null")
value_of: Final = msgspec.json.Decoder().decode
fields_of: Final = msgspec.json.Decoder(dict[str, Raw]).decode
"""Reads an object, whose values stay JSON."""


@dataclass(frozen=True, slots=True)
class TextLimit:
    """The text that a body can need for the models served here; None where there is no bound."""

    num_bytes: int | None = None
    """The most bytes that its strings hold."""
    max_model_len: int | None = None
    """The longest context."""


@dataclass(slots=True)
class Shape:
    """The size of a JSON text's structure."""

    num_values: int = 0
    num_containers: int = 0
    num_strings: int = 0
    depth: int = 0
    num_text_bytes: int = 0
    """The strings' bytes as written, escapes included."""
    num_text_chars: int = 0
    char_bytes: int = 1
    """Bytes in memory of the widest character, and so possibly of every other one."""

    def check(self) -> None:
        """Raises InvalidRequestError for a body that would take long to decode, or many times its size in memory."""
        for size, limit, unit, remedy in (
            (self.depth, MAX_DEPTH, "levels of nesting", "nest less deeply"),
            (self.num_values, MAX_VALUES, "JSON values", "send fewer token ids in one request"),
            (self.num_strings, MAX_STRINGS, "strings", "send fewer of them in one request"),
            (self.num_containers, MAX_CONTAINERS, "arrays and objects", "send fewer messages or parts"),
        ):
            if size > limit:
                raise InvalidRequestError(f"The body holds more than {limit} {unit}: {remedy}.")


def measure(body: bytes) -> Steps[Shape]:
    """Measure a body in linear time, resting after every slice. Raises InvalidRequestError at the first excess.

    Raises UnicodeDecodeError for bytes that are no UTF-8. The result for invalid JSON is undefined.
    """
    shape, utf8 = Shape(num_values=1), None if body.isascii() else codecs.getincrementaldecoder("utf-8")()
    depth = start = 0
    inside = False
    while start < len(body):
        part = body[start : start + _SLICE_BYTES]
        start += len(part)
        if start < len(body) and (len(part) - len(part.rstrip(b"\\"))) % 2:  # it ends within an escape
            part, start = part[:-1], start - 1
        if utf8 is not None:
            utf8.decode(part, start >= len(body))
        has_escapes = b"\\" in part
        pieces = (part.replace(b"\\\\", b"").replace(b'\\"', b"") if has_escapes else part).split(b'"')
        structure = b"".join(pieces[inside::2])
        shape.num_strings += len(pieces) // 2
        inside ^= len(pieces) % 2 == 0
        brackets = structure.translate(None, _NO_BRACKETS)
        num_opened = brackets.count(b"[") + brackets.count(b"{")
        shape.num_containers += num_opened
        shape.num_values += structure.count(b",") + num_opened
        if brackets:
            depths = list(accumulate(array("b", brackets.translate(_STEPS)), initial=depth))
            shape.depth, depth = max(shape.depth, max(depths)), depths[-1]
        num_text_bytes = len(part) - len(structure)
        shape.num_text_bytes += num_text_bytes
        shape.num_text_chars += num_text_bytes
        if not part.isascii() or (has_escapes and b"\\u" in part):
            shape.num_text_chars -= len(part) - len(part.translate(None, _CONTINUATIONS)) + 5 * part.count(b"\\u")
            shape.char_bytes = max(shape.char_bytes, _char_bytes(part))
        shape.check()
        yield
    return shape


def _char_bytes(part: bytes) -> int:
    if part.translate(None, _NOT_FOUR_BYTES) or _HIGH_SURROGATE.search(part) is not None:
        return 4
    return 2 if part.translate(None, _ONE_BYTE) or _WIDE_ESCAPE.search(part) is not None else 1


async def read_json(
    body: bytes,
    decode: Callable[[bytes], Any],
    text_limit: Callable[[], TextLimit] = TextLimit,
    param: str | None = None,
) -> Any:
    """Return `decode(body)`, after measuring a large body with rests. Raises InvalidRequestError, whatever the bytes.

    Raises ContextLengthError with `param` for more text than `text_limit` returns.
    """
    is_large = len(body) >= LARGE_BODY_BYTES
    try:
        if is_large:
            shape, limit, message = await run_sliced(measure(body)), text_limit(), ""
            memory_bytes = shape.char_bytes * shape.num_text_chars
            if memory_bytes > max(len(body), MAX_WIDE_BYTES):
                message = f"the body's strings take up to {memory_bytes} bytes in memory: send less text at once"
            elif limit.num_bytes is not None and shape.num_text_bytes > limit.num_bytes:
                message = f"the body's strings take {shape.num_text_bytes} bytes"
                message = f"{message}, and the models served here read at most {limit.num_bytes}"
            if message:
                raise ContextLengthError(message, limit.max_model_len, is_of_model=False, param=param)
        elif not body.isascii():
            body.decode()  # `decode` leaves fields that are read later, or by an engine, as they are
        decoded = decode(body)
    except msgspec.ValidationError as error:
        kind = getattr(getattr(decode, "__self__", None), "type", None)  # `decode` is a method of a Decoder
        raise located(str(error), kind=kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if (half := _LONE_SURROGATE.search(body)) is not None:
            message = f"The body holds half of a surrogate pair, {half[0].decode()}: send whole characters."
            raise InvalidRequestError(message) from None
        why = f"byte {error.object[error.start]:#x} is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
        if _OTHER_TEXT.match(body):
            why = "it is UTF-16, or begins with a byte order mark: send UTF-8"
        if body.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
            why = "it is compressed, so it needs a content-encoding: gzip or zstd"
        raise InvalidRequestError(f"The body is not valid JSON: {why}.") from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    if not is_large and body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        run_now(measure(body))
    return decoded


def first_char(value: Raw) -> str:
    """Return the character that begins a JSON value. It differs between types."""
    return chr(memoryview(value)[0])


def decode_text(text: str, field: str) -> Any:
    """Decode JSON that is the text of a field, behind the check of the body.

    Raises ValueError or RecursionError for other text, and InvalidRequestError for halves of surrogate pairs.
    """
    value = json.loads(text)
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = json.dumps(error.object[error.start])[1:-1]
            raise invalid(field, f"holds half of a surrogate pair, {half}: send whole characters") from None
    return value


def decode_object(text: str, field: str) -> dict[str, Any] | None:
    """Return the object that a field's text holds; None: it holds none. Raises InvalidRequestError as `decode_text`."""
    try:
        value = decode_text(text, field)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def require_json(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises MediaTypeError for a body whose type is not JSON.

    A page of another site can send text, forms, and bodies without a type (a Blob) without asking first.
    """
    types = [value for name, value in headers if name == b"content-type"]
    if not types or not all(map(_JSON.match, types)):
        raise MediaTypeError("The body must be JSON: send it with `content-type: application/json`.")


def invalid(field: str, why: str, code: str | None = None) -> InvalidRequestError:
    """Return the error for a field's value."""
    return InvalidRequestError(f"{field} {why}.", param=field, code=code)


def unsupported(field: str, why: str, details: Mapping[str, Any] | None = None) -> InvalidRequestError:
    """Return the error for a known field, or a value of it, that is not offered. `details`: see `ApiError`."""
    return InvalidRequestError(f"{field} {why}.", param=field, code="unsupported_parameter", details=details)


def located(text: str, parent: str = "", kind: Any = None) -> InvalidRequestError:
    """Split msgspec's "Expected `int`, got `str` - at `$.max_tokens`". The path under `parent` becomes `param`.

    `kind`: the type in which the path begins. The error for an enumeration lists its values.
    """
    reason, _, path = text.partition(" - at `")
    if reason.startswith("Invalid enum value") and (values := _literals(kind, re.findall(r"[A-Za-z_]\w*|\[", path))):
        reason = f"{reason}: use one of {', '.join(values)}"
    place = (parent + path.rstrip("`").removeprefix("$")).removeprefix(".")
    param, is_value, _ = place.partition("[...]")  # msgspec writes [...] for any key of a map
    if is_value:
        reason = f"a value in it is wrong: {reason}"
    if missing := _MISSING.search(reason):
        param = f"{param}.{missing[1]}" if param else missing[1]
    if param == "model":
        why = "model is required" if missing else f"model: {reason}"
        return InvalidRequestError(f"{why}: use a name that GET /v1/models lists.", param=param)
    if missing:
        return invalid(param, "is required")
    if not param:
        return InvalidRequestError(f"The body must be a JSON object: {reason}.")
    return InvalidRequestError(f"{param}: {reason}.", param=param)


def _literals(kind: Any, path: Sequence[str]) -> list[str]:
    """Return the values that a type takes at a path of fields, and of "[" for items; empty: not known."""
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _literals(get_type_hints(kind).get(path[0]), path[1:]) if path else []
    rest = path[1:] if get_origin(kind) in (list, tuple, dict) else path
    return [value for part in get_args(kind) for value in _literals(part, rest)]
