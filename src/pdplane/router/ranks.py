"""The data parallel ranks of one prefill: how many samples each has in flight, and which is next."""

from __future__ import annotations


class RankLoads:
    """One life of a prefill with several ranks; another size is another object, so that what was counted here is
    given back here."""

    __slots__ = ("_turn", "loads")

    def __init__(self, ranks: int) -> None:
        self.loads = [0] * ranks
        self._turn = 0

    def take(self, samples: int, *, together: bool) -> tuple[int, ...]:
        """A rank for each sample, the least loaded at its turn; equals take turns. `together`: all on one."""
        if together:
            rank = self._least()
            self.loads[rank] += samples
            return (rank,) * samples
        ranks = []
        for _ in range(samples):
            rank = self._least()
            self.loads[rank] += 1
            ranks.append(rank)
        return tuple(ranks)

    def let_go(self, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            self.loads[rank] -= 1
            assert self.loads[rank] >= 0, f"rank {rank}: load below zero"

    def _least(self) -> int:
        loads, count = self.loads, len(self.loads)
        self._turn = turn = (self._turn + 1) % count
        least = min(loads)
        return next(rank for i in range(count) if loads[rank := (i + turn) % count] == least)
