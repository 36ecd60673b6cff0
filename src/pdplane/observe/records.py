"""The record of a leg: what happened to it here, in order, with times. It asks nobody and is read by `explain`."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from pdplane.core.ids import HoldNo, Rid, Room, room_named


class Entry(msgspec.Struct, frozen=True):
    """`at_s`: seconds since the leg arrived; `state` as the core names it."""

    at_s: float
    state: str
    detail: str = ""


class LegRecord(msgspec.Struct):
    """One attempt's leg on this worker. `started_unix_s` lines timelines of several processes up."""

    rid: Rid
    request_id: str
    room: Room | None
    role: str
    instance: str
    started_unix_s: float
    started: float
    prompt_tokens: int = 0
    peer: str = ""
    hold: HoldNo | None = None  # params: prefill's own, under which its KV is held
    entries: list[Entry] = []
    first_token_s: float | None = None
    finished: str = ""


class RecordBook:
    """The last `size` legs, oldest out first; found by rid, by request id (all of its samples) or by room."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._records: OrderedDict[Rid, LegRecord] = OrderedDict()

    def open(self, record: LegRecord) -> None:
        self._records[record.rid] = record
        if len(self._records) > self._size:
            self._records.popitem(last=False)

    def note(self, rid: Rid, now: float, state: str, detail: str = "") -> None:
        if record := self._records.get(rid):
            record.entries.append(Entry(round(now - record.started, 6), state, detail))

    def get(self, rid: Rid) -> LegRecord | None:
        return self._records.get(rid)

    def find(self, key: str) -> list[LegRecord]:
        if record := self._records.get(Rid(key)):
            return [record]
        room = room_named(key)
        return [r for r in self._records.values() if r.request_id == key or (room is not None and r.room == room)]


def describe(record: LegRecord) -> dict[str, Any]:
    """JSON of a record; `started` is a local clock's and stays here."""
    told: dict[str, Any] = msgspec.to_builtins(record)
    del told["started"]
    return told
