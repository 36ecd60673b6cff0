"""One small HTTP call outside the data path: health looks and abort calls. A connection per call."""

from __future__ import annotations

import asyncio
import contextlib

import httptools

from .config import Address

MAX_ANSWER_BYTES = 4 * 1024 * 1024


class CallFailed(Exception):
    """No answer: the message says why (refused, timed out, garbled)."""


class _Answer:
    """Callbacks of one response."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.complete = False

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


async def call(
    address: Address, method: str, path: str, body: bytes = b"", *, headers: bytes = b"", timeout_s: float
) -> tuple[int, bytes]:
    """(status, body). `headers` are ready lines. Raises CallFailed."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _call(address, method, path, body, headers)
    except TimeoutError:
        raise CallFailed(f"no answer within {timeout_s:g} s") from None
    except ConnectionRefusedError:
        raise CallFailed("connection refused") from None
    except (OSError, httptools.HttpParserError) as error:
        raise CallFailed(str(error) or type(error).__name__) from None


async def _call(address: Address, method: str, path: str, body: bytes, headers: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {address.netloc}\r\nconnection: close\r\naccept: application/json\r\n"
        )
        length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if method == "POST" else ""
        writer.write(head.encode() + headers + length.encode() + b"\r\n" + body)
        answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        size = 0
        while not answer.complete:
            data = await reader.read(65536)
            if not data:
                raise CallFailed("connection closed before the answer was complete")
            size += len(data)
            if size > MAX_ANSWER_BYTES:
                raise CallFailed(f"answer over {MAX_ANSWER_BYTES} bytes")
            parser.feed_data(data)
        return parser.get_status_code(), b"".join(answer.parts)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
