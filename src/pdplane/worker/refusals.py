"""Whose control sessions do not come about, and why: for whoever asks why two workers do not pair."""

from __future__ import annotations

from typing import Any, NamedTuple

from pdplane.core.errors import Cause
from pdplane.core.frames import Frame, Hello, Reject, Welcome
from pdplane.core.ids import Instance

MOST = 16


class _Refusal(NamedTuple):
    cause: Cause
    at: float


class Refusals:
    """The last few, one per peer ("" being whoever did not say who it is). Times are the loop's."""

    def __init__(self) -> None:
        self._of: dict[Instance, _Refusal] = {}

    def note(self, peer: Instance, cause: Cause, now: float) -> bool:
        """Whether it is news: a peer tries again and again."""
        before = self._of.pop(peer, None)
        self._of[peer] = _Refusal(cause, now)
        if len(self._of) > MOST:
            del self._of[next(iter(self._of))]
        return before is None or before.cause != cause

    def heard(self, frame: Frame) -> None:
        """What is said after the greeting is said on a session that is up: its peer is refused no more."""
        if self._of and not isinstance(frame, Hello | Welcome | Reject):
            self._of.pop(frame.src, None)

    def told(self, now: float) -> list[dict[str, Any]]:
        return [
            {"peer": peer, "code": cause.code, "message": cause.message, "ago_s": round(now - at, 3)}
            for peer, (cause, at) in self._of.items()
        ]
