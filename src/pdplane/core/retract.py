"""Who gives way when the pool is full, and who comes back first.

Requests have a *rank*: priority, then arrival. Pages for growth go to the first by rank; the last by rank gives way:
its KV is copied to host memory, its pages are freed when the copy is made, and it waits *aside*. Those aside come back
in order of rank, none past another, each with pages for what it has computed and one page more.

Why no wait is without end: the first by rank of those that run never gives way while others run, and what is computed
is never lost, so it grows to its end, and then the next one does. Nothing new of their priority is let in while anybody
is aside, so the batch empties until the first one aside fits. One that runs alone has three outlooks. A finished
hand-off waits for its very place, and nobody else could leave one: it gives way. Hand-offs are under way, or pages
drain: it waits for them, since each of them comes to the batch, to the free list or into quarantine within a bounded
time. Neither: what it lacks is in quarantine, and it ends with `length`, as does the first one aside where nobody else
holds anything.

Cached pages that nobody reads are as good as free, and go before anybody gives way. What somebody shares with others
does not come back by his giving way alone: it is copied with the rest, and he comes back with own pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

import msgspec

from .ids import PageId, Rid, Room
from .pages import Owner
from .prompt_pages import PromptPages


class Phase(Enum):
    """Where the KV of a request of the batch is."""

    RUNNING = auto()  # in its pages; it takes part in the engine's steps
    SPILLING = auto()  # on its way to host memory: its pages wait for the copy
    PARKED = auto()  # in host memory; it holds no page and no place


class Running(msgspec.Struct, eq=False):
    """A request that the engine knows. `prompt`: tokens to be computed before it can be laid aside, since an engine
    does not park half a prompt; 0 where the prompt came computed.

    The first `shared` of its pages are the prefix cache's, the others its owner's. page_keys: of the prompt's full
    pages, which the cache gets when it ends, where `whole` says that all that was handed to it is known to be good.
    """

    rid: Rid
    room: Room | None
    owner: Owner
    pages: list[PageId]
    most: int  # pages
    tokens: int  # with KV in the pages
    arrived_at: float
    priority: int = 0
    prompt: int = 0
    shared: int = 0
    page_keys: tuple[bytes, ...] = ()
    whole: bool = False
    serial: int = 0  # given by the batch: of two that arrived together, the one that started first
    phase: Phase = Phase.RUNNING
    leaving: bool = False  # its Released is due
    aborting: bool = False  # answered already

    @property
    def rank(self) -> tuple[int, float, int]:
        """Smaller goes first."""
        return (-self.priority, self.arrived_at, self.serial)

    @property
    def own(self) -> list[PageId]:
        """Its pages in the ledger."""
        return self.pages[self.shared :]

    @property
    def head(self) -> list[PageId]:
        """What it shares."""
        return self.pages[: self.shared]

    @property
    def steps(self) -> bool:
        """It goes on in the engine's steps, or would if it had a page."""
        return self.phase is Phase.RUNNING and not self.leaving


def by_rank(request: Running) -> tuple[int, float, int]:
    return request.rank


def due(requests: Iterable[Running], pages: PromptPages) -> int:
    """Pages that come back by own completion alone: of those that leave or are being copied."""
    ending = [request for request in requests if not request.steps]
    return sum(len(request.own) for request in ending) + pages.freed_by(request.head for request in ending)


def victim(requests: Iterable[Running]) -> Running | None:
    """Who gives way: the last by rank of those that can be laid aside, the one that asks among them; never the first of
    all that run. None: nobody, or nobody yet, as the others still compute their prompts."""
    running = sorted((request for request in requests if request.steps), key=by_rank)
    able = [request for request in running[1:] if request.tokens >= request.prompt]
    return able[-1] if able else None
