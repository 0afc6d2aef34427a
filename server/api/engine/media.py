"""Images, audio, video and files in requests whose text the engine writes.

An image is sent on if the model's engines take images. Its name (`images.py`) replaces one that the client gave, and is
hashed with the prompt. Any other medium is refused by name: an engine drops some, and renders others to placeholders.
Two different videos have equal placeholders, so the gateway would take their prompts for equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from server.api.formatting import encode_json
from server.api.prompts.images import first_char, image_name
from server.config import GatewayConfig
from server.event_loop import Steps
from server.schema.blocks import MEDIA
from server.schema.decoding import invalid, unsupported
from worker.common.chat_probes import BLACK_PNG
from worker.wire import EngineCall

CHAT_PATH: Final = "/v1/chat/completions"
_IMAGE_TYPES: Final = (None, "image_url", "input_image")
"""Types of parts of chats that are images."""
_SCORED: Final = ("query", "queries", "documents", "items", "data_1", "data_2", "text_1", "text_2")
"""Fields of scores and ranks that may hold parts."""
_IMAGE_KEYS: Final = frozenset({"image_url", "input_image"})
_PROCESSING: Final = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields of bodies by which a client could make images of any size out of small ones."""
_NULL: Final = Raw(b"null")
_HOLD_PARTS: Final = ("content", "output")
"""Fields of a message or a part that may hold parts."""
_value_of: Final = msgspec.json.Decoder().decode
_list_of: Final = msgspec.json.Decoder(list[Raw]).decode
_dict_of: Final = msgspec.json.Decoder(dict[str, Raw]).decode


class Image(NamedTuple):
    """An image in a body."""

    param: str
    part: dict[str, Any]
    """Its part of the body. Its bytes are `Raw`."""

    def only_in(self, call: EngineCall) -> EngineCall:
        """Return a call with only this image, to find out whether the engine can read it."""
        turns = [{"role": "user", "content": [self.part]}]
        return EngineCall(call.path, encode_json({"messages": turns, "max_tokens": 1}))


class Media(NamedTuple):
    """The images of a body."""

    fields: Mapping[str, Any]
    """The body's fields, with the images' names. Only fields with images are decoded; the images' bytes stay `Raw`."""
    images: tuple[Image, ...]
    num_bytes: int
    """Bytes of their text in the body."""


def read_media(fields: Mapping[str, Raw], path: str, rules: GatewayConfig | None, salt: bytes) -> Steps[Media]:
    """Return the images of a body. `rules`: None if no engine of the model takes images.

    Raises InvalidRequestError for a medium that is not served, in the prompt or as the answer.
    """
    reader, found = _Reader(path, rules, salt), {}
    for name in _SCORED if path in ("/score", "/rerank") else ("messages", "input"):
        if name in fields and (value := (yield from reader.value(fields[name], name))) is not None:
            found[name] = value
    if "modalities" in fields and _value_of(fields["modalities"]) not in (None, ["text"]):
        raise unsupported("modalities", "can only be ['text']: this server makes text")
    for name in _PROCESSING if reader.images else ():
        if name in fields and bytes(fields[name]) not in (b"null", b"{}"):
            raise unsupported(name, "is not offered: images are processed by the engine's own settings")
    return Media({**fields, **found}, tuple(reader.images), reader.num_bytes)


class _Reader:
    """Reads the parts of one body."""

    def __init__(self, path: str, rules: GatewayConfig | None, salt: bytes) -> None:
        self.images: list[Image] = []
        self.num_bytes = 0
        self._types = _IMAGE_TYPES if path == CHAT_PATH else ()
        self._rules = rules
        self._salt = salt

    def value(self, raw: Raw, param: str) -> Steps[Any]:
        """Read a part or a list of parts. Return it with the names of its images; None if it stays as it is."""
        if first_char(raw) == "[":
            items = _list_of(raw)
            read = []
            for index, item in enumerate(items):
                read.append((yield from self.value(item, f"{param}[{index}]")))
                yield
            if all(each is None for each in read):
                return None
            return [_value_of(item) if new is None else new for item, new in zip(items, read, strict=True)]
        return (yield from self._part(_dict_of(raw), param)) if first_char(raw) == "{" else None

    def _part(self, part: dict[str, Raw], param: str) -> Steps[Any]:
        """Read a part. Its type or a field makes it a medium. Null ones go: vLLM ignores the ids of their prompts."""
        type_ = _value_of(part["type"]) if first_char(part.get("type", _NULL)) == '"' else None
        names = [type_, *[key for key, item in part.items() if first_char(item) != "n"]]
        if found := [name for name in names if name in MEDIA]:
            if type_ is None and first_char(part.get("type", _NULL)) != "n":
                raise invalid(f"{param}.type", "must be a string")
            is_image = type_ in self._types and _IMAGE_KEYS.issuperset(found)
            if is_image and self._rules is not None:
                return (yield from self._image(part, param, self._rules))
            not_served = "which is not served where the engine writes the text"
            why = "and this model takes no images here" if is_image else not_served
            name = next((name for name in found if name not in _IMAGE_KEYS), found[0])
            raise unsupported(param, f"holds {name}, {why}: send text")
        new = {}
        for name in _HOLD_PARTS:
            if name in part and (value := (yield from self.value(part[name], f"{param}.{name}"))) is not None:
                new[name] = value
        kept = {name: item for name, item in part.items() if name not in MEDIA or first_char(item) != "n"}
        return {key: _value_of(kept[key]) for key in kept if key not in new} | new if new or kept != part else None

    def _image(self, part: dict[str, Raw], param: str, rules: GatewayConfig) -> Steps[dict[str, Any]]:
        """Check an image. Return its part with the image's name."""
        if len(self.images) == rules.max_images:
            raise invalid(param, f"is one image too many: send at most {rules.max_images} in a request")
        param = f"{param}.image_url"
        raw = part.get("image_url", _NULL)
        inner = _dict_of(raw) if first_char(raw) == "{" else None
        new = {name: _value_of(item) for name, item in part.items() if name != "image_url"}
        new["type"] = new.get("type") or "image_url"
        url = raw if inner is None else inner.get("url", _NULL)
        new["uuid"] = yield from image_name(url, param, rules, self._salt)
        others = {} if inner is None else {name: _value_of(item) for name, item in inner.items() if name != "url"}
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
