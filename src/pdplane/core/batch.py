"""What the engine runs at decode or at an aggregated worker: its pages, their growth, its end.

A request grows by a page when less than half a page is left ahead of it, where the reserve allows; one that may not
grow is left out of the engine's steps until it may. Its pages are free only when the engine has released it.
"""

from __future__ import annotations

import msgspec

from .effects import AbortEngine, ExtendPages
from .errors import Cause, deadline
from .ids import PageId, Rid, Room
from .node import Node
from .pages import Owner, Page
from .reserve import Reserve


class Running(msgspec.Struct):
    rid: Rid
    room: Room | None
    owner: Owner
    pages: list[PageId]
    most: int  # pages
    tokens: int  # with KV in the pages
    arrived_at: float
    aborting: bool = False


class Batch:
    """The running requests of one node."""

    def __init__(self, node: Node, reserve: Reserve) -> None:
        self.running: dict[Rid, Running] = {}
        self._node = node
        self._reserve = reserve
        self._hungry: dict[Rid, None] = {}
        self._grew_hungry = 0
        self._fed_at: tuple[object, ...] = ()

    def __len__(self) -> int:
        return len(self.running)

    @property
    def full(self) -> bool:
        return len(self.running) >= self._node.limits.max_running

    def start(self, request: Running, deadline_at: float) -> None:
        """The engine owns it from here; its pages are `active` already."""
        self.running[request.rid] = request
        self._reserve.run(request.owner)
        self._node.timers.set(("running", request.rid), deadline_at)
        self._node.note(request.rid, request.room, "running")
        self._watch(request)

    def computed(self, rid: Rid, tokens: int) -> None:
        request = self.running.get(rid)
        if request and not request.aborting:
            request.tokens = tokens
            self._watch(request)

    def cancel(self, rid: Rid, cause: Cause) -> bool:
        """Ends a running request; False where it is not one. The first verdict stays."""
        request = self.running.get(rid)
        if request is None:
            return False
        if not request.aborting:
            request.aborting = True
            self._hungry.pop(rid, None)
            self._node.answer_failed(rid, request.room, cause)
            self._node.out.append(AbortEngine(rid))
        return True

    def released(self, rid: Rid, error: str) -> None:
        """Own completion: the engine has let go, the pages are free."""
        request = self.running.pop(rid, None)
        if request is None:
            self._node.count("late", "released")
            return
        self._hungry.pop(rid, None)
        self._node.timers.clear(("running", rid))
        self._reserve.drop(request.owner)
        self._node.ledger.free(request.pages, request.owner)
        self._node.note(rid, request.room, "freed", f"{len(request.pages)} pages")
        if error and not request.aborting:
            self._node.answer_failed(rid, request.room, Cause("engine_error", error, 500, side=self._node.side))
        self._node.note(rid, request.room, "released", error)

    def overdue(self, rid: Rid) -> None:
        if request := self.running.get(rid):
            self.cancel(rid, deadline(self._node.side, self._node.now - request.arrived_at))

    def grow(self) -> None:
        """Feeds the hungry, first come first served, as far as the reserve allows. Before any admission."""
        if self._fed_at == (self._reserve.stamp, self._grew_hungry):
            return
        for rid in list(self._hungry):
            request = self.running[rid]
            if not self._reserve.may_grow(request.owner):
                continue
            (page,) = self._node.ledger.take(1, Page.ACTIVE, request.owner)
            self._reserve.grown(request.owner)
            request.pages.append(page)
            self._node.out.append(ExtendPages(rid, (page,)))
            del self._hungry[rid]
            self._watch(request)
        self._fed_at = (self._reserve.stamp, self._grew_hungry)

    def _watch(self, request: Running) -> None:
        size = self._node.limits.page_size
        ahead = len(request.pages) * size - request.tokens
        if len(request.pages) < request.most and ahead <= size // 2 and request.rid not in self._hungry:
            self._hungry[request.rid] = None
            self._grew_hungry += 1
