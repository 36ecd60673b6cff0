"""What the shells of a pair's two sides share: control sessions, and what is told about grants and peers on them."""

from __future__ import annotations

import time
from typing import Any, Generic, TypeVar

import msgspec

from pdplane.core.decode import DecodeNode
from pdplane.core.events import ConnLost, Event, FrameIn
from pdplane.core.frames import Beat, Frame
from pdplane.core.ids import ConnId, Room
from pdplane.core.pages import grant_owner
from pdplane.core.prefill import PrefillNode
from pdplane.observe.grants import GrantBook, describe

from .control import ControlNet
from .shell import Parts, Shell

N = TypeVar("N", PrefillNode, DecodeNode, covariant=True)


class PairedShell(Shell[N], Generic[N]):
    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.control = ControlNet(self._heard, self.count)
        self.grants = GrantBook()
        self._beats: dict[ConnId, tuple[float, Beat]] = {}  # (when, what) the other end last said of itself

    async def stop(self) -> None:
        await super().stop()
        await self.control.stop()

    def has(self, room: Room) -> bool:
        return room in self.node.rooms.live

    def knows(self, room: Room) -> bool:
        return room in self.node.rooms.live or self.node.rooms.tombstone(room, self._loop.time()) is not None

    def grants_of(self, room: Room | None) -> list[dict[str, Any]]:
        held = self.node.ledger.held_by
        return [
            {**describe(grant), "held_pages": held(grant_owner(grant.grant))} for grant in self.grants.of_room(room)
        ]

    def peers(self) -> list[dict[str, Any]]:
        """One entry per instance, by its newest beat."""
        newest: dict[str, tuple[float, Beat]] = {}
        for heard_at, beat in self._beats.values():
            newest[beat.src] = max(newest.get(beat.src, (0.0, beat)), (heard_at, beat), key=lambda one: one[0])
        now = self._loop.time()
        return [
            {
                "instance": instance,
                "heard_s_ago": round(now - heard_at, 3),
                "step_age_s": round(beat.step_age_s, 3),
                "running": beat.running,
                "waiting": beat.waiting,
            }
            for instance, (heard_at, beat) in sorted(newest.items())
        ]

    def _heard(self, event: Event) -> None:
        if isinstance(event, FrameIn):
            self.refusals.heard(event.frame)
        match event:
            case FrameIn(conn, Beat() as beat):
                self._beats[conn] = (self._loop.time(), beat)
            case ConnLost(conn):
                self._beats.pop(conn, None)
        self.post(event)

    def _send(self, conn: ConnId, frame: Frame) -> None:
        if isinstance(frame, Beat):  # its age is that of the moment in which it is sent
            age_s = self.running_engine.step_age(time.monotonic())
            frame = msgspec.structs.replace(frame, step_age_s=round(age_s, 6))
        self.control.send(conn, frame)

    def _close(self, conn: ConnId) -> None:
        self._beats.pop(conn, None)
        self.control.close(conn)
