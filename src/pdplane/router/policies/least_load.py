"""The worker with the fewest samples in flight; equals take turns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..worker import Worker

_AVOIDED = 1 << 40


class LeastLoad:
    __slots__ = ("_turn",)

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, workers: Sequence[Worker], excluded: Collection[str]) -> Worker | None:
        count = len(workers)
        if count == 1 and not excluded:
            return workers[0]
        self._turn += 1
        best, best_load = None, 1 << 62
        for i in range(count):
            worker = workers[(i + self._turn) % count]
            load = worker.load + _AVOIDED if worker.avoid else worker.load
            if load < best_load and worker.url not in excluded:
                best, best_load = worker, load
        return best
