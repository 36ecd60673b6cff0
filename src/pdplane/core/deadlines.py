"""Clocks of many things in one heap. A machine sets and clears by key; the shell asks when to come back.

One deadline travels with a request; queueing and lack of progress have clocks of their own (rule 4). All of them are
keys here. Nothing that concerns the safety of a page rests on one.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

K = TypeVar("K", bound=tuple[object, ...])


class Timers(Generic[K]):
    """At most one due time per key; setting again moves it. Cleared and moved entries are skipped when they surface,
    and swept when they outnumber the live ones (an expired entry never hides behind a renewed one, I24)."""

    def __init__(self) -> None:
        self._due: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0

    def set(self, key: K, when: float) -> None:
        if key in self._due and self._due[key][0] == when:
            return
        self._serial += 1
        self._due[key] = (when, self._serial)
        heapq.heappush(self._heap, (when, self._serial, key))
        if len(self._heap) > 64 + 4 * len(self._due):
            self._heap = [(when, serial, key) for key, (when, serial) in self._due.items()]
            heapq.heapify(self._heap)

    def clear(self, key: K) -> None:
        self._due.pop(key, None)

    def is_set(self, key: K) -> bool:
        return key in self._due

    def when(self, key: K) -> float | None:
        """The due time; None where it is not set."""
        return self._due[key][0] if key in self._due else None

    def running(self) -> list[K]:
        """The keys that are set, for whoever asks what is still waited for."""
        return list(self._due)

    def pop_due(self, now: float) -> K | None:
        """One key whose time has come, cleared; None where there is none."""
        self._skip_stale()
        if self._heap and self._heap[0][0] <= now:
            key = heapq.heappop(self._heap)[2]
            del self._due[key]
            return key
        return None

    def next_due(self) -> float | None:
        self._skip_stale()
        return self._heap[0][0] if self._heap else None

    def _skip_stale(self) -> None:
        while self._heap:
            when, serial, key = self._heap[0]
            if self._due.get(key) == (when, serial):
                return
            heapq.heappop(self._heap)
