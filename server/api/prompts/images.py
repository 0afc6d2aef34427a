"""The bounds and the name of an image in a request. The gateway neither fetches an image nor reads its pixels.

A name is a digest of the image's bytes, or of its URL, under the request's salt. The engine takes it for the image's
identity, so the prompts of two tenants share nothing.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import replace
from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Raw

from server.config import GatewayConfig
from server.event_loop import Steps
from server.schema.decoding import TextLimit, invalid, unsupported

MAX_URL_BYTES: Final = 8192  # a usual limit of servers for a request line
_DATA_URL: Final = re.compile(rb'data:[^,"\\]{0,256};base64,', re.IGNORECASE)
_URL: Final = re.compile(
    rb"(https?)://([a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::([0-9]{1,5}))?(?:[/?][!-\[\]-~]*)?", re.IGNORECASE
)
"""Without user names and backslashes, so that every reader finds the same host."""
_PORTS: Final = {"http": "80", "https": "443"}
_SLICE_BYTES: Final = 1 << 18  # a whole number of base64 groups
_ESCAPED_BYTES: Final = 6  # of one character: \\u002f


def with_images(limit: TextLimit, rules: GatewayConfig) -> TextLimit:
    """Return the limit of a body's text with room for images."""
    num_bytes = rules.max_images * _base64_length(rules.max_image_bytes)
    return limit if limit.num_bytes is None else replace(limit, num_bytes=limit.num_bytes + num_bytes)


def first_char(value: Raw) -> str:
    """Return the character that begins a JSON value. It differs between types."""
    return chr(memoryview(value)[0])


def image_name(url: Raw, param: str, rules: GatewayConfig, salt: bytes) -> Steps[str]:
    """Return the name of an image at a URL, which is a JSON value. Raises InvalidRequestError that names `param`."""
    text = _text_of(url, param, rules)
    if (head := _DATA_URL.match(text)) is not None:
        return (yield from _name_of_base64(text[head.end() :], param, rules, salt))
    if text[:5].tobytes().lower() == b"data:":
        raise invalid(param, "must be a `data:` URL in base64")
    _check_url(text, param, rules)
    return blake2b(text, key=salt, digest_size=32, person=b"headstart-url").hexdigest()


def _text_of(value: Raw, param: str, rules: GatewayConfig) -> memoryview:
    """Return the bytes of a JSON string, mostly without a copy. Raises InvalidRequestError."""
    if first_char(value) != '"':
        raise invalid(param, "must be a string with an image")
    text = memoryview(value)[1:-1]
    if re.search(rb"\\", text) is None:
        return text
    if len(text) > _ESCAPED_BYTES * (_base64_length(rules.max_image_bytes) + MAX_URL_BYTES):
        raise _too_large(param, rules)
    return memoryview(msgspec.json.decode(value, type=str).encode())


def _name_of_base64(text: memoryview, param: str, rules: GatewayConfig, salt: bytes) -> Steps[str]:
    """Check the size before anything is decoded. Decode slice by slice: the whole image is never in memory."""
    num_bytes = len(text) * 3 // 4 - bytes(text[-2:]).count(b"=")
    if num_bytes > rules.max_image_bytes:
        raise _too_large(param, rules)
    digest = blake2b(key=salt, digest_size=32, person=b"headstart-image")
    try:
        for start in range(0, len(text), _SLICE_BYTES):
            part = binascii.a2b_base64(text[start : start + _SLICE_BYTES], strict_mode=True)
            if start + _SLICE_BYTES < len(text) and len(part) != _SLICE_BYTES // 4 * 3:
                raise binascii.Error("padding before the end")
            digest.update(part)
            yield
    except binascii.Error as error:
        raise invalid(param, f"is not an image in base64: {str(error).lower()}") from None
    if num_bytes <= 0:
        raise invalid(param, "is an image of no bytes")
    return digest.hexdigest()


def _check_url(text: memoryview, param: str, rules: GatewayConfig) -> None:
    """Raises InvalidRequestError for a URL that no engine may fetch."""
    if not rules.image_hosts:
        raise unsupported(param, "must be a `data:` URL: engines fetch no images for this server (--image-hosts)")
    found = None if len(text) > MAX_URL_BYTES else _URL.fullmatch(text)
    if found is None:
        raise invalid(param, f"must be a `data:` URL, or an http(s) URL of at most {MAX_URL_BYTES} plain characters")
    scheme, host = found[1].decode().lower(), found[2].decode().lower()
    own_port = _PORTS[scheme]
    port = str(int(found[3] or own_port))
    if f"{host}:{port}" not in rules.image_hosts and not (port == own_port and host in rules.image_hosts):
        raise unsupported(param, f"names the host {host}:{port}, from which engines fetch no images for this server")


def _base64_length(num_bytes: int) -> int:
    return -(-num_bytes // 3) * 4


def _too_large(param: str, rules: GatewayConfig) -> Exception:
    why = f"holds an image of more than {rules.max_image_bytes} bytes: send a smaller one"
    return invalid(param, why, "image_too_large")
