"""Faults seeded into the core, to see that the checkers see them: each is one that real systems have had.

A variant changes the core in place while one run lasts. `within_seeds` is the promise: some seed below it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

import msgspec

from pdplane.core.decode import DecodeNode
from pdplane.core.effects import AbortEngine, CancelMoves
from pdplane.core.errors import Cause
from pdplane.core.frames import Drained, Failed, Success, Welcome
from pdplane.core.ids import PageId, Seat
from pdplane.core.pages import Ledger, Owner, Page
from pdplane.core.receiver import Receiver
from pdplane.core.rooms import Rooms
from pdplane.core.sender import Sender
from pdplane.core.session import Dialler, DState, Notice, Up
from pdplane.core.table import RA, RECEIVER, SA, SE, SENDER, R, S


class Broken(msgspec.Struct, frozen=True):
    """A seeded fault. `fence`: the transport it shows on; None: either."""

    story: str
    install: Callable[[ExitStack], None]
    within_seeds: int
    pattern: str | None = None
    fence: bool | None = None


def _swap(stack: ExitStack, owner: type | object, name: str, new: object) -> None:
    stack.enter_context(patch.object(owner, name, new))


def _free_at_abort(stack: ExitStack) -> None:
    """I01: an ended room's pages go back at once, whoever may still write them."""
    move_pages = Receiver._move_pages

    def freeing(self: Receiver, action: RA) -> None:
        move_pages(self, RA.FREE if action is RA.DRAIN else action)

    _swap(stack, Receiver, "_move_pages", freeing)


def _success_at_submit(stack: ExitStack) -> None:
    """Completion is taken when the last write is posted; nobody waits until it is visible."""

    def sent(self: Sender) -> None:
        if self.state is S.FLUSHING and self.moved == len(self.pages):
            self.apply(SE.WRITES_DONE)
        elif self.state is S.DRAINING and not self.outstanding and not self.in_engine:
            self.apply(SE.QUIET)

    def taken(self: Receiver) -> None:
        self.landed = set(self.pages)
        derive(self)

    derive = Receiver._derive
    _swap(stack, Sender, "_derive", sent)
    _swap(stack, Receiver, "_derive", taken)


def _resync_to_successor(stack: ExitStack) -> None:
    """I18: whoever answers at the address is taken for the one that was granted."""
    notices = DecodeNode._notices

    def welcomed(self: Dialler, welcome: Welcome, now: float) -> list[Notice]:
        seat = Seat(welcome.src, welcome.rank)
        self.bound, self.lost_at, self.state = seat, None, DState.UP
        self._beat_at, self._backoff_s = now, 0.0
        return [Up(seat, self.conn)]

    def adopting(self: DecodeNode, dialler: Dialler, found: Sequence[Notice]) -> None:
        for notice in found:
            if isinstance(notice, Up):
                for room in self.rooms.live.values():
                    if any(_address(seat) == _address(notice.seat) for seat in room.seats):
                        room.seats = (notice.seat,)
                        room.told = {notice.seat} if room.told else set()
        notices(self, dialler, list(found))

    _swap(stack, Dialler, "_welcomed", welcomed)
    _swap(stack, DecodeNode, "_notices", adopting)
    _open_hello(stack)


def _address(seat: Seat) -> str:
    return seat.instance.partition("#")[0]


def _open_hello(stack: ExitStack) -> None:
    """HELLO names nobody, so that nobody is refused."""
    dialled = Dialler.dialled

    def nameless(self: Dialler, conn: Any, now: float) -> list[Notice]:
        bound, self.bound = self.bound, None
        try:
            return dialled(self, conn, now)
        finally:
            self.bound = bound

    _swap(stack, Dialler, "dialled", nameless)


def _lost_identity_check(stack: ExitStack) -> None:
    """I03, I07: a frame counts for its room, whichever grant and process it names."""

    def by_room_alone(self: DecodeNode, conn: Any, frame: Any) -> None:
        room = self.rooms.get(frame.room) if isinstance(frame, (Success, Failed, Drained)) else None
        if room is not None and room.seats:
            seat = room.seats[0]
            frame = msgspec.structs.replace(frame, grant=room.grant, src=seat.instance, dst=self.instance)
        checked(self, conn, frame)

    checked = DecodeNode._frame
    _swap(stack, DecodeNode, "_frame", by_room_alone)


