"""An adapter whose engine takes images: PNG files with any pixels, but no others."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Final

from cache.hashing import MediaStart
from cache.records import WorkerMember
from tests.server.api.engine_worker import EngineWorker
from worker.common.capabilities import IMAGES
from worker.wire import Failed, Rendered

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
NUM_PLACEHOLDERS: Final = 20
MAX_PIXELS: Final = 178_956_970
"""Pillow refuses more, which vLLM reports as its own fault."""


def png(colour: int = 0, size: tuple[int, int] = (8, 8), pixels: bytes | None = None) -> bytes:
    """Return an image of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    if pixels is None:
        pixels = (b"\0" + bytes([colour]) * size[0]) * size[1]
    head = struct.pack(">IIBBBBB", *size, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def in_base64(image: bytes) -> str:
    return base64.b64encode(image).decode()


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{in_base64(image)}"


def part_of(path: str, url: str, **fields: Any) -> dict[str, Any]:
    """Return the part with an image at a URL, in the form of an API."""
    if path == CHAT:
        return {"type": "image_url", "image_url": {"url": url}} | fields
    if path == RESPONSES:
        return {"type": "input_image", "image_url": url} | fields
    is_data = url.startswith("data:")
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]} if is_data else {"url": url}
    return {"type": "image", "source": {"type": "url"} | source} | fields


def body_of(path: str, *parts: Any, **fields: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": list(parts)}]
    of_api = {"input": turns} if path == RESPONSES else {"messages": turns, "max_tokens": 8}
    return {"model": "tiny"} | of_api | fields


def urls_in(value: Any) -> Iterator[tuple[str, str | None]]:
    """Yield the images of a body, each with the name that it is given."""
    if isinstance(value, list):
        for each in value:
            yield from urls_in(each)
    elif isinstance(value, dict):
        if "image_url" in value and value.get("type") in (None, "image_url", "input_image"):
            url = value["image_url"]
            yield url["url"] if isinstance(url, dict) else url, value.get("uuid")
        else:
            yield from urls_in(value.get("content"))


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from texts_in(each.get("text", each.get("content", "")) if isinstance(each, dict) else each)


@dataclass(eq=False)
class SeeingWorker(EngineWorker):
    """Renders the texts of a body, and a run of placeholders for each image before them."""

    sees: bool = True
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    """The URLs of images in bodies, with the names that they were given."""

    def member(self) -> WorkerMember:
        member = super().member()
        return replace(member, capabilities=(*member.capabilities, IMAGES)) if self.sees else member

    def render(self, path: str, body: dict[str, Any]) -> Rendered | Failed:
        try:
            return self._rendered(body)
        except Unreadable as error:
            return error.failed
        except Exception:  # a body of another form
            return Failed("invalid_request", "a field is wrong", retryable=False)

    def _rendered(self, body: dict[str, Any]) -> Rendered:
        turns = body["messages"]
        images = list(urls_in(turns))
        self.seen += images
        for url, _ in images:
            check(url)
        assert self.tokenizer is not None
        text_ids = self.tokenizer.encode("<|im_start|>" + "\n".join(texts_in(turns)) + "<|im_end|>").ids
        ids = [3] * (NUM_PLACEHOLDERS * len(images)) + text_ids
        names = [name or sha256(url.encode()).hexdigest() for url, name in images]
        starts = tuple(MediaStart(name, NUM_PLACEHOLDERS * number) for number, name in enumerate(names))
        return Rendered((tuple(ids),), (100,), (starts,) if starts else ())


class Unreadable(Exception):
    def __init__(self, code: str, message: str) -> None:
        self.failed = Failed(code, message, retryable=False)


def check(url: str) -> None:
    """Raise Unreadable as vLLM does for an image."""
    if not url.startswith("data:"):
        return
    image = base64.b64decode(url.partition(",")[2])
    if image[:8] != b"\x89PNG\r\n\x1a\n" or len(image) < 33 or not image.endswith(png()[-12:]):
        raise Unreadable("invalid_request", "Failed to load image: cannot identify image file")
    width, height = struct.unpack(">II", image[16:24])
    if width * height > MAX_PIXELS:
        raise Unreadable("engine_error", "Image size exceeds limit")
