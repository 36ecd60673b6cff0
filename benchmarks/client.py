"""A client that can leave at any moment: one request over one raw connection, for benchmarks and trials."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from typing import Any
from urllib.parse import urlsplit

import httptools


@dataclasses.dataclass
class Call:
    """A request under way. Times are Unix seconds. `events`: SSE payloads; a plain answer is in `body`."""

    url: str
    path: str
    payload: dict[str, Any]
    label: str = ""
    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    body: bytes = b""
    done: bool = False  # [DONE] was read
    complete: bool = False  # the answer ended as HTTP says
    broken: str = ""  # the connection ended before that
    sent_at: float = 0.0
    first_byte_at: float = 0.0
    ended_at: float = 0.0
    _writer: asyncio.StreamWriter | None = None
    _reader: asyncio.StreamReader | None = None
    _line: bytes = b""

    async def send(self) -> None:
        """Connects and sends the whole request. Raises OSError."""
        parts = urlsplit(self.url)
        self._reader, self._writer = await asyncio.open_connection(parts.hostname, parts.port)
        self._parser = httptools.HttpResponseParser(self)
        content = json.dumps(self.payload).encode()
        label = f"x-request-id: {self.label}\r\n" if self.label else ""
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
            f"{label}content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        self.sent_at = time.time()
        self._writer.write(head.encode() + content)
        await self._writer.drain()

    async def read_some(self) -> bool:
        """Takes what has come; False where no more will."""
        assert self._reader is not None
        if self.ended_at:
            return False
        try:
            data = await self._reader.read(65536)
            if data:
                self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as error:
            self.broken = f"{type(error).__name__}: {error}"
            data = b""
        if data and not self.complete:
            return True
        if not self.complete and not self.broken:
            self.broken = "the connection ended inside the answer" if self.status else "closed without an answer"
        self.ended_at = time.time()
        self.close()
        return False

    async def read_all(self) -> None:
        while await self.read_some():
            pass

    def close(self) -> float:
        """Leaves, now; the time of it."""
        at = time.time()
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
        return at

    # --- what was answered ----------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        if self.events:
            return "".join(choice.get("text") or "" for choice in self._choices)
        return str(self._plain["choices"][0]["text"]) if "choices" in self._plain else ""

    @property
    def finish(self) -> str:
        if self.events:
            return next((c["finish_reason"] for c in reversed(self._choices) if c.get("finish_reason")), "")
        return str(self._plain["choices"][0]["finish_reason"]) if "choices" in self._plain else ""

    @property
    def error(self) -> dict[str, Any]:
        """The error body or event, {} where there is none."""
        for said in (self._plain, *self.events):
            if isinstance(said.get("error"), dict):
                found: dict[str, Any] = said["error"]
                return found
        return {}

    @property
    def tokens(self) -> int:
        """Events with a choice so far; about one per token."""
        return len(self._choices)

    @property
    def _choices(self) -> list[dict[str, Any]]:
        return [event["choices"][0] for event in self.events if event.get("choices")]

    @property
    def _plain(self) -> dict[str, Any]:
        try:
            told = json.loads(self.body) if self.body and not self.events else {}
        except ValueError:
            return {}
        return told if isinstance(told, dict) else {}

    # --- httptools ------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.first_byte_at = self.first_byte_at or time.time()
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            self.body += body
            return
        *lines, self._line = (self._line + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                self._event(line[6:].strip())

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
        else:
            self.events.append(json.loads(data))

    def on_message_complete(self) -> None:
        self.complete = True


async def get(url: str, path: str, timeout_s: float = 5.0) -> tuple[int, Any]:
    """(status, JSON). Raises OSError or TimeoutError."""
    return await _small(url, f"GET {path} HTTP/1.1", b"", timeout_s)


async def post(url: str, path: str, payload: dict[str, Any], timeout_s: float = 5.0) -> tuple[int, Any]:
    """(status, JSON). Raises OSError or TimeoutError."""
    return await _small(url, f"POST {path} HTTP/1.1", json.dumps(payload).encode(), timeout_s)


async def _small(url: str, line: str, content: bytes, timeout_s: float) -> tuple[int, Any]:
    parts = urlsplit(url)
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            head = f"{line}\r\nhost: {parts.netloc}\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
            writer.write(head.encode() + content)
            answer = await reader.read()
        finally:
            writer.transport.abort()
    small = _Small()
    parser = httptools.HttpResponseParser(small)
    parser.feed_data(answer)
    return parser.get_status_code(), json.loads(small.body or b"null")


class _Small:
    def __init__(self) -> None:
        self.body = b""

    def on_body(self, body: bytes) -> None:
        self.body += body
