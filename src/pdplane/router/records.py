"""What happened to the last requests: a ring of records, read by request id, rid or room."""

from __future__ import annotations

from typing import Any

import msgspec

from pdplane.core.errors import Cause
from pdplane.core.ids import Rid, Room, room_named


class HandoffRecord(msgspec.Struct, gc=False):
    """What legs that leave in turn have beside others. `rid`s are the legs' x-request-id; `request_id` and `hold` are
    prefill's own names of what it holds. `release`: what became of it where decode did not take it: released, unknown
    (prefill no longer had it), failed, native (the engine has no such call). Times as in AttemptRecord."""

    prefill_rid: str = ""
    decode_rid: str = ""
    request_id: str = ""
    hold: int | None = None
    lease_s: float | None = None  # left when prefill answered
    lease_left_s: float | None = None  # when decode's leg was opened
    answered: float = 0.0
    decode_opened: float = 0.0
    release: str = ""
    release_cause: str = ""  # why decode did not take it, by code

    def describe(self, zero: float) -> dict[str, Any]:
        return {
            "prefill_rid": self.prefill_rid,
            "decode_rid": self.decode_rid,
            "request_id": self.request_id,
            "hold": self.hold,
            "lease_s": self.lease_s,
            "lease_left_s": None if self.lease_left_s is None else round(self.lease_left_s, 6),
            "answered_s": since(zero, self.answered),
            "decode_opened_s": since(zero, self.decode_opened),
            "released": self.release == "released" if self.release else None,
            "release": self.release,
            "release_cause": self.release_cause,
        }


class AttemptRecord(msgspec.Struct, gc=False):
    """One pair of legs. Times are monotonic seconds; 0 is "did not happen". `mode` is pd, aggregated, or decode-only
    where decode computed the prompt too."""

    attempt: int
    prefill: str
    decode: str
    rooms: tuple[Room, ...]
    rids: tuple[Rid, ...]
    opened: float
    ranks: tuple[int, ...] = ()  # of prefill, one per sample, where it has several
    sample: int = 0  # where each has a pair of its own
    mode: str = "pd"
    dialect: str = "rooms"
    handoff: HandoffRecord | None = None
    prefill_ended: float = 0.0
    first_byte: float = 0.0
    decode_ended: float = 0.0
    cause: Cause | None = None

    def describe(self, zero: float) -> dict[str, Any]:
        return {
            "attempt": self.attempt,
            "sample": self.sample,
            "mode": self.mode,
            "dialect": self.dialect,
            "prefill": self.prefill,
            "decode": self.decode,
            "rooms": list(self.rooms),
            "rids": list(self.rids),
            "prefill_ranks": list(self.ranks),
            "opened_s": since(zero, self.opened),
            "prefill_ended_s": since(zero, self.prefill_ended),
            "first_byte_s": since(zero, self.first_byte),
            "decode_ended_s": since(zero, self.decode_ended),
            "handoff": self.handoff.describe(zero) if self.handoff is not None else None,
            "cause": describe_cause(self.cause),
        }


class RequestRecord(msgspec.Struct, gc=False):
    """One client request. `verdict` is "running", "ok" or the first cause's code. `number` counts the requests."""

    number: int
    request_id: str
    path: str
    received: float
    received_unix_s: float
    label: str = ""
    samples: int = 1
    attempts: list[AttemptRecord] = []
    finished: float = 0.0
    done: float = 0.0
    status: int = 0
    late: int = 0
    cause: Cause | None = None

    @property
    def mode(self) -> str:
        """Of the last attempt; of several samples, the one that is furthest from a pair."""
        attempts = self.attempts
        if len(attempts) == 1:
            return attempts[0].mode
        last = {attempt.sample: attempt.mode for attempt in attempts}
        modes = set(last.values())
        return next((mode for mode in ("decode-only", "aggregated") if mode in modes), "pd")

    @property
    def dialect(self) -> str:
        """Of the last attempt."""
        return self.attempts[-1].dialect if self.attempts else "unknown"

    @property
    def verdict(self) -> str:
        if not self.finished:
            return "running"
        return self.cause.code if self.cause else "ok"

    def describe(self) -> dict[str, Any]:
        """Times are seconds since the request was received; None is "did not happen"."""
        zero = self.received
        return {
            "request_id": self.request_id,
            "label": self.label,
            "path": self.path,
            "dialect": self.dialect,
            "mode": self.mode,
            "samples": self.samples,
            "received_unix_s": self.received_unix_s,
            "verdict": self.verdict,
            "status": self.status,
            "cause": describe_cause(self.cause),
            "attempts": [attempt.describe(zero) for attempt in self.attempts],
            "finished_s": since(zero, self.finished),
            "done_s": since(zero, self.done),
            "late_events": self.late,
        }


class Records:
    """The last `size` requests, running ones among them."""

    __slots__ = ("_ring", "_size")

    def __init__(self, size: int) -> None:
        self._size = max(size, 1)
        self._ring: list[RequestRecord | None] = [None] * self._size

    def add(self, record: RequestRecord) -> None:
        self._ring[record.number % self._size] = record

    def find(self, key: str) -> RequestRecord | None:
        """By request id, by an attempt's rid (also as vLLM makes its answer's id of it), by room, or by the client's
        label (the newest)."""
        request_id = key.removeprefix("chatcmpl-").removeprefix("cmpl-").split(".", 1)[0]
        room = room_named(key)
        for record in sorted(filter(None, self._ring), key=lambda r: -r.number):
            if record.request_id == request_id or record.label == key:
                return record
            if room is not None and any(room in attempt.rooms for attempt in record.attempts):
                return record
        return None


def since(zero: float, at: float) -> float | None:
    return round(at - zero, 6) if at else None


def describe_cause(cause: Cause | None) -> dict[str, Any] | None:
    if cause is None:
        return None
    return {"code": cause.code, "message": cause.message, "status": cause.status, "side": cause.side}
