"""Parts of messages that are no text, as a model of text sees them.

document, search_result     their text, below title and source
images, sound, files, ...   a line in their place, [image: left out, as this model reads text], which answers name
any other type              refused

A refusal would end the conversation: agents send every part of it again with each turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import Raw

from server.schema.decoding import NULL, fields_of, first_char, value_of

MEDIA: Final = frozenset(
    {
        *("image", "image_url", "input_image", "image_pil", "image_embeds", "computer_screenshot"),
        *("audio", "audio_url", "input_audio", "audio_embeds", "video", "video_url", "input_video"),
        *("video_embeds", "file", "input_file", "document", "container_upload", "prompt_embeds"),
    }
)
"""Types of parts that hold media, and keys of parts without a type."""
NOT_TEXT: Final = MEDIA | {"search_result"}
"""Types of parts that have a text or a line in their place."""
_MAX_TITLE: Final = 200
"""Characters of a title: one line names the part."""


def block_text(kind: str, title: object, raw_source: Raw, content: object) -> tuple[str, bool]:
    """Return the text for a part of one of the types `NOT_TEXT`, and whether it is all of it."""
    source = value_of(raw_source) if kind in ("document", "search_result") else None
    name = " ".join(title.split())[:_MAX_TITLE] if isinstance(title, str) else ""
    texts: list[str] = []
    if kind == "search_result":
        texts = [*filter(None, [source if isinstance(source, str) else ""]), *_texts(content)]
    elif kind == "document" and isinstance(source, dict):
        given = {"text": source.get("data"), "content": source.get("content")}
        texts = list(_texts(given.get(str(source.get("type")))))
    if texts:
        return "\n".join(filter(None, [name, *texts])), True
    return f"[{kind}{': ' if name else ''}{name}: left out, as this model reads text]", False


def image_url(kind: str, source: Raw, url: Raw, detail: object) -> Raw:
    """Return the `image_url` of a chat's part for an image of another API, whose bytes are not decoded; null for none.

    What is no image is left to the reader of chats to refuse.
    """
    if kind == "image":
        given = fields_of(source) if first_char(source) == "{" else {}
        url, data = given.get("url", NULL), bytes(given.get("data", NULL))
        media_type = bytes(given.get("media_type", Raw(b'"image/jpeg"')))
        if data[:1] == media_type[:1] == b'"':
            url = Raw(b'"data:%b;base64,%b' % (media_type[1:-1], data[1:]))
    if kind not in ("image", "input_image") or first_char(url) != '"':
        return NULL
    return Raw(msgspec.json.encode({"url": url} | ({} if detail is None else {"detail": detail})))


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
