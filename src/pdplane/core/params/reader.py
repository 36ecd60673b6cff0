"""Decode's side of one load in the params dialect: applies READER of core/params/table.py.

Pages come over links, as in the rooms dialect, and are placed by this side alone: what a cancel has to wait for is the
closing of its own fences. A load is good when every page has landed on every link *and* prefill has said, after the
last of them, that it held them until then: what a late reader has read may be another's (I23).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType, Protocol

from ..effects import ArmGrant, DisarmGrant, Lane, RevokeGrant
from ..errors import Cause
from ..events import Handle, RequestArrived
from ..frames import Confirm, Frame, HoldIdentity, Read
from ..ids import NO_GRANT, GrantNo, Instance, Link, PageId, Rank, Rid
from ..node import Node
from .table import LA, LE, OVER, READER, L

Serial = NewType("Serial", int)
"""One request that waits for lanes: monotone, this side's own."""

Gate = tuple[Rank, str]
"""A rank of ours and a kind of transport: what is armed and fenced."""


NOT_OURS = frozenset({"prompt_mismatch", "invalid_params"})
"""Prefill's word that the handle names somebody else's hold: it is not this consumer's to give up."""


class Desk(Protocol):
    """What a load needs of its connector."""

    node: Node
    instance: Instance
    salvages: bool

    def send(self, link: Link, frame: Frame) -> bool:
        """False where no session with exactly this instance is up: it is said again when there is."""
        ...

    def let_go(self, handle: Handle, grant: GrantNo, cause: Cause) -> None:
        """RELEASE, as soon as can be."""
        ...

    def drop_lease(self, reader: Reader) -> None: ...

    def report(self, reader: Reader, action: LA) -> None:
        """RECEIVED, COMMIT, FAIL or BAD_TAIL, for the scheduler."""
        ...

    def ended(self, reader: Reader) -> None: ...


class Reader:
    """One load. `blocks` take the last pages of the hold; `head`: how many of them, from the first on, are there."""

    def __init__(self, request: RequestArrived, serial: Serial, desk: Desk) -> None:
        assert request.handle is not None
        self.request = request
        self.handle: Handle = request.handle
        self.serial = serial
        self.state = L.PARKED
        self.lanes: tuple[Lane, ...] = ()
        self.blocks: tuple[PageId, ...] = ()
        self.grant = NO_GRANT
        self.landed: dict[Link, set[PageId]] = {}
        self.quiet: set[Gate] = set()
        self.cause: Cause | None = None
        self.unwanted = False  # its request is over: nothing is worth saving
        self.alone = False  # its prefill is gone: nothing can be confirmed
        self._desk = desk
        self._node = desk.node

    @property
    def rid(self) -> Rid:
        return self.request.rid

    @property
    def links(self) -> list[Link]:
        return [lane.link for lane in self.lanes]

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def head(self) -> int:
        """Pages that are there on all links before the first that is not."""
        whole = set.intersection(*self.landed.values()) if self.landed else set()
        return next((at for at, page in enumerate(self.blocks) if page not in whole), len(self.blocks))

    def apply(self, event: LE, *, cause: Cause | None = None, link: Link | None = None) -> None:
        """One cell of the table. `cause`: why, for events that end the load; the first one stays."""
        step = READER.get((self.state, event))
        if step is None:
            self._node.count("late", f"{self.state}/{event}")
            return
        was, (self.state, actions) = self.state, step
        self.cause = self.cause or cause
        self.unwanted = self.unwanted or event is LE.CANCEL
        self.alone = self.alone or event is LE.PEER_GONE
        if was is not self.state:
            self._node.note(self.rid, None, self.state, str(cause) if cause else "")
        for action in actions:
            self._act(action, link)
        if self.over:
            self._desk.ended(self)
        else:
            self._derive()

    # --- what connector, peers and transport report -----------------------------------------------------------------

    def bind(self, lanes: Iterable[Lane]) -> None:
        """The sessions with all ranks of its prefill are up."""
        self.lanes = tuple(lanes)

    def start(self, blocks: tuple[PageId, ...], grant: GrantNo) -> None:
        """These pages are reserved, and nobody else's."""
        self.blocks, self.grant = blocks, grant
        self.landed = {link: set() for link in self.links}
        self.apply(LE.START)

    def page_landed(self, link: Link, pages: Iterable[PageId]) -> None:
        if self.state is L.READING and link in self.landed:
            self.landed[link].update(set(pages).intersection(self.blocks))
            self._derive()
        else:
            self._node.count("late", "landed")

    def fenced(self, here: Rank, kind: str) -> None:
        """Nothing lands there any more under this load's grant."""
        self.quiet.add((here, kind))
        self._derive()

    def torn_down(self) -> None:
        """Everything with its prefill is cut: nothing lands any more, whatever a fence says."""
        if self.state is L.DRAINING:
            self.quiet.update(self.gates)
            self._derive()

    @property
    def gates(self) -> list[Gate]:
        """What has to close before its pages are decode's own again."""
        return list(dict.fromkeys((lane.link.here, lane.kind) for lane in self.lanes))

    def session_up(self, link: Link) -> None:
        if link in self.links:
            self.apply(LE.SESSION_UP, link=link)

    # --- table plumbing ---------------------------------------------------------------------------------------------

    def _derive(self) -> None:
        if self.state is L.READING and all(len(pages) == len(self.blocks) for pages in self.landed.values()):
            self.apply(LE.LANDED_ALL)
        elif self.state is L.DRAINING and self.quiet >= set(self.gates):
            worth = self._desk.salvages and self.head and not (self.unwanted or self.alone)
            self.apply(LE.QUIET_HEAD if worth else LE.QUIET)

    def _act(self, action: LA, link: Link | None) -> None:
        match action:
            case LA.READ:
                self._node.out.append(ArmGrant(self.grant, self.blocks, self.lanes))
                for target in self.links:
                    self._read(target)
            case LA.READ_ONE if link:
                self._read(link)
            case LA.CONFIRM:
                self._confirm()
            case LA.DISARM:
                self._node.out += [DisarmGrant(self.grant, *gate) for gate in self.gates]
            case LA.FENCE:
                self._node.out += [RevokeGrant(self.grant, *gate) for gate in self.gates]
            case LA.RELEASE if self.cause is None or self.cause.code not in NOT_OURS:
                cause = self.cause or Cause("not_needed", "decode has every page of this prompt already", 200)
                self._desk.let_go(self.handle, self.grant, cause)
            case LA.DROP_LEASE:
                self._desk.drop_lease(self)
            case _:
                self._desk.report(self, action)

    def _read(self, link: Link) -> None:
        links = tuple((other.there.rank, other.here) for other in self.links) if len(self.lanes) > 1 else ()
        tail = self.handle.pages[len(self.handle.pages) - len(self.blocks) :]
        prompt = self.request.prompt
        read = Read(
            **self._identity(link),
            src_pages=tail,
            dst_pages=self.blocks,
            prompt=prompt,
            links=links,
            rid=self.handle.rid,
        )
        self._desk.send(link, read)

    def _confirm(self) -> None:
        """All ranks of a prefill share one ledger: it is asked once, on whatever session is up."""
        for link in self.links:
            if self._desk.send(link, Confirm(**self._identity(link))):
                return

    def _identity(self, link: Link) -> HoldIdentity:
        there = link.there
        return HoldIdentity(
            hold=self.handle.hold, grant=self.grant, src=self._desk.instance, dst=there.instance, rank=there.rank
        )