def _freed_in_flight(stack: ExitStack) -> None:
    """Prefill frees its pages when it is told to stop, while its step runs and its writes read them."""

    def stop(self: Sender) -> None:
        assert self.peer is not None
        assert self.leg is not None
        if self.in_engine:
            self._node.out.append(AbortEngine(self.leg.rid))
        self._node.out.append(CancelMoves(self.grant_no, self.peer))
        self._node.ledger.free(self.pages, self._owner)
        self.pages = ()

    _swap(stack, Sender, "_stop", stop)


def _no_tombstone(stack: ExitStack) -> None:
    """A room that is over is forgotten: its number, and its late leg, are taken for new."""

    def forget(self: Rooms[Any], room: Any, *_: object) -> None:
        self.live.pop(room, None)

    _swap(stack, Rooms, "bury", forget)


def _double_grant(stack: ExitStack) -> None:
    """The free list hands a page out that a grant holds already, with books that add up."""
    take = Ledger.take

    def twice(self: Ledger, count: int, state: Page, owner: Owner) -> tuple[PageId, ...]:
        pages = take(self, count, state, owner)
        granted = [PageId(i) for i, s in enumerate(self._state) if s is Page.GRANTED and self._owner[i] != owner]
        return (granted[0], *pages[1:]) if state is Page.GRANTED and granted else pages

    _swap(stack, Ledger, "take", twice)


def _silent_failure(stack: ExitStack) -> None:
    """I08: prefill's failure stays at prefill."""
    for cell, (state, actions) in list(SENDER.items()):
        kept = tuple(action for action in actions if action is not SA.FAILED)
        stack.enter_context(patch.dict(cast("dict[Any, Any]", SENDER), {cell: (state, kept)}))


def _second_verdict(stack: ExitStack) -> None:
    """I04: a cancel that comes after the end answers again."""
    cells = {(R.DRAINING, event): (R.DRAINING, (RA.ANSWER,)) for (state, event) in RECEIVER if state is R.DRAINING}
    cells = {cell: step for cell, step in cells.items() if cell[1] in ("cancel", "peer_failed")}
    stack.enter_context(patch.dict(cast("dict[Any, Any]", RECEIVER), cells))


def _proof_by_clock(stack: ExitStack) -> None:
    """The drain limit frees the pages, as if time were a proof."""
    cell = {(R.DRAINING, "drain_limit"): (R.GONE, (RA.FREE, RA.TOMBSTONE))}
    stack.enter_context(patch.dict(cast("dict[Any, Any]", RECEIVER), cell))


def _ack_of_the_dead(stack: ExitStack) -> None:
    """A granted peer that is gone counts as quiet, on a fabric that goes on writing without it."""
    apply = Receiver.apply

    def trusting(self: Receiver, event: Any, *, cause: Cause | None = None, seat: Seat | None = None) -> None:
        if event == "peer_gone" and seat is not None:
            self.quiet.add(seat)
        apply(self, event, cause=cause, seat=seat)

    _swap(stack, Receiver, "apply", trusting)


BROKEN: dict[str, Broken] = {
    "free_at_abort": Broken("pages are freed when a request is aborted", _free_at_abort, 20, "cancels", False),
    "success_at_submit": Broken("success before the bytes are visible", _success_at_submit, 20, "cancels"),
    "resync_to_successor": Broken(
        "a restarted prefill is taken for the granted one", _resync_to_successor, 150, "ghost_writes", False
    ),
    "lost_identity_check": Broken(
        "frames of another grant or process count", _lost_identity_check, 20, "stray_frames", False
    ),
    "freed_in_flight": Broken(
        "prefill frees pages that a step or a write still uses", _freed_in_flight, 40, "cancels+tight_pools"
    ),
    "no_tombstone": Broken("a finished room is forgotten", _no_tombstone, 20, "duplicate_rooms"),
    "double_grant": Broken("one page in two grants", _double_grant, 20, "tight_pools"),
    "silent_failure": Broken("prefill's failure does not cross", _silent_failure, 40, "late_legs"),
    "second_verdict": Broken("a request is answered twice", _second_verdict, 20, "cancels"),
    "proof_by_clock": Broken("the drain limit frees pages", _proof_by_clock, 150, "ghost_writes", False),
    "ack_of_the_dead": Broken("a dead peer counts as quiet", _ack_of_the_dead, 40, "ghost_writes", False),
}


@contextmanager
def variant(name: str | None) -> Iterator[None]:
    """The core as variant `name` has it; None: as it is. Raises ValueError for an unknown name."""
    if name is not None and name not in BROKEN:
        raise ValueError(f"there is no broken variant {name!r}; choose one of {', '.join(BROKEN)}")
    with ExitStack() as stack:
        if name is not None:
            BROKEN[name].install(stack)
        yield
