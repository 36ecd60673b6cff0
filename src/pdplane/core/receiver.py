"""Decode's side of one room: applies RECEIVER of core/table.py, keeps the rank sets and the pages.

Ranks are sets, never counters: who was told, who is quiet, who has succeeded. A rank is quiet once it can write no
more under this room's grant: by SUCCESS, by the closed local fence, by DRAINED where there is no fence, or because
it was never handed a GRANT and its instance is gone. `quiet >= told` is the proof that frees pages (O4).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypedDict

from .admission import demand
from .effects import AnswerRow, ArmGrant, DisarmGrant, RevokeGrant
from .errors import Cause
from .events import LegArrived
from .frames import Abort, Announce, Frame, Grant, Received, Row
from .ids import NO_GRANT, GrantNo, Instance, PageId, Rank, Rid, Room, Seat
from .node import Node
from .pages import Owner, Page
from .table import RA, RE, RECEIVER, KVPoll, R, receiver_poll


class Desk(Protocol):
    """What a receiver needs of its node beside the outbox and the ledger."""

    instance: Instance
    fence: bool

    @property
    def node(self) -> Node: ...

    def next_grant(self) -> GrantNo: ...

    def send(self, seat: Seat, frame: Frame) -> bool:
        """False where no session with exactly this instance is up: the resync will say it again."""
        ...

    def settled(self, receiver: Receiver) -> None:
        """The machine has moved: clocks and queues follow."""
        ...


class _Identity(TypedDict):
    """Rule 2, as keyword arguments of a room frame."""

    room: Room
    grant: GrantNo
    src: Instance
    dst: Instance
    rank: Rank


class Receiver:
    """One room at decode."""

    def __init__(self, leg: LegArrived, arrived_at: float, desk: Desk) -> None:
        self.leg = leg
        self.room: Room = leg.room
        self.need = demand(leg.prompt.tokens, leg.max_new, desk.node.limits)
        self.rid: Rid = leg.rid
        self.arrived_at = arrived_at
        self.state = R.QUEUED
        self.seats: tuple[Seat, ...] = ()
        self.told: set[Seat] = set()  # handed any frame of this room
        self.granted: set[Seat] = set()  # handed its GRANT: these owe a proof
        self.quiet: set[Seat] = set()
        self.drained_by: set[Seat] = set()
        self.succeeded: set[Seat] = set()
        self.landed: set[PageId] = set()
        self.pages: tuple[PageId, ...] = ()
        self.grant = NO_GRANT
        self.row: Row | None = None
        self.cause: Cause | None = None
        self.owes_abort = False
        self._desk = desk
        self._node = desk.node

    @property
    def owner(self) -> Owner:
        return Owner(f"grant {self.grant}")

    @property
    def poll(self) -> KVPoll:
        return receiver_poll(self.state, landed=bool(self.landed), failed=self.cause is not None)

    @property
    def holders(self) -> list[Seat]:
        """Seats whose proof is missing."""
        return [seat for seat in self.seats if seat in self.told and seat not in self.quiet]

    @property
    def unconfirmed(self) -> set[Seat]:
        """Seats that know of this room and have not said themselves that it is over."""
        return self.told - self.drained_by - self.succeeded

    def apply(self, event: RE, *, cause: Cause | None = None, seat: Seat | None = None) -> None:
        """One cell of the table. `cause`: why, for events that end the room. `seat`: whose event it is."""
        step = RECEIVER.get((self.state, event))
        if step is None:
            self._node.count("late", f"{self.state}/{event}")
            return
        was, (self.state, actions) = self.state, step
        if cause is not None:
            if self.cause is None:
                self.cause = cause
            else:
                self._node.count("late_verdict", cause.code)
        if event is RE.PEER_GONE and seat is not None and seat not in self.granted:
            self.quiet.add(seat)  # never granted: it owes no proof
        if was is not self.state:
            self._node.note(self.rid, self.room, self.state, str(cause) if cause else "")
        for action in actions:
            self._act(action, seat)
        self._desk.settled(self)
        self._derive()

    # --- what peers and transport report ----------------------------------------------------------------------------

    def bind(self, seats: Iterable[Seat]) -> None:
        """The route is known and the sessions are up."""
        self.seats = tuple(seats)

    def take(self, pages: tuple[PageId, ...]) -> None:
        """All pages of the prompt, already `granted` in the ledger under `owner`. Precedes PAGES_OK."""
        self.pages = pages

    def success(self, seat: Seat, row: Row) -> None:
        if self.state not in (R.GRANTED, R.DRAINING, R.QUARANTINE):
            self._node.count("late", f"{self.state}/success")
            return
        self.quiet.add(seat)
        self.succeeded.add(seat)
        if self.state is R.GRANTED:
            self._take_row(seat, row)
        self._derive()

    def _take_row(self, seat: Seat, row: Row) -> None:
        prompt = self.leg.prompt
        if (row.prompt_digest, row.prompt_tokens) != (prompt.digest, prompt.tokens):
            theirs = f"{row.prompt_digest.hex()} of {row.prompt_tokens} tokens"
            ours = f"{prompt.digest.hex()} of {prompt.tokens} tokens"
            text = f"prefill computed another prompt: {theirs}, decode has {ours}"
            self.apply(RE.ROW_BAD, cause=Cause("prompt_mismatch", text, 500, side="decode"), seat=seat)
        else:
            self.row = self.row or row

    def drained(self, seat: Seat) -> None:
        """Prefill says FAILED before DRAINED, so a room that is not over has nothing to drain. Where this side has a
        fence, the fence alone proves: bytes that prefill wrote and gave up may still lie in a socket's buffer."""
        if self.state not in (R.DRAINING, R.QUARANTINE):
            self._node.count("late", f"{self.state}/drained")
            return
        self.drained_by.add(seat)
        if not (self._desk.fence and self.pages):
            self.quiet.add(seat)
        self._derive()

    def fenced(self) -> None:
        """The local fence is closed: no rank can land anything any more."""
        self.quiet.update(self.seats)
        self._derive()

    def page_landed(self, pages: Iterable[PageId]) -> None:
        self.landed.update(pages)
        self._derive()

    def session_up(self, seat: Seat) -> None:
        if seat in self.seats:
            self.apply(RE.SESSION_UP, seat=seat)

    # --- table plumbing ---------------------------------------------------------------------------------------------

    def _derive(self) -> None:
        """Derived events: they follow from the sets alone."""
        if self.state is R.GRANTED and self.succeeded >= set(self.seats) and len(self.landed) == len(self.pages):
            self.apply(RE.SUCCESS_ALL)
        elif self.state in (R.DRAINING, R.QUARANTINE) and not self.owes_abort and self.quiet >= self.told:
            self.apply(RE.QUIET_ALL)

    def _act(self, action: RA, seat: Seat | None) -> None:
        match action:
            case RA.ANNOUNCE:
                for target in self.seats:
                    self._announce(target)
            case RA.ANNOUNCE_ONE if seat:
                self._announce(seat)
            case RA.GRANT:
                peers = tuple(dict.fromkeys(target.instance for target in self.seats))
                self._node.out.append(ArmGrant(self.grant, peers, self.pages))
                for target in self.seats:
                    self._grant(target)
            case RA.GRANT_ONE if seat:
                self._grant(seat)
            case RA.RECEIVED:
                for target in self.seats:
                    self._tell(target, Received(**self._identity(target)))
            case RA.ABORT:
                for target in self.seats:
                    self._abort(target)
            case RA.ABORT_ONE if seat:
                self._abort(seat)
            case RA.OWE_ABORT:
                self.owes_abort = True
            case RA.FENCE if self.grant != NO_GRANT and self._desk.fence:
                self._node.out.append(RevokeGrant(self.grant))
            case RA.ANSWER:
                assert self.cause is not None
                self._node.answer_failed(self.rid, self.room, self.cause)
            case RA.ANSWER_ROW:
                assert self.row is not None
                self._node.out.append(AnswerRow(self.rid, self.row))
            case RA.UNPROVEN:
                self._node.alarm(f"room {self.room}: {len(self.pages)} pages released by an operator, unproven")
            case _:
                self._move_pages(action)

    def _move_pages(self, action: RA) -> None:
        if not self.pages:
            return
        ledger = self._node.ledger
        match action:
            case RA.FILL:
                ledger.shift(self.pages, self.owner, Page.GRANTED, Page.FILLED)
                self._node.out.append(DisarmGrant(self.grant))
            case RA.DRAIN:
                ledger.shift(self.pages, self.owner, Page.GRANTED, Page.DRAINING)
            case RA.QUARANTINE:
                ledger.shift(self.pages, self.owner, Page.DRAINING, Page.QUARANTINED)
                who = ", ".join(str(holder) for holder in self.holders)
                self._node.alarm(f"room {self.room}: {len(self.pages)} pages quarantined, no proof from {who}")
            case RA.ACTIVATE:
                ledger.shift(self.pages, self.owner, Page.FILLED, Page.ACTIVE)
            case RA.FREE:
                ledger.free(self.pages, self.owner)
                self._node.note(self.rid, self.room, "freed", f"{len(self.pages)} pages")
                self.pages = ()
                if self.cause is not None:
                    self._node.out.append(DisarmGrant(self.grant))
            case _:
                pass

    def owed_abort(self) -> None:
        """A session is up at last: say the ABORT that a cancelled room still owes."""
        self.owes_abort = False
        for target in self.seats:
            self._abort(target)
        self._derive()

    def _announce(self, seat: Seat) -> None:
        self._tell(seat, Announce(**self._identity(seat), policy="early"))

    def _grant(self, seat: Seat) -> None:
        left = max(0.0, self.leg.deadline - self._node.now)
        frame = Grant(**self._identity(seat), pages=self.pages, prompt=self.leg.prompt, time_left_s=left)
        if self._tell(seat, frame):
            self.granted.add(seat)

    def _abort(self, seat: Seat) -> None:
        if seat in self.succeeded:
            self._tell(seat, Received(**self._identity(seat)))  # its row is not wanted any more
        elif seat not in self.quiet:
            assert self.cause is not None
            self._tell(seat, Abort(**self._identity(seat), cause=self.cause))

    def _tell(self, seat: Seat, frame: Frame) -> bool:
        handed = self._desk.send(seat, frame)
        if handed:
            self.told.add(seat)
        return handed

    def _identity(self, seat: Seat) -> _Identity:
        return _Identity(room=self.room, grant=self.grant, src=self._desk.instance, dst=seat.instance, rank=seat.rank)
