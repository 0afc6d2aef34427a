"""GET /events: the feed on one connection."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from server.http.stream import CancelOnDisconnect, ClientGoneError, SseWriter, client_of
from server.ops.feed import Feed
from server.request_context import context_of


class EventsEndpoint:
    """An ASGI app by itself: the stream ends when the viewer leaves or the gateway stops."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context_of(scope).route = "events"
        writer = SseWriter(send, list)
        with self._feed.viewing() as viewer:
            try:
                with CancelOnDisconnect(client_of(scope)):
                    async for frames in viewer.frames():
                        await writer.write(frames)
            except ClientGoneError:
                return  # closing the page is how a viewer leaves
            await writer.write(b"", more=False)
