"""Seeded faults of pools and places: prefix cache, held KV, retract, routes with several ranks, admission."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from pdplane.core import batch as batching
from pdplane.core import prompt_pages
from pdplane.core.batch import Batch, Running
from pdplane.core.effects import ArmGrant, Effect, RestoreEngine, SendFrame
from pdplane.core.frames import Grant
from pdplane.core.ids import Link, PageId, Rank, Rid, Room
from pdplane.core.membership import Membership, PrefillGroup
from pdplane.core.pages import Page
from pdplane.core.prefix import PrefixCache
from pdplane.core.reserve import Reserve
from pdplane.core.rooms.door import Door
from pdplane.core.rooms.holds import Holds
from pdplane.core.rooms.receiver import Receiver
from pdplane.core.rooms.reception import Reception
from pdplane.core.rooms.sender import Sender
from pdplane.core.rooms.table import RA, SA, SE, S

from .broken_handoff import Step, set_cells, swap


def cached_abort(stack: ExitStack) -> None:
    """The pages of an aborted prefill are shared with whoever has the same prompt."""
    give_back = Sender._give_back

    def keeping(self: Sender, action: SA) -> None:
        if action is SA.KEEP or self.quarantined:
            give_back(self, action)
            return
        self._desk.keep(self, Page.DRAINING)
        self._desk.release(self)
        self.pages, self.shared = (), 0

    swap(stack, Sender, "_give_back", keeping)


def evicts_held(stack: ExitStack) -> None:
    """The prefix cache forgets who reads a page, and its books agree with it."""
    for name in ("hold", "release"):
        swap(stack, PrefixCache, name, lambda self, pages: None)
    swap(stack, prompt_pages, "_readers", lambda runs: Counter())


def shared_granted(stack: ExitStack) -> None:
    """A grant names the pages that are there already too: whoever reads them is written over."""
    act = Receiver._act

    def boundless(self: Receiver, action: RA, link: Link | None) -> None:
        if action not in (RA.GRANT, RA.GRANT_ONE):
            act(self, action, link)
            return
        out, first = self._node.out, len(self._node.out)
        act(self, action, link)
        out[first:] = [_with_head(effect, self.shared) for effect in out[first:]]

    swap(stack, Receiver, "_act", boundless)


def _with_head(effect: Effect, head: tuple[PageId, ...]) -> Effect:
    match effect:
        case ArmGrant():
            return msgspec.structs.replace(effect, pages=head + effect.pages, shared=())
        case SendFrame(frame=Grant() as grant):
            whole = msgspec.structs.replace(grant, pages=head + grant.pages, decode_prefix_len=msgspec.UNSET)
            return msgspec.structs.replace(effect, frame=whole)
        case _:
            return effect


def unproven_kept(stack: ExitStack) -> None:
    """The pages of a hand-off that failed are shared with whoever has the same prompt."""
    give_back = Receiver._give_back

    def keeping(self: Receiver) -> None:
        if self.cause is None or len(self.pages) < len(self.prompt.page_keys):
            give_back(self)
            return
        state = self._node.ledger.state_of(self.pages[0])
        self._desk.pages.keep(self.prompt, self.pages, 0, self.owner, state)
        self._disarm()
        self.pages = ()

    swap(stack, Receiver, "_give_back", keeping)


def share_forgotten(stack: ExitStack) -> None:
    """A room that fails does not let go of what it shares."""

    def forgetting(self: Receiver) -> None:
        self.shared = ()

    swap(stack, Receiver, "_let_go", forgetting)


def shared_freed(stack: ExitStack) -> None:
    """A request that ends lets go twice of what it shares, and the books agree with it: others lose their head."""
    give_back, release = Batch._give_back, PrefixCache.release

    def twice(self: Batch, request: Running, *, keep: bool) -> int:
        head = request.head
        held = give_back(self, request, keep=keep)
        self._pages.release([page for page in head if self._pages._cache._refs(page)])
        return held

    def lenient(self: PrefixCache, pages: Sequence[PageId]) -> None:
        release(self, [page for page in pages if self._refs(page)])

    swap(stack, Batch, "_give_back", twice)
    swap(stack, PrefixCache, "release", lenient)
    swap(stack, PrefixCache, "audit_all", lambda self, holders: [])


def cached_boasted(stack: ExitStack) -> None:
    """cached_tokens says more than was shared."""
    start = Sender.start

    def boasting(self: Sender, pages: tuple[PageId, ...], shared: int) -> None:
        start(self, pages, shared)
        self.cached_tokens += self._node.limits.page_size

    swap(stack, Sender, "start", boasting)


def ready_too_early(stack: ExitStack) -> None:
    """READY is said when computing begins, and all pages are moved as soon as the grant is in."""
    early: dict[tuple[S, SE], Step] = {
        (S.WAITING, SE.START): (S.AHEAD, (SA.READY,)),
        (S.AHEAD, SE.GRANT): (S.STREAMING, (SA.MOVE_REST,)),
    }
    set_cells(stack, early)


def endless_hold(stack: ExitStack) -> None:
    """Held KV has no term."""
    swap(stack, Holds, "hold", lambda self, room, now: now + 1e9)


def freed_under_read(stack: ExitStack) -> None:
    """KV that was held goes back to the pool at an abort, while moves read it."""
    end = (S.GONE, (SA.FREE, SA.DRAINED, SA.ANSWER, SA.TOMBSTONE))
    set_cells(stack, {(S.FLUSHING, event): end for event in (SE.ABORT, SE.CANCEL)})


def freed_at_retract(stack: ExitStack) -> None:
    """Pages are free when the engine is asked to lay a request aside, not when it has."""
    retract = Batch._retract

    def freeing(self: Batch, request: Running) -> None:
        retract(self, request)
        self._give_back(request, keep=False)

    swap(stack, Batch, "_retract", freeing)


def restored_elsewhere(stack: ExitStack) -> None:
    """A request comes back into the pages that it had, whoever has them now."""
    retract, restore = Batch._retract, Batch._restore
    had: dict[Rid, tuple[PageId, ...]] = {}

    def leaving(self: Batch, request: Running) -> None:
        had[request.rid] = tuple(request.pages)
        retract(self, request)

    def returning(self: Batch, request: Running, count: int) -> None:
        restore(self, request, count)
        out = self._node.out
        place = max(place for place, effect in enumerate(out) if isinstance(effect, RestoreEngine))
        out[place] = RestoreEngine(request.rid, had[request.rid])

    swap(stack, Batch, "_retract", leaving)
    swap(stack, Batch, "_restore", returning)


def short_restore(stack: ExitStack) -> None:
    """A request comes back to fewer pages than its KV fills."""
    back = Batch._pages_back

    def short(self: Batch, request: Running) -> int:
        count = back(self, request)
        return count and max(1, count - 2)

    swap(stack, Batch, "_pages_back", short)


def harvest_starved(stack: ExitStack) -> None:
    """I14: what is handed off does not go on while anybody is laid aside."""
    harvest = Door.harvest

    def starving(self: Door) -> None:
        if not self._batch.parked:
            harvest(self)

    swap(stack, Door, "harvest", starving)


def never_retracts(stack: ExitStack) -> None:
    """I13: prompts are let in without a thought to growth, and nobody ever gives way."""
    swap(stack, Reserve, "may_admit", lambda self, prompt, most, running=False: self._pages.fits(prompt))
    swap(stack, batching, "victim", lambda requests: None)
    swap(stack, Batch, "_alone", lambda self: None)


def lacking_rank(stack: ExitStack) -> None:
    """A route that lacks a rank is taken for one without that rank, and neither end counts what the links bring."""
    pairs = Membership._pairs

    def known(self: Membership[Room], group: PrefillGroup[Room], dp: int) -> tuple[tuple[Rank, Rank], ...]:
        return tuple(pair for pair in pairs(self, group, dp) if pair[0] in group.endpoints)

    swap(stack, Membership, "_pairs", known)
    swap(stack, Membership, "_assert_whole", lambda self, lanes: None)
    swap(stack, Reception, "ill_formed", lambda self, link, frame: None)


def rank_ignored(stack: ExitStack) -> None:
    """I21: the prefill rank that a leg names is not looked at."""
    seek = Membership.seek

    def blind(self: Membership[Room], address: str, room: Room, named: int | None, now: float) -> Any:
        return seek(self, address, room, None, now)

    swap(stack, Membership, "seek", blind)
