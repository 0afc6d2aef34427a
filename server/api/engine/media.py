"""Images, audio, video and files in requests whose text the engine writes.

An image is sent on if the model's engines take images. The gateway neither fetches an image nor reads its pixels.
Its name replaces one that the client gave, and is hashed with the prompt. It is a digest of the image's bytes, or of
its URL, under the request's salt. The engine takes it for the image's identity, so the prompts of two tenants share
nothing. Any other medium is refused by name: an engine drops some, and renders others to placeholders. Two different
videos have equal placeholders, so the gateway would take their prompts for equal.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from server.api.formatting import encode_json
from server.config import GatewayConfig
from server.event_loop import Steps
from server.schema.blocks import MEDIA
from server.schema.decoding import NULL, TextLimit, fields_of, first_char, invalid, located, unsupported, value_of
from worker.common.chat_probes import BLACK_PNG

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
MAX_URL_BYTES: Final = 8192  # a usual limit of servers for a request line
_DATA_URL: Final = re.compile(rb'data:[^,"\\]{0,256};base64,', re.IGNORECASE)
_URL: Final = re.compile(
    rb"(https?)://([a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::([0-9]{1,5}))?(?:[/?][!-\[\]-~]*)?", re.IGNORECASE
)
"""Without user names and backslashes, so that every reader finds the same host."""
_PORTS: Final = {"http": "80", "https": "443"}
_SLICE_BYTES: Final = 1 << 18  # a whole number of base64 groups
_ESCAPED_BYTES: Final = 6  # of one character: \\u002f
_IMAGE_TYPES: Final = (None, "image_url", "input_image")
"""Types of parts of chats that are images."""
_ASKED: Final = ("messages", "input")
_SCORED: Final = ("query", "queries", "documents", "items", "data_1", "data_2", "text_1", "text_2")
"""Fields of scores and ranks that may hold parts."""
_IMAGE_KEYS: Final = frozenset({"image_url", "input_image"})
_PROCESSING: Final = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields of bodies by which a client could make images of any size out of small ones."""
_HOLD_PARTS: Final = ("content", "output")
"""Fields of a message or a part that may hold parts."""
_list_of: Final = msgspec.json.Decoder(list[Raw]).decode


class Image(NamedTuple):
    """An image in a body."""

    param: str
    part: dict[str, Any]
    """Its part of the body. Its bytes are `Raw`."""


class Media(NamedTuple):
    """The images of a body."""

    fields: Mapping[str, Any]
    """The body's fields, with the images' names. The images' bytes, and the prompt of completions, stay `Raw`."""
    images: tuple[Image, ...]
    num_bytes: int
    """Bytes of their text in the body."""


def read_media(fields: Mapping[str, Raw], path: str, rules: GatewayConfig | None, salt: bytes) -> Steps[Media]:
    """Return the images of a body. `rules`: None if no engine of the model takes images.

    Raises InvalidRequestError for a medium that is not served, in the prompt or as the answer.
    """
    reader, read = _Reader(path, rules, salt), {}
    for name, value in fields.items():
        try:
            if name in (_SCORED if path in ("/score", "/rerank") else _ASKED):
                read[name] = yield from reader.value(value, name)
            else:
                read[name] = value if (path, name) == (COMPLETIONS_PATH, "prompt") else value_of(value)
        except msgspec.ValidationError as error:  # a number that is out of range
            raise located(str(error), f"{name:.64}") from None
    if read.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities", "can only be ['text']: this server makes text")
    for name in _PROCESSING if reader.images else ():
        if read.get(name):
            raise unsupported(name, "is not offered: images are processed by the engine's own settings")
    return Media(read, tuple(reader.images), reader.num_bytes)


class _Reader:
    """Reads the parts of one body."""

    def __init__(self, path: str, rules: GatewayConfig | None, salt: bytes) -> None:
        self.images: list[Image] = []
        self.num_bytes = 0
        self._types = _IMAGE_TYPES if path == CHAT_PATH else ()
        self._rules = rules
        self._salt = salt

    def value(self, raw: Raw, param: str) -> Steps[Any]:
        """Decode a part, a list of parts, or a text. Images get their names."""
        if first_char(raw) == "{":
            return (yield from self._part(fields_of(raw), param))
        if first_char(raw) != "[":
            return value_of(raw)
        read = []
        for index, item in enumerate(_list_of(raw)):
            read.append((yield from self.value(item, f"{param}[{index}]")))
            yield
        return read

    def _part(self, part: dict[str, Raw], param: str) -> Steps[Any]:
        """Read a part. Its type or a field makes it a medium. Null ones go: vLLM ignores the ids of their prompts."""
        type_ = value_of(part["type"]) if first_char(part.get("type", NULL)) == '"' else None
        names = [type_, *[key for key, item in part.items() if first_char(item) != "n"]]
        if found := [name for name in names if name in MEDIA]:
            if type_ is None and first_char(part.get("type", NULL)) != "n":
                raise invalid(f"{param}.type", "must be a string")
            is_image = type_ in self._types and _IMAGE_KEYS.issuperset(found)
            if is_image and self._rules is not None:
                return (yield from self._image(part, param, self._rules))
            not_served = "which is not served where the engine writes the text"
            why = "and this model takes no images here" if is_image else not_served
            name = next((name for name in found if name not in _IMAGE_KEYS), found[0])
            raise unsupported(param, f"holds {name}, {why}: send text")
        read = {}
        for name, item in part.items():
            if name in _HOLD_PARTS:
                read[name] = yield from self.value(item, f"{param}.{name}")
            elif name not in MEDIA or first_char(item) != "n":
                read[name] = value_of(item)
        return read

    def _image(self, part: dict[str, Raw], param: str, rules: GatewayConfig) -> Steps[dict[str, Any]]:
        """Check an image. Return its part with the image's name."""
        if len(self.images) == rules.max_images:
            raise invalid(param, f"is one image too many: send at most {rules.max_images} in a request")
        param = f"{param}.image_url"
        raw = part.get("image_url", NULL)
        inner = fields_of(raw) if first_char(raw) == "{" else None
        new = {name: value_of(item) for name, item in part.items() if name != "image_url"}
        new["type"] = new.get("type") or "image_url"
        url = raw if inner is None else inner.get("url", NULL)
        new["uuid"] = yield from image_name(url, param, rules, self._salt)
        others = {} if inner is None else {name: value_of(item) for name, item in inner.items() if name != "url"}
        new["image_url"] = url if inner is None else others | {"url": url}
        self.num_bytes += len(memoryview(url))
        self.images.append(Image(param, new))
        return new


def with_small_images(value: Any) -> Any:
    """Return a decoded body with a small image for each `Raw` one: the prompt's text is the same."""
    if isinstance(value, Raw):
        return Raw(encode_json(f"data:image/png;base64,{BLACK_PNG}"))
    if isinstance(value, dict):
        return {key: with_small_images(item) for key, item in value.items()}
    return [with_small_images(item) for item in value] if isinstance(value, list) else value


def with_images(limit: TextLimit, rules: GatewayConfig) -> TextLimit:
    """Return the limit of a body's text with room for images."""
    num_bytes = rules.max_images * _base64_length(rules.max_image_bytes)
    return limit if limit.num_bytes is None else replace(limit, num_bytes=limit.num_bytes + num_bytes)


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
