"""The live feed of a gateway's ops port, as it comes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

SILENT_S: Final = 5.0
"""A gateway that lives says something twice a second."""
MAX_EVENT_BYTES: Final = 8 << 20


class FeedError(Exception):
    """No feed, or no more of it. The text says what to do."""


async def events(url: str) -> AsyncGenerator[tuple[str, Any], None]:
    """Name and data of each event until the gateway goes away: always ends with FeedError."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENT_S, sock_read=SILENT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=MAX_EVENT_BYTES) as session,
            session.get(f"{url}/events", headers={"accept": "text/event-stream"}) as response,
        ):
            if response.status != 200 or response.content_type != "text/event-stream":
                raise FeedError(
                    f"{url} answered {response.status}, no feed: is it the ops port of a gateway (8001 by default)?"
                )
            name = ""
            async for line in response.content:
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    yield name, json.loads(line[6:])
    except TimeoutError:
        raise FeedError(f"{url} is silent: the gateway hangs or is out of reach") from None
    except aiohttp.ClientConnectorError as error:
        raise FeedError(f"{url} cannot be reached ({error.strerror or error}): is a gateway running?") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise FeedError(f"{url}: {str(error) or type(error).__name__}") from None
    raise FeedError(f"{url} has closed the feed: the gateway stopped")


def ops_url(text: str) -> str:
    """`8001`, `host:8001` or a URL -> a base URL. Raises ValueError."""
    if text.isdecimal():
        text = f"127.0.0.1:{text}"
    if "://" not in text:
        text = f"http://{text}"
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is no URL of an ops port, such as http://127.0.0.1:8001")
    return text.rstrip("/").removesuffix("/dashboard").rstrip("/")
