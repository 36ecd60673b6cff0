"""What the shells of a pair's two sides share in either dialect: control sessions, and what peers say of themselves."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import msgspec

from pdplane.core.events import ConnLost, Event, FrameIn
from pdplane.core.frames import Beat, Frame
from pdplane.core.ids import ConnId
from pdplane.core.node import Node
from pdplane.core.session import Identity

from .config import WorkerConfig
from .control import ControlNet
from .datapath import Offers
from .shell import Parts, Shell

N = TypeVar("N", bound=Node, covariant=True)


def identity(config: WorkerConfig, parts: Parts, offers: Offers) -> Identity:
    """Who this group is on control sessions. `offers`: by which transports its pages move."""
    return Identity(
        instance=parts.instance,
        stamp=parts.stamp,
        secret=config.secret,
        shape=config.shape,
        dp=parts.dp,
        data=offers,
    )


class PairedShell(Shell[N]):
    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.control = ControlNet(self._heard, self.count)
        self._beats: dict[ConnId, tuple[float, Beat]] = {}  # (when, what) the other end last said of itself

    async def stop(self) -> None:
        await super().stop()
        await self.control.stop()

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
