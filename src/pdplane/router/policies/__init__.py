"""How a worker is picked among those that may serve. One file per policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from ..worker import Worker
from .least_load import LeastLoad
from .round_robin import RoundRobin


class Policy(Protocol):
    def pick(self, workers: Sequence[Worker], excluded: Collection[str]) -> Worker | None:
        """One of `workers` outside `excluded`; an avoided one only where nobody else is left. None: nobody is."""
        ...


POLICIES: dict[str, Callable[[], Policy]] = {"least-load": LeastLoad, "round-robin": RoundRobin}

__all__ = ["POLICIES", "LeastLoad", "Policy", "RoundRobin"]
