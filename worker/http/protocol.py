"""uvicorn's httptools protocol with the bound on a head that its slower h11 has."""

from __future__ import annotations

from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 64 * 1024


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection whose bytes are, for too long, neither a whole head nor a part of a body."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_unused = 0

    def data_received(self, data: bytes) -> None:
        self._num_unused += len(data)
        super().data_received(data)
        if self._num_unused > MAX_HEAD_BYTES:
            self.transport.close()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._num_unused = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._num_unused = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._num_unused = 0
