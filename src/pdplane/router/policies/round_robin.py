"""Workers take turns, whatever their load."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..worker import Worker


class RoundRobin:
    __slots__ = ("_turn",)

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, workers: Sequence[Worker], excluded: Collection[str]) -> Worker | None:
        avoided = None
        for _ in workers:
            worker = workers[self._turn % len(workers)]
            self._turn += 1
            if worker.url in excluded:
                continue
            if not worker.avoid:
                return worker
            avoided = avoided or worker
        return avoided
