"""Seeded faults of the hand-off: identity, proofs, verdicts, and what crosses between the sides."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast
from unittest.mock import patch

import msgspec

from pdplane.core import layout
from pdplane.core.dialler import Dialler, DState
from pdplane.core.effects import AbortEngine, CancelMoves
from pdplane.core.errors import Cause
from pdplane.core.frames import Drained, Failed, Success, Welcome
from pdplane.core.ids import Instance, Link, PageId, Room, Seat
from pdplane.core.pages import Ledger, Owner, Page
from pdplane.core.peers import Peers
from pdplane.core.rooms.book import Rooms
from pdplane.core.rooms.decode import DecodeNode
from pdplane.core.rooms.receiver import Receiver
from pdplane.core.rooms.sender import Sender
from pdplane.core.rooms.table import RA, RECEIVER, SA, SE, SENDER, R, S
from pdplane.core.session import Notice, Up

Step = tuple[S, tuple[SA, ...]]


def swap(stack: ExitStack, owner: object, name: str, new: object) -> None:
    stack.enter_context(patch.object(owner, name, new))


def set_cells(stack: ExitStack, steps: dict[tuple[S, SE], Step]) -> None:
    """Other cells in prefill's half of the table."""
    stack.enter_context(patch.dict(cast("dict[Any, Any]", SENDER), steps))


def free_at_abort(stack: ExitStack) -> None:
    """I01: an ended room's pages go back at once, whoever may still write them."""
    move_pages = Receiver._move_pages

    def freeing(self: Receiver, action: RA) -> None:
        move_pages(self, RA.FREE if action is RA.DRAIN else action)

    swap(stack, Receiver, "_move_pages", freeing)


def success_at_submit(stack: ExitStack) -> None:
    """Completion is taken when the last write is posted; nobody waits until it is visible."""

    def sent(self: Sender) -> None:
        if self.state is S.FLUSHING and all(self.moved.get(link) == len(self.pages) for link in self.grants):
            self.apply(SE.WRITES_DONE)
        elif self.state is S.DRAINING and not self.outstanding and not self.in_engine:
            self.apply(SE.QUIET)

    def taken(self: Receiver) -> None:
        self.landed = {link: set(self.pages) for link in self.landed}
        derive(self)

    derive = Receiver._derive
    swap(stack, Sender, "_derive", sent)
    swap(stack, Receiver, "_derive", taken)


def resync_to_successor(stack: ExitStack) -> None:
    """I18: whoever answers at the address is taken for the one that was granted."""
    notices = Peers._notices

    def welcomed(self: Dialler, welcome: Welcome, now: float) -> list[Notice]:
        agreed = self._agree(welcome, Seat(welcome.src, welcome.rank))
        assert isinstance(agreed, Up)
        self.bound, self.lost_at, self.state, self.up_as = agreed.link.there, None, DState.UP, agreed
        self._beat_at, self._backoff_s = now, 0.0
        return [agreed]

    def adopting(self: Peers[Room], dialler: Dialler, found: Sequence[Notice]) -> None:
        for notice in found:
            if isinstance(notice, Up):
                assert isinstance(self._node, DecodeNode)
                for room in self._node.rooms.live.values():
                    _adopt(room, notice.link)
        notices(self, dialler, list(found))

    swap(stack, Dialler, "_welcomed", welcomed)
    swap(stack, Peers, "_notices", adopting)
    open_hello(stack)


def _adopt(room: Receiver, new: Link) -> None:
    for lane in room.lanes:
        old = lane.link
        if (_address(old), old.here, old.there.rank) == (_address(new), new.here, new.there.rank):
            moved = msgspec.structs.replace(lane, link=new)
            room.lanes = tuple(moved if other == lane else other for other in room.lanes)
            room.landed[new] = room.landed.pop(old)
            for links in (room.told, room.granted, room.quiet, room.succeeded):
                if old in links:
                    links.remove(old)
                    links.add(new)


def _address(link: Link) -> str:
    return link.there.instance.partition("#")[0]


def open_hello(stack: ExitStack) -> None:
    """HELLO names nobody, so that nobody is refused."""
    dialled = Dialler.dialled

    def nameless(self: Dialler, conn: Any, now: float) -> list[Notice]:
        bound, self.bound = self.bound, None
        try:
            return dialled(self, conn, now)
        finally:
            self.bound = bound

    swap(stack, Dialler, "dialled", nameless)


def lost_identity_check(stack: ExitStack) -> None:
    """I03, I07: a frame counts for its room, whichever grant and process it names."""

    def by_room_alone(self: DecodeNode, conn: Any, frame: Any) -> None:
        room = self.rooms.get(frame.room) if isinstance(frame, (Success, Failed, Drained)) else None
        if room is not None and room.lanes:
            there = room.links[0].there
            frame = msgspec.structs.replace(frame, grant=room.grant, src=there.instance, dst=self.instance)
        checked(self, conn, frame)

    checked = DecodeNode._frame
    swap(stack, DecodeNode, "_frame", by_room_alone)


