"""The workers' HTTP connections: uvicorn's, with a bound on the head and on the time that a request takes to arrive."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdplane.core.errors import Cause, bad_request
from pdplane.wire.errors import error_body

HEAD_LIMIT_BYTES = 64 * 1024
ARRIVAL_LIMIT_S = 60.0


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
        message = f"the request's head is over {HEAD_LIMIT_BYTES} bytes; send fewer headers"
        self._refuse("Request Header Fields Too Large", Cause("head_too_large", message, 431))

    def send_400_response(self, msg: str) -> None:
        """uvicorn's word for what is no HTTP, in the shape of all our errors."""
        self._refuse("Bad Request", bad_request("the request is not valid HTTP", code="bad_http"))

    def _refuse(self, reason: str, cause: Cause) -> None:
        body = error_body(cause)
        head = f"HTTP/1.1 {cause.status} {reason}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
