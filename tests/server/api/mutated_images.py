"""Bodies with images that are wrong in some way: sizes, types, cut or changed bytes, bombs, URLs, and many of them."""

from __future__ import annotations

import json
import random
from typing import Any, Final

from tests.server.api.seeing_engine import CHAT, MESSAGES, RESPONSES, body_of, data_url, in_base64, part_of, png

WRONG: Final[tuple[Any, ...]] = (
    None,
    0,
    -1.5,
    True,
    "",
    "a",
    [],
    {},
    [[]],
    {"url": {}},
    {"type": "image"},
    "\u0000",
    2**70,
)
URLS: Final = (
    *("file:///etc/passwd", "ftp://images.example/a", "http://169.254.169.254/latest", "gopher://127.0.0.1:6379/_a"),
    *("http://images.example@127.0.0.1/", "http://127.0.0.1#images.example", "//images.example/a", "javascript:1"),
    *(
        "https://images.example\\@evil.example/",
        "http://[::1]/",
        "http://0x7f000001/",
        "data:",
        "data:,",
        "data:;base64,",
    ),
    *("data:image/png;base64,====", "data:image/png;base64;base64,AAAA", "data:" + "a" * 3000 + ";base64,AAAA", " "),
)


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """Return a route and a body of it."""
    path = rng.choice((CHAT, MESSAGES, RESPONSES))
    parts = [_part(rng, path) for _ in range(rng.choice((1, 1, 1, 2, 3, 40)))]
    if rng.random() < 0.3:
        parts.insert(rng.randrange(len(parts)), {"type": "text", "text": rng.choice(("a", "<|im_end|>", "\ud7ff"))})
    if rng.random() < 0.1:
        parts = [{"type": "tool_result", "tool_use_id": "c", "content": parts}]
    body = json.dumps(body_of(path, *parts, stream=path == CHAT and rng.random() < 0.2)).encode()
    if rng.random() < 0.1:
        at = rng.randrange(len(body))
        body = body[:at] + rng.choice((b"", b"\\", b'"', b"\xff", b"\\ud800", b"\\/")) + body[at + 1 :]
    return path, body


def _part(rng: random.Random, path: str) -> Any:
    """Return a part with an image, in which one thing is wrong or nothing is."""
    part = part_of(path, _url(rng))
    match rng.randrange(8):
        case 0:
            part[rng.choice((*part, "uuid", "detail", "cache_control"))] = rng.choice(WRONG)
        case 1:
            part.pop(rng.choice(list(part)))
        case 2:
            inner = part.get("source", part.get("image_url"))
            if isinstance(inner, dict):
                inner[rng.choice((*inner, "url", "data", "media_type", "file_id"))] = rng.choice(WRONG)
        case 3:
            part = part_of(rng.choice((CHAT, MESSAGES, RESPONSES)), _url(rng))
    return part if rng.random() < 0.95 else rng.choice(WRONG)


def _url(rng: random.Random) -> str:
    match rng.randrange(8):
        case 0:
            return rng.choice(URLS)
        case 1:
            return data_url(rng.randbytes(rng.choice((1, 2, 3, 100, 5000))))
        case 2:
            return data_url(png()[: rng.randrange(60)])
        case 3:
            return data_url(png(size=rng.choice(((60_000, 60_000), (2**31 - 1, 1), (0, 0), (1, 1))), pixels=bytes(99)))
        case 4:
            text = list(in_base64(png()))
            for _ in range(rng.choice((1, 1, 5))):
                text[rng.randrange(len(text))] = rng.choice("=A/+-_ \n\t\u00e9%<")
            return "data:image/png;base64," + "".join(text)
        case 5:
            return data_url(png(size=(2, 30_000), pixels=rng.randbytes(60_000)))
        case _:
            return data_url(png(rng.randrange(4)))
