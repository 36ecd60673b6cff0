"""What the registry turned away: the answer, and a short memory of which rank did not fit its group. Sans-IO."""

from __future__ import annotations

from pdplane.core.ids import Rank
from pdplane.wire.registry import PrefillRegistration, RefusedRank

MAX_REFUSED = 64
MAX_REASON_CHARS = 500


class RouteRefused(Exception):
    """`status` and the text of the answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class RefusedRanks:
    """The last refusal of each rank of each instance (a rank tries again and again): the latest `MAX_REFUSED`."""

    def __init__(self) -> None:
        self._last: dict[tuple[Rank, str | None], tuple[str, float]] = {}

    def add(self, rank: PrefillRegistration, reason: str, now: float) -> None:
        key = (rank.rank, rank.pd_instance)
        self._last.pop(key, None)
        self._last[key] = (reason[:MAX_REASON_CHARS], now)
        if len(self._last) > MAX_REFUSED:
            del self._last[next(iter(self._last))]

    def forget(self, rank: PrefillRegistration) -> None:
        """It has come in after all."""
        self._last.pop((rank.rank, rank.pd_instance), None)

    def clear(self) -> None:
        self._last.clear()

    def latest_first(self, now: float) -> list[RefusedRank]:
        entries = reversed(self._last.items())
        return [RefusedRank(rank, instance, reason, round(now - at, 3)) for (rank, instance), (reason, at) in entries]
