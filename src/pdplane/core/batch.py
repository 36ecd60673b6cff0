"""What the engine runs at decode or at an aggregated worker: its pages, their growth, who gives way, its end.

A request asks for a page when no more than half a page is left ahead of it. Where none is free it goes on to its edge;
only there, where its next token has no place, somebody gives way for it (core/retract.py says who). Pages are free only
when the engine has let go of them: Retracted or Released, its own completion. Then the prefix cache gets those of the
prompt, where what was handed off is known to be whole: tokens behind it are nobody else's prompt yet.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from .effects import AbortEngine, ExtendPages, FinishEngine, RestoreEngine, RetractEngine
from .errors import Cause, deadline
from .ids import PageId, Rid
from .layout import pages_for
from .node import Node
from .pages import Page
from .prompt_pages import Prompt, PromptPages
from .reserve import Reserve
from .retract import Phase, Running, by_rank, due, victim

__all__ = ["Batch", "Running"]


class Batch:
    """The requests of one node that its engine knows: running, and laid aside."""

    def __init__(self, node: Node, pages: PromptPages, reserve: Reserve) -> None:
        self.running: dict[Rid, Running] = {}
        self._node = node
        self._pages = pages
        self._reserve = reserve
        self._hungry: dict[Rid, None] = {}
        self._aside: list[Running] = []  # by rank: they wait to come back, or will once their copy is made
        self._placeless = 0  # in host memory, ending ones too
        self._started = 0

    def __len__(self) -> int:
        return len(self.running)

    @property
    def full(self) -> bool:
        return len(self.running) - self._placeless >= self._node.limits.max_running

    @property
    def parked(self) -> int:
        """Requests that are laid aside now, or are being so, and will come back."""
        return len(self._aside)

    @property
    def stamp(self) -> tuple[object, ...]:
        """A newcomer that was refused stays refused while this is the same."""
        return (*self._reserve.stamp, self._aside[0].priority if self._aside else None)

    @property
    def heads(self) -> Iterable[list[PageId]]:
        """What each request shares."""
        return (request.head for request in self.running.values())

    def may_admit(self, prompt: Prompt, most: int, priority: int, *, running: bool = False) -> bool:
        """May a newcomer take its pages now? Not while anybody of its priority or a higher one is laid aside: that one
        was here before, and its pages would never come together."""
        if self._aside and priority <= self._aside[0].priority:
            return False
        return self._reserve.may_admit(prompt, most, running=running)

    # --- a request's life -------------------------------------------------------------------------------------------

    def start(self, request: Running, deadline_at: float) -> None:
        """The engine owns it from here; its own pages are `active` already."""
        self._started += 1
        request.serial = self._started
        self.running[request.rid] = request
        self._reserve.run(request.owner)
        self._node.timers.set(("running", request.rid), deadline_at)
        self._node.note(request.rid, request.room, "running")
        self._watch(request)

    def computed(self, rid: Rid, tokens: int) -> None:
        request = self.running.get(rid)
        if request and request.steps:
            request.tokens = tokens
            self._watch(request)

    def retracted(self, rid: Rid, tokens: int) -> None:
        """Own completion: the copy is made, the pages are free. One that is leaving meanwhile does not come back."""
        request = self.running.get(rid)
        if request is None or request.phase is not Phase.SPILLING:
            self._node.count("late", "retracted")
            return
        request.phase, request.tokens = Phase.PARKED, tokens
        self._placeless += 1
        freed = self._give_back(request, keep=False)
        self._node.note(rid, request.room, "retracted", f"{tokens} tokens, {freed} pages freed")
        self._node.count("retracted")

    def cancel(self, rid: Rid, cause: Cause) -> bool:
        """Ends a running request, or one laid aside; False where it is neither. The first verdict stays."""
        request = self.running.get(rid)
        if request is None:
            return False
        if not request.aborting:
            request.aborting = True
            self._leave(request)
            self._node.answer_failed(rid, request.room, cause)
            self._node.out.append(AbortEngine(rid))
        return True

    def withdraw(self, rid: Rid) -> None:
        """Takes a running request out again, without an answer; its Released follows."""
        request = self.running.get(rid)
        if request is not None and not request.aborting:
            request.aborting = True
            self._leave(request)
            self._node.out.append(AbortEngine(rid))

    def proven(self, rid: Rid) -> None:
        """What was handed off is known to be whole now."""
        if request := self.running.get(rid):
            request.whole = True

    def released(self, rid: Rid, error: str) -> None:
        """Own completion: the engine has let go, the pages are free."""
        request = self.running.pop(rid, None)
        if request is None:
            self._node.count("late", "released")
            return
        self._leave(request)
        self._node.timers.clear(("running", rid))
        self._placeless -= request.phase is Phase.PARKED
        freed = self._give_back(request, keep=not error)
        self._node.note(rid, request.room, "freed", f"{freed} pages")
        if error and not request.aborting:
            self._node.answer_failed(rid, request.room, Cause("engine_error", error, 500, side=self._node.side))
        self._node.note(rid, request.room, "released", error)

    def overdue(self, rid: Rid) -> None:
        if request := self.running.get(rid):
            self.cancel(rid, deadline(self._node.side, self._node.now - request.arrived_at))

    # --- growth -----------------------------------------------------------------------------------------------------

    def grow(self) -> None:
        """Feeds the hungry, the first by rank first; makes room for those at their edge. Before any admission."""
        if self._hungry and (available := self._pages.available):
            for request in sorted((self.running[rid] for rid in self._hungry), key=by_rank)[:available]:
                self._feed(request)
        self._make_room()

    def _feed(self, request: Running) -> None:
        (page,) = self._pages.take_more(1, Page.ACTIVE, request.owner)
        self._reserve.grown(request.owner)
        request.pages.append(page)
        self._node.out.append(ExtendPages(request.rid, (page,)))
        del self._hungry[request.rid]
        self._watch(request)

    def _make_room(self) -> None:
        """Nobody gives way for pages that are due anyhow."""
        starving = [rid for rid in self._hungry if self._at_edge(self.running[rid])]
        while starving and len(starving) > due(self.running.values(), self._pages):
            gives = victim(self.running.values())
            if gives is None:
                self._alone()
                return
            self._retract(gives)
            starving = [rid for rid in starving if rid != gives.rid]

    def _alone(self) -> None:
        """The one that starves is the first by rank, and nobody can give way for it."""
        first, *others = [request for request in self.running.values() if request.steps]
        if others:
            return  # they compute their prompts, for which they have all pages; then they can
        if self.full and self._reserve.complete:
            self._retract(first)
        elif not self._returnable():
            self._finish(first)

    # --- laid aside -------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Those laid aside come back, in order, as pages and places allow. After growth; before finished hand-offs go
        to the batch, which wait for no pages and so are never held up by this."""
        while self._aside and not self.full:
            request = self._aside[0]
            if request.phase is Phase.SPILLING:
                return
            if count := self._pages_back(request):
                self._restore(request, count)
            elif len(self._reserve) or self._returnable():
                return
            else:
                self._finish(request)

    def _pages_back(self, request: Running) -> int:
        """How many pages it comes back with, 0 where it may not now: as for a newcomer, growth is kept free, so that it
        is not laid aside again at once. One that finds the pool to itself takes what there is, if that leads on."""
        size, available = self._node.limits.page_size, self._pages.available
        wanted = min(pages_for(request.tokens, size) + 1, request.most)
        if self._reserve.may_return(wanted, request.most):
            return wanted
        alone = not len(self._reserve) and available < wanted
        return available if alone and available * size > request.tokens else 0

    def _restore(self, request: Running, count: int) -> None:
        self._aside.remove(request)
        self._placeless -= 1
        self._reserve.admit(request.owner, count, request.most, running=True)
        request.pages = list(self._pages.take_more(count, Page.ACTIVE, request.owner))
        request.phase = Phase.RUNNING
        self._node.out.append(RestoreEngine(request.rid, tuple(request.pages)))
        self._node.note(request.rid, request.room, "restored", f"{count} pages")
        self._node.count("restored")
        self._watch(request)

    def _retract(self, request: Running) -> None:
        request.phase = Phase.SPILLING
        self._stop_growing(request)
        insort(self._aside, request, key=by_rank)
        self._node.ledger.shift(request.own, request.owner, Page.ACTIVE, Page.SPILLING)
        self._node.out.append(RetractEngine(request.rid, tuple(request.pages)))

    # --- plumbing ---------------------------------------------------------------------------------------------------

    def _finish(self, request: Running) -> None:
        self._leave(request)
        self._node.out.append(FinishEngine(request.rid))
        self._node.note(request.rid, request.room, "cut", "the pages that it lacks are in quarantine")
        self._node.count("cut")

    def _leave(self, request: Running) -> None:
        request.leaving = True
        self._stop_growing(request)
        if request in self._aside:
            self._aside.remove(request)

    def _stop_growing(self, request: Running) -> None:
        self._hungry.pop(request.rid, None)
        self._reserve.drop(request.owner)

    def _give_back(self, request: Running, *, keep: bool) -> int:
        """`keep`: the prompt's full pages go to the cache, if they are whole. Returns how many pages it held."""
        if keep and request.whole and request.phase is Phase.RUNNING and request.tokens >= request.prompt:
            self._keep(request)
        else:
            self._node.ledger.free(request.own, request.owner)
        self._pages.release(request.head)
        held, request.pages, request.shared = len(request.pages), [], 0
        return held

    def _keep(self, request: Running) -> None:
        prompt = Prompt(len(request.page_keys) * self._node.limits.page_size, request.page_keys)
        self._pages.keep(prompt, request.pages, request.shared, request.owner, Page.ACTIVE)

    def _returnable(self) -> bool:
        """May pages come back that nobody who runs holds?"""
        leaving = any(request.pages for request in self.running.values() if not request.steps)
        return leaving or self._reserve.coming or self._node.ledger.counts[Page.DRAINING] > 0

    def _at_edge(self, request: Running) -> bool:
        return request.tokens >= len(request.pages) * self._node.limits.page_size

    def _watch(self, request: Running) -> None:
        size = self._node.limits.page_size
        ahead = len(request.pages) * size - request.tokens
        if len(request.pages) < request.most and ahead <= size // 2:
            self._hungry[request.rid] = None
