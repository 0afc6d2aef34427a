"""uvicorn's h11 protocol with errors in our shape: what is no HTTP still gets the four-key object.

h11 and not httptools: it bounds the size of a request's head.
"""

from __future__ import annotations

import sys
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.errors import ApiError, HeaderTooLargeError, InvalidRequestError

LINGER_S: Final = 1.0


class GatewayProtocol(H11Protocol):
    """After such an error the rest of the input is read and dropped: closing at once would reset the connection,
    and the peer might never see the answer."""

    _refused = False

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Called while h11's RemoteProtocolError is being handled."""
        broken = sys.exc_info()[1]
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        error: ApiError = InvalidRequestError("This is not a valid HTTP request.")
        if isinstance(broken, h11.RemoteProtocolError) and broken.error_status_hint == 431:
            error = HeaderTooLargeError("The request's headers are too large.")
        body = error.body()
        headers = [*error.headers(), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            data = self.conn.send(event)
            assert data is not None, event
            self.transport.write(data)
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)