def freed_in_flight(stack: ExitStack) -> None:
    """Prefill frees its pages when it is told to stop, while its step runs and its writes read them."""

    def stop(self: Sender) -> None:
        assert self.leg is not None
        if self.in_engine:
            self._node.out.append(AbortEngine(self.leg.rid))
        self._node.out += [CancelMoves(self.grant_no, link) for link in self.grants]
        self._give_back(SA.FREE)

    swap(stack, Sender, "_stop", stop)


def no_tombstone(stack: ExitStack) -> None:
    """A room that is over is forgotten: its number, and its late leg, are taken for new."""

    def forget(self: Rooms[Any], room: Any, *_: object) -> None:
        self.live.pop(room, None)

    swap(stack, Rooms, "bury", forget)


def double_grant(stack: ExitStack) -> None:
    """The free list hands a page out that a grant holds already, with books that add up."""
    take = Ledger.take

    def twice(self: Ledger, count: int, state: Page, owner: Owner) -> tuple[PageId, ...]:
        pages = take(self, count, state, owner)
        others = [PageId(i) for i in range(self.capacity) if self.state_of(PageId(i)) is Page.GRANTED]
        granted = [page for page in others if self.owner_of(page) != owner]
        return (granted[0], *pages[1:]) if state is Page.GRANTED and granted else pages

    swap(stack, Ledger, "take", twice)


def silent_failure(stack: ExitStack) -> None:
    """I08: prefill's failure stays at prefill."""
    for cell, (state, actions) in list(SENDER.items()):
        kept = tuple(action for action in actions if action is not SA.FAILED)
        stack.enter_context(patch.dict(cast("dict[Any, Any]", SENDER), {cell: (state, kept)}))


def second_verdict(stack: ExitStack) -> None:
    """I04: a cancel that comes after the end answers again."""
    cells = {(R.DRAINING, event): (R.DRAINING, (RA.ANSWER,)) for (state, event) in RECEIVER if state is R.DRAINING}
    cells = {cell: step for cell, step in cells.items() if cell[1] in ("cancel", "peer_failed")}
    stack.enter_context(patch.dict(cast("dict[Any, Any]", RECEIVER), cells))


def proof_by_clock(stack: ExitStack) -> None:
    """The drain limit frees the pages, as if time were a proof."""
    cell = {(R.DRAINING, "drain_limit"): (R.GONE, (RA.FREE, RA.TOMBSTONE))}
    stack.enter_context(patch.dict(cast("dict[Any, Any]", RECEIVER), cell))


def ack_of_the_dead(stack: ExitStack) -> None:
    """A granted peer that is gone counts as quiet, on a fabric that goes on writing without it."""
    apply = Receiver.apply

    def trusting(self: Receiver, event: Any, *, cause: Cause | None = None, link: Link | None = None) -> None:
        if event == "peer_gone" and link is not None:
            self.quiet.add(link)
        apply(self, event, cause=cause, link=link)

    swap(stack, Receiver, "apply", trusting)


def any_model(stack: ExitStack) -> None:
    """Nobody compares what the two sides serve."""
    swap(stack, layout, "mismatch", lambda prefill, decode: None)


def teardown_trusted(stack: ExitStack) -> None:
    """Cutting a dead peer off is taken for a proof on a fabric where it proves nothing."""
    gone = DecodeNode.instance_gone

    def trusting(self: DecodeNode, instance: Instance) -> None:
        gone(self, instance)
        for receiver in list(self.rooms.live.values()):
            receiver.torn_down(instance)

    swap(stack, DecodeNode, "instance_gone", trusting)


def drained_trusted(stack: ExitStack) -> None:
    """DRAINED counts where only the fence proves: what prefill has given up may still be on its way in."""
    drained = Receiver.drained

    def trusting(self: Receiver, link: Link) -> None:
        if self.state in (R.DRAINING, R.QUARANTINE):
            self.quiet.add(link)
        drained(self, link)

    swap(stack, Receiver, "drained", trusting)


def half_a_prompt(stack: ExitStack) -> None:
    """What one link has moved is enough: prefill says SUCCESS then, and decode takes it."""

    def sent(self: Sender) -> None:
        if self.state is S.FLUSHING and not self.in_engine and len(self.outstanding) < len(self.grants):
            self.apply(SE.WRITES_DONE)
        else:
            derive(self)

    def complete(self: Receiver) -> bool:
        return bool(self.succeeded) and any(len(pages) == len(self.pages) for pages in self.landed.values())

    derive = Sender._derive
    swap(stack, Sender, "_derive", sent)
    swap(stack, Receiver, "_complete", property(complete))


def part_of_a_grant(stack: ExitStack) -> None:
    """The GRANT of one link is taken for all of it."""
    swap(stack, Sender, "granted", property(lambda self: self.grant is not None))


def sent_becomes_failed(stack: ExitStack) -> None:
    """A leg that is closed after SUCCESS fails the hand-off."""
    apply = Sender.apply

    def failing(self: Sender, event: SE, *, cause: Cause | None = None, link: Link | None = None) -> None:
        if (self.state, event) == (S.SENT, SE.CANCEL) and self.rid and cause:
            self._node.answer_failed(self.rid, self.room, cause)
        apply(self, event, cause=cause, link=link)

    swap(stack, Sender, "apply", failing)
