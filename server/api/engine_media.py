"""Images, audio, video and files in requests whose text the engine writes: refused by name.

An engine drops some of them, and renders others to placeholders, whose ids are the same for every image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

from server.schema.decoding import unsupported

MEDIA: Final = frozenset(
    {
        *("image", "image_url", "input_image", "image_pil", "image_embeds", "computer_screenshot"),
        *("audio", "audio_url", "input_audio", "audio_embeds", "video", "video_url", "input_video"),
        *("file", "input_file", "document", "container_upload", "prompt_embeds"),
    }
)
"""Types of parts, and keys of parts without a type."""
_LISTS: Final = ("content", "output")
"""Fields of a message, an item or a part that hold parts."""
_value_of: Final = msgspec.json.Decoder().decode


def check_media(fields: Mapping[str, Raw]) -> None:
    """Raises InvalidRequestError for a part that is no text, and for an answer that would be none."""
    for name in ("messages", "input", "system"):
        if name in fields:
            _check(_value_of(fields[name]), name)
    for name in ("prompt_embeds", "audio"):
        if name in fields and bytes(fields[name]) != b"null":
            raise unsupported(name, "is not served where the engine writes the text: leave it out")
    if "modalities" in fields and _value_of(fields["modalities"]) not in (None, ["text"]):
        raise unsupported("modalities", "can only be ['text']: this server makes text")


def _check(value: Any, place: str) -> None:
    """Check a part, or a list of them, with all parts inside."""
    if isinstance(value, list):
        for index, part in enumerate(value):
            _check(part, f"{place}[{index}]")
    elif isinstance(value, dict):
        named = [value.get("type"), *[key for key, item in value.items() if item is not None]]
        if found := [name for name in named if isinstance(name, str) and name in MEDIA]:
            message = f"holds {found[0]}, which is not served where the engine writes the text: send text"
            raise unsupported(place, message)
        for name in _LISTS:
            if name in value:
                _check(value[name], f"{place}.{name}")
