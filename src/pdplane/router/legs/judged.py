"""Decode's leg of an engine that sends its head before it knows what will come of the request (native vLLM)."""

from __future__ import annotations

from typing import Any

import msgspec

from pdplane.wire.body import NOT_JSON

from ..upstream import WorkerAnswer, unframed
from .rooms import DecodeLeg

FIRST_EVENT_BYTES = 64 * 1024
_ERROR_EVENT = b'data: {"error"'


class JudgedDecodeLeg(DecodeLeg):
    """Of an engine that answers 200 before it knows: a stream that has an error before its first word was refused (a
    chat's first event names a role, whatever comes of it). One that has it later, in a chunk of its own, broke off
    there."""

    __slots__ = ("_cut", "_rest")

    def _reset(self) -> None:
        super()._reset()
        self._cut = False
        self._rest = b""  # of what came with the first event: from a later error on

    def _received(self, data: bytes) -> None:
        if self.streaming and self.raw:
            at = _error_chunk(data)
            if at >= 0:
                self._broke_off(data, at)
                return
        super()._received(data)
        if self._rest and self.exchange is not None:
            self._broke_off(self._rest, 0)

    def _may_start(self, data: bytes) -> bool:
        if not super()._may_start(data):
            return False
        if b"text/event-stream" not in self.head().lower():
            return True
        events = unframed(self.held).split(b"\n\n")[:-1]
        first = next((event for event in events if not _wordless(event)), None)
        if first is None and not self.complete:
            return len(self.held) > FIRST_EVENT_BYTES
        error = error_of(first) if first is not None else None
        if error is None:
            at = _error_chunk(self.held)
            if at >= 0:
                self.held, self._rest = self.held[:at], self.held[at:]
                self.complete = False
            return True
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        exchange.leg_refused(self, error)
        self.discard()
        return False

    def _broke_off(self, data: bytes, at: int) -> None:
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        if at:
            exchange.forward(data[:at])
        self._cut = True
        event = data[data.find(_ERROR_EVENT) :].partition(b"\n\n")[0]
        exchange.leg_broke_off(self, error_of(event) or WorkerAnswer(500, b"", b""))
        self.discard()

    def at_chunk_boundary(self) -> bool:
        return self._cut or super().at_chunk_boundary()


def _error_chunk(raw: bytes) -> int:
    """Where the chunk begins that is an error event; -1: there is none."""
    at = raw.find(_ERROR_EVENT)
    if at < 2 or raw[at - 2 : at] != b"\r\n":
        return -1
    before = raw.rfind(b"\r\n", 0, at - 2)
    return before + 2 if before >= 0 else 0


class _Error(msgspec.Struct):
    code: Any = None


class _Delta(msgspec.Struct):
    role: Any = None
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None

    @property
    def wordless(self) -> bool:
        said = self.content or self.reasoning or self.reasoning_content or self.tool_calls
        return bool(self.role) and not said


class _EventChoice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: Any = None


class _Event(msgspec.Struct):
    error: _Error | None = None
    choices: list[_EventChoice] = []


_event = msgspec.json.Decoder(_Event)


def _wordless(event: bytes) -> bool:
    """Whether it names roles and nothing else."""
    if b'"role"' not in event:
        return False
    try:
        choices = _event.decode(event.partition(b":")[2]).choices
    except NOT_JSON:
        return False
    return bool(choices) and all(
        one.delta is not None and one.delta.wordless and one.finish_reason is None for one in choices
    )


def error_of(event: bytes) -> WorkerAnswer | None:
    """The error that a server-sent event is, as the answer that it would have been; None: it is none."""
    name, _, data = event.partition(b":")
    if name.strip() != b"data" or b'"error"' not in data:
        return None
    try:
        error = _event.decode(data).error
    except NOT_JSON:
        return None
    if error is None:
        return None
    status = error.code if error.code.__class__ is int and 400 <= error.code < 600 else 500
    return WorkerAnswer(status, b"content-type: application/json\r\n", data.strip())
