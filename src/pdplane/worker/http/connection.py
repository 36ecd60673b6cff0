"""The workers' HTTP connections: uvicorn's, with a bound on the head and on the time that a request takes to arrive."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_LIMIT_BYTES = 64 * 1024
ARRIVAL_LIMIT_S = 60.0

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b"
)


class BoundedHttp(HttpToolsProtocol):
    """A head over the limit is a 431; a request that is not whole in time ends its connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._arrival: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            end = data.find(b"\r\n\r\n")
            self._head_bytes += len(data) if end < 0 else end
            if self._head_bytes > HEAD_LIMIT_BYTES:
                self._refuse_head()
                return
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arrival = self.loop.call_later(ARRIVAL_LIMIT_S, self.transport.close)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._arrived()
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def _arrived(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _refuse_head(self) -> None:
        body = (
            b'{"error":{"message":"the request head is over %d bytes; send fewer headers",'
            b'"type":"invalid_request_error","param":null,"code":"head_too_large"}}' % HEAD_LIMIT_BYTES
        )
        self.transport.write(_TOO_LARGE % (len(body), body))
        self.transport.close()
