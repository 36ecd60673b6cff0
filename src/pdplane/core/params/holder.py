"""Prefill's side of one hold in the params dialect: applies HOLDER of core/params/table.py.

Computed KV, held under a lease for one consumer. "Held" is answered from here, on the control thread, at the moment in
which it is asked: it is a fact and not a memory.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from ..effects import CancelMoves, MovePages
from ..errors import Cause
from ..events import RequestArrived
from ..frames import Confirm, Confirmed, Frame, HoldIdentity, Read, ReadFailed
from ..ids import GrantNo, HoldNo, Instance, Link, MoveNo, PageId
from ..node import Node
from .table import HA, HE, HOLDER, H

ENDED = (H.RELEASED, H.REVOKED)
Asked = Read | Confirm


class Desk(Protocol):
    """What a hold needs of its connector."""

    node: Node
    instance: Instance

    def next_move(self, holder: Holder, link: Link) -> MoveNo: ...

    def identity(self, link: Link, hold: HoldNo, grant: GrantNo) -> HoldIdentity: ...

    def send(self, link: Link, frame: Frame) -> None: ...

    def sent(self, holder: Holder) -> None:
        """Nobody is to read its pages any more."""
        ...

    def ended(self, holder: Holder) -> None: ...


class Consumer(msgspec.Struct, frozen=True):
    """One reader: a decode instance, by one grant of its own."""

    instance: Instance
    grant: GrantNo


class Holder:
    """One hold. Over, it stays for a while without pages, to say what became of it."""

    def __init__(self, number: HoldNo, request: RequestArrived, pages: tuple[PageId, ...], desk: Desk) -> None:
        self.number = number
        self.request = request
        self.pages = pages
        self.state = H.HELD
        self.consumer: Consumer | None = None
        self.cause: Cause | None = None
        self.moves: dict[Link, MoveNo] = {}
        self.failed: dict[Link, Cause] = {}
        self.forget_at = 0.0
        self._desk = desk

    @property
    def over(self) -> bool:
        return self.state in ENDED

    def apply(
        self, event: HE, *, cause: Cause | None = None, link: Link | None = None, frame: Asked | None = None
    ) -> None:
        """One cell of the table. `cause`: why, for events that end the hold, or for a refusal of this one frame."""
        step = HOLDER.get((self.state, event))
        node = self._desk.node
        if step is None:
            node.count("late", f"{self.state}/{event}")
            return
        was, (self.state, actions) = self.state, step
        if self.over and was not in ENDED:
            self.cause = cause
        if was is not self.state:
            node.note(self.request.rid, None, self.state, str(cause) if cause else "")
        for action in actions:
            self._act(action, cause, link, frame)
        if self.over and was not in ENDED:
            node.count("hold_ended", event)
            self._desk.ended(self)

    def _act(self, action: HA, cause: Cause | None, link: Link | None, frame: Asked | None) -> None:
        match action:
            case HA.BIND if link and frame:
                self.consumer = Consumer(link.there.instance, frame.grant)
            case HA.MOVE if link and isinstance(frame, Read):
                self._move(link, frame)
            case HA.REFUSE if link and frame:
                refused = cause or self.refusal()
                self._desk.send(link, ReadFailed(**self._desk.identity(link, self.number, frame.grant), cause=refused))
            case HA.CONFIRMED if link and frame:
                self._desk.send(link, Confirmed(**self._desk.identity(link, self.number, frame.grant)))
            case HA.DENY if link and frame:
                refused = self.refusal()
                self._desk.send(link, Confirmed(**self._desk.identity(link, self.number, frame.grant), refusal=refused))
            case HA.STOP_MOVES if self.consumer:
                for moving in self.moves:
                    node = self._desk.node
                    node.out.append(CancelMoves(self.consumer.grant, moving))
            case HA.TELL if self.consumer:
                for reading in self.moves:
                    named = self._desk.identity(reading, self.number, self.consumer.grant)
                    self._desk.send(reading, ReadFailed(**named, cause=self.refusal()))
            case HA.SENT:
                self._desk.sent(self)
            case _:
                pass

    def refusal(self) -> Cause:
        """Why this hold is not, or not any more, for whoever asks."""
        text = f"hold {self.number} of prefill {self._desk.instance}"
        if self.state is H.REVOKED and self.cause is not None:
            return self.cause
        if self.state is H.HELD:
            return Cause("not_read", f"{text} was not read by this consumer", 409, side="prefill")
        if self.consumer is None and self.cause is not None:
            return Cause("spent", f"{text} was released unread: {self.cause.message}", 409, side="prefill")
        by = f", {self.consumer.instance}" if self.consumer else ""
        text = f"{text} has its one consumer{by}; every request needs a hold of its own"
        return Cause("spent", text, 409, side="prefill")

    def _move(self, link: Link, read: Read) -> None:
        """Once per link; said again after a lost session, what has failed is said again."""
        if link in self.failed:
            cause = self.failed[link]
            self._desk.send(link, ReadFailed(**self._desk.identity(link, self.number, read.grant), cause=cause))
        elif link not in self.moves and read.src_pages:
            number = self.moves[link] = self._desk.next_move(self, link)
            self._desk.node.out.append(MovePages(number, read.grant, link, read.src_pages, read.dst_pages))

    def move_failed(self, link: Link, error: str) -> None:
        """Its source pages are not read any more."""
        if self.consumer is None or self.state is not H.BOUND:
            return
        text = f"moving pages of hold {self.number} to {link.there.instance} failed: {error}"
        cause = self.failed[link] = Cause("transfer_failed", text, 502, retryable=True, side="prefill")
        self._desk.send(link, ReadFailed(**self._desk.identity(link, self.number, self.consumer.grant), cause=cause))
