"""Decode's side of one room: applies RECEIVER of core/rooms/table.py, keeps the rank sets and the pages.

Links are sets, never counters: who was told, who is quiet, who has succeeded. A link is quiet once nothing can be
written over it any more under this room's grant: by SUCCESS, by the closed local fence, by DRAINED where there is no
fence, by the peer-level teardown, or because it was never handed a GRANT and its instance is gone. `quiet >= told` is
the proof that frees pages (O4).

What the prefix cache has of the prompt is shared from admission on, and needs no proof: a grant never names a shared
page, so nobody writes there. It is let go as soon as the room ends; a room that shares all of its prompt has granted
nothing, and nobody owes it a proof.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from ..admission import demand
from ..effects import AnswerRow, ArmGrant, DisarmGrant, Lane, RevokeGrant
from ..errors import Cause
from ..events import LegArrived
from ..frames import Abort, Announce, Frame, FrameIdentity, Grant, Received, Row
from ..ids import NO_GRANT, Instance, Link, PageId, Rank, Rid, Room
from ..layout import PREFIX_PROTOCOL
from ..node import Node
from ..pages import Owner, Page, grant_owner
from ..prompt_pages import Prompt, PromptPages, Taken
from .table import RA, RE, RECEIVER, KVPoll, R, receiver_poll


class Desk(Protocol):
    """What a receiver needs of its node beside the outbox and the ledger."""

    instance: Instance
    fenced: frozenset[str]
    policy: str

    @property
    def node(self) -> Node: ...

    @property
    def pages(self) -> PromptPages: ...

    def send(self, link: Link, frame: Frame) -> bool:
        """False where no session with exactly this instance is up: the resync will say it again."""
        ...

    def settled(self, receiver: Receiver) -> None:
        """The machine has moved: clocks and queues follow."""
        ...


class Receiver:
    """One room at decode."""

    def __init__(self, leg: LegArrived, arrived_at: float, desk: Desk) -> None:
        self.leg = leg
        self.room: Room = leg.room
        self.need = demand(leg.prompt.tokens, leg.max_new, desk.node.limits)
        self.prompt = Prompt(leg.prompt.tokens, leg.page_keys)  # shares nothing before the route is known
        self.rid: Rid = leg.rid
        self.arrived_at = arrived_at
        self.state = R.QUEUED
        self.lanes: tuple[Lane, ...] = ()
        self.told: set[Link] = set()  # handed any frame of this room
        self.granted: set[Link] = set()  # handed its GRANT: these owe a proof
        self.quiet: set[Link] = set()
        self.drained_by: set[Link] = set()
        self.succeeded: set[Link] = set()
        self.ready: set[Link] = set()
        self.landed: dict[Link, set[PageId]] = {}
        self.pages: tuple[PageId, ...] = ()  # own: granted, and written by prefill
        self.shared: tuple[PageId, ...] = ()  # of the prompt's head, before these: the prefix cache's
        self.running = False  # the engine has the pages, under this room's claim
        self.grant = NO_GRANT
        self.row: Row | None = None
        self.cause: Cause | None = None
        self.owes_abort = False
        self._desk = desk
        self._node = desk.node

    @property
    def owner(self) -> Owner:
        return grant_owner(self.grant)

    @property
    def links(self) -> list[Link]:
        return [lane.link for lane in self.lanes]

    @property
    def poll(self) -> KVPoll:
        return receiver_poll(self.state, landed=any(self.landed.values()), failed=self.cause is not None)

    @property
    def holders(self) -> list[Link]:
        """Links whose proof is missing."""
        return [link for link in self.links if link in self.told and link not in self.quiet]

    @property
    def unconfirmed(self) -> set[Link]:
        """Links that know of this room and have not said themselves that it is over."""
        return self.told - self.drained_by - self.succeeded

    def apply(self, event: RE, *, cause: Cause | None = None, link: Link | None = None) -> None:
        """One cell of the table. `cause`: why, for events that end the room. `link`: whose event it is."""
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
        if event is RE.PEER_GONE and link is not None and not (self.pages and link in self.granted):
            self.quiet.add(link)  # never granted, or no page: it owes no proof
        if was is not self.state:
            self._node.note(self.rid, self.room, self.state, str(cause) if cause else "")
        for action in actions:
            self._act(action, link)
        self._desk.settled(self)
        self._derive()

    # --- what peers and transport report ----------------------------------------------------------------------------

    def bind(self, lanes: Iterable[Lane]) -> None:
        """The route is known and the sessions are up. Pages are shared where all ranks of prefill know that pages may
        be there already: all full ones, since the row brings the first token and nothing is computed here."""
        self.lanes = tuple(lanes)
        self.landed = {lane.link: set() for lane in self.lanes}
        if all(lane.protocol >= PREFIX_PROTOCOL for lane in self.lanes):
            self.prompt = msgspec.structs.replace(self.prompt, most_shared=len(self.prompt.page_keys))

    def take(self, taken: Taken) -> None:
        """All pages of the prompt: shared ones, held for it, and its own, already `granted` in the ledger under
        `owner`. Precedes PAGES_OK."""
        self.shared, self.pages = taken.pages[: taken.shared], taken.pages[taken.shared :]
        if self.shared:
            self._node.note(self.rid, self.room, "cached", f"{taken.shared} of {len(taken.pages)} pages are here")
            self._node.count("decode_prefix_hits", "full" if not self.pages else "partial")

    def computed(self, link: Link) -> None:
        """READY: this rank of prefill holds the prompt's KV."""
        if self.state is not R.ANNOUNCED:
            self._node.count("late", f"{self.state}/ready")
            return
        self.ready.add(link)
        self._derive()

    def success(self, link: Link, row: Row) -> None:
        if self.state not in (R.GRANTED, R.DRAINING, R.QUARANTINE):
            self._node.count("late", f"{self.state}/success")
            return
        self.quiet.add(link)
        self.succeeded.add(link)
        if self.state is R.GRANTED:
            self._take_row(link, row)
        self._derive()

    def _take_row(self, link: Link, row: Row) -> None:
        prompt = self.leg.prompt
        if (row.prompt_digest, row.prompt_tokens) != (prompt.digest, prompt.tokens):
            theirs = f"{row.prompt_digest.hex()} of {row.prompt_tokens} tokens"
            ours = f"{prompt.digest.hex()} of {prompt.tokens} tokens"
            text = f"prefill computed another prompt: {theirs}, decode has {ours}"
            self.apply(RE.ROW_BAD, cause=Cause("prompt_mismatch", text, 500, side="decode"), link=link)
        elif self.row is not None and self.row != row:
            text = f"the ranks of prefill {link.there.instance} sent different rows: {self.row} and {row}"
            self.apply(RE.ROW_BAD, cause=Cause("row_mismatch", text, 500, side="prefill"), link=link)
        else:
            self.row = row

    def drained(self, link: Link) -> None:
        """Prefill says FAILED before DRAINED, so a room that is not over has nothing to drain. Where this side has a
        fence, the fence alone proves: bytes that prefill wrote and gave up may still lie in a socket's buffer."""
        if self.state not in (R.DRAINING, R.QUARANTINE):
            self._node.count("late", f"{self.state}/drained")
            return
        self.drained_by.add(link)
        if not (self.pages and self._kind_of(link) in self._desk.fenced):
            self.quiet.add(link)
        self._derive()

    def fenced(self, here: Rank, kind: str) -> None:
        """The local fence of this rank and kind is closed: nothing lands there any more."""
        self.quiet.update(lane.link for lane in self.lanes if (lane.link.here, lane.kind) == (here, kind))
        self._derive()

    def torn_down(self, peer: Instance) -> None:
        """Everything with this instance is cut: nothing of it lands any more."""
        if self.state in (R.DRAINING, R.QUARANTINE):
            self.quiet.update(link for link in self.links if link.there.instance == peer)
            self._derive()

    def page_landed(self, link: Link, pages: Iterable[PageId]) -> None:
        self.landed[link].update(pages)
        self._derive()

    def session_up(self, link: Link) -> None:
        if link in self.landed:
            self.apply(RE.SESSION_UP, link=link)

    # --- table plumbing ---------------------------------------------------------------------------------------------

    def _derive(self) -> None:
        """Derived events: they follow from the sets alone."""
        if self.state is R.ANNOUNCED and self.ready >= set(self.links):
            self.apply(RE.READY_ALL)
        elif self.state is R.GRANTED and self._complete:
            self.apply(RE.SUCCESS_ALL)
        elif self.state in (R.DRAINING, R.QUARANTINE) and not self.owes_abort and self.quiet >= self.told:
            self.apply(RE.QUIET_ALL)

    @property
    def _complete(self) -> bool:
        """O3: every rank has said SUCCESS, and every page that was granted is visible here on every link."""
        everything = len(self.pages)
        return self.succeeded >= set(self.links) and all(len(pages) == everything for pages in self.landed.values())

    def _act(self, action: RA, link: Link | None) -> None:
        match action:
            case RA.ANNOUNCE:
                for target in self.links:
                    self._announce(target)
            case RA.ANNOUNCE_ONE if link:
                self._announce(link)
            case RA.GRANT:
                self._node.out.append(ArmGrant(self.grant, self.pages, self.lanes, self.shared))
                for target in self.links:
                    self._grant(target)
            case RA.GRANT_ONE if link:
                self._grant(link)
            case RA.RECEIVED:
                for target in self.links:
                    self._tell(target, Received(**self._identity(target)))
            case RA.ABORT:
                for target in self.links:
                    self._abort(target)
            case RA.ABORT_ONE if link:
                self._abort(link)
            case RA.OWE_ABORT:
                self.owes_abort = True
            case RA.FENCE if self.grant != NO_GRANT:
                self._node.out += [RevokeGrant(self.grant, *gate) for gate in self._gates]
            case RA.ANSWER:
                assert self.cause is not None
                self._node.answer_failed(self.rid, self.room, self.cause)
            case RA.ANSWER_ROW:
                assert self.row is not None
                self._node.out.append(AnswerRow(self.rid, self.row))
            case RA.PROVEN:
                self._node.alarm(
                    f"room {self.room}: the proof came, {len(self.pages)} quarantined pages are free again"
                )
            case RA.UNPROVEN:
                self._node.alarm(f"room {self.room}: {len(self.pages)} pages released by an operator, unproven")
            case _:
                self._move_pages(action)

    def _move_pages(self, action: RA) -> None:
        if not (self.pages or self.shared):
            return
        ledger = self._node.ledger
        match action:
            case RA.FILL:
                ledger.shift(self.pages, self.owner, Page.GRANTED, Page.FILLED)
                self._disarm()
            case RA.DRAIN:
                ledger.shift(self.pages, self.owner, Page.GRANTED, Page.DRAINING)
                self._let_go()
                if not self.pages:
                    self._disarm()  # nothing can land, and no proof is waited for
            case RA.QUARANTINE:
                ledger.shift(self.pages, self.owner, Page.DRAINING, Page.QUARANTINED)
                who = ", ".join(str(holder) for holder in self.holders)
                self._node.alarm(f"room {self.room}: {len(self.pages)} pages quarantined, no proof from {who}")
            case RA.ACTIVATE:
                ledger.shift(self.pages, self.owner, Page.FILLED, Page.ACTIVE)
                self.running = True
            case RA.FREE:
                self._give_back()
            case _:
                pass

    def _give_back(self) -> None:
        """With the proof in hand. What ends well has come whole, and the cache gets it; nothing else is ever shared."""
        if self.cause is None:
            pages = self.shared + self.pages
            self._desk.pages.keep(self.prompt, pages, len(self.shared), self.owner, Page.FILLED)
        else:
            self._node.ledger.free(self.pages, self.owner)
            self._disarm()
        self._node.note(self.rid, self.room, "freed", f"{len(self.shared) + len(self.pages)} pages")
        self.pages = ()
        self._let_go()

    def _let_go(self) -> None:
        """It reads the shared pages no more."""
        self._desk.pages.release(self.shared)
        self.shared = ()

    def owed_abort(self) -> None:
        """A session is up at last: say the ABORT that a cancelled room still owes."""
        self.owes_abort = False
        for target in self.links:
            self._abort(target)
        self._derive()

    @property
    def _gates(self) -> list[tuple[Rank, str]]:
        """Where pages come in: each rank of ours, by each kind of transport."""
        return list(dict.fromkeys((lane.link.here, lane.kind) for lane in self.lanes))

    def _kind_of(self, link: Link) -> str:
        return next(lane.kind for lane in self.lanes if lane.link == link)

    def _disarm(self) -> None:
        self._node.out += [DisarmGrant(self.grant, *gate) for gate in self._gates]

    def _announce(self, link: Link) -> None:
        self._tell(link, Announce(**self._identity(link), policy=self._desk.policy, prompt=self.leg.prompt))

    def _grant(self, link: Link) -> None:
        frame = Grant(
            **self._identity(link),
            pages=self.pages,
            prompt=self.leg.prompt,
            time_left_s=max(0.0, self.leg.deadline - self._node.now),
            links=tuple((other.there.rank, other.here) for other in self.links) if len(self.lanes) > 1 else (),
            decode_prefix_len=len(self.shared) or msgspec.UNSET,
        )
        if self._tell(link, frame):
            self.granted.add(link)

    def _abort(self, link: Link) -> None:
        if link in self.succeeded:
            self._tell(link, Received(**self._identity(link)))  # its row is not wanted any more
        elif link not in self.quiet:
            assert self.cause is not None
            self._tell(link, Abort(**self._identity(link), cause=self.cause))

    def _tell(self, link: Link, frame: Frame) -> bool:
        handed = self._desk.send(link, frame)
        if handed:
            self.told.add(link)
        return handed

    def _identity(self, link: Link) -> FrameIdentity:
        there = link.there
        return FrameIdentity(
            room=self.room, grant=self.grant, src=self._desk.instance, dst=there.instance, rank=there.rank
        )
