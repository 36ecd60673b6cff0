"""The connector of decode's scheduler in the params dialect: all of its loads, their leases, and the sessions with the
prefills that hold what they read.

A prefill is found by what it has answered, not by a registry: a handle names the control ports of its ranks. The
sessions are those of the rooms dialect; each peer has its own, dialled beside the others, so that a dead one delays
nobody else's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ..connector import Finished, KVConnectorBase, Matched
from ..effects import Lane, SendFrame, Teardown
from ..errors import Cause
from ..events import (
    ConnLost,
    DialFailed,
    Dialled,
    Event,
    FrameIn,
    GrantQuiet,
    Handle,
    KVOutput,
    PagesLanded,
    RequestArrived,
    RouteKnown,
    TornDown,
)
from ..frames import Beat, Confirmed, Frame, HoldIdentity, ReadFailed, Release, Renewed
from ..ids import NO_GRANT, ConnId, GrantNo, HoldNo, Instance, Link, PageId, Rid
from ..membership import Membership
from ..node import Node
from ..peers import Peers
from ..session import Identity
from .leases import Leases
from .missed import Missed, Place
from .reader import Reader, Serial
from .table import LA, LE, L

MAX_KNOWN = 256
"""Addresses of prefills that are remembered when nobody waits there any more."""

Name = tuple[Instance, HoldNo]
"""A hold, among all of them."""


class Scheduler(Protocol):
    """The node around it."""

    @property
    def node(self) -> Node: ...

    def progressed(self, rid: Rid) -> None:
        """Its load gets on."""
        ...


class Owed(msgspec.Struct, frozen=True):
    """A RELEASE that waits for a session."""

    grant: GrantNo
    cause: Cause
    rid: Rid


class PullConnector(KVConnectorBase):
    """connector.KVConnector of a decode. Frames and grants go into the node's outbox as they are decided."""

    def __init__(self, scheduler: Scheduler, me: Identity) -> None:
        super().__init__()
        self.node = node = scheduler.node
        self.instance = me.instance
        self.salvages = node.limits.recompute
        self._scheduler = scheduler
        self.members: Membership[Serial] = Membership(
            me, node.limits.session, node.out, self._beat, self._look_up, teller="the hand-off of"
        )
        self._peers: Peers[Serial] = Peers(self, self.members)
        self._leases = Leases(node, me.instance, self._link_to, self.send)
        self._missed = Missed()
        self.readers: dict[Rid, Reader] = {}
        self._of_hold: dict[Name, Reader] = {}
        self._of_grant: dict[GrantNo, Reader] = {}
        self._of_serial: dict[Serial, Reader] = {}
        self._routes: dict[str, RouteKnown] = {}  # of what is being asked for
        self._known: OrderedDict[str, None] = OrderedDict()  # addresses, the one that was sought last is the last
        self._asked: list[str] = []
        self._owed: dict[Name, Owed] = {}
        self._output = KVOutput()
        self._ready: list[Rid] = []
        self._serials = self._grants = 0

    # --- the scheduler's hooks --------------------------------------------------------------------------------------

    def taken(self, handle: Handle) -> Cause | None:
        """I12: what is read once is not read twice."""
        if _name(handle) not in self._of_hold:
            return None
        text = f"hold {handle.hold} of prefill {handle.instance} is being read by another request here"
        return Cause("spent", f"{text}; every request needs a hold of its own", 409, side="decode")

    def on_new_request(self, request: RequestArrived) -> None:
        if request.handle is None:
            return
        reader = Reader(request, self._next_serial(), self)
        self.readers[request.rid] = self._of_hold[_name(reader.handle)] = self._of_serial[reader.serial] = reader
        self._leases.keep(reader.handle.instance, reader.handle.hold, reader.handle.lease_s)
        if missed := self._missed.cause(_place(reader.handle), self.node.now):
            reader.apply(LE.UNREACHABLE, cause=missed)
        else:
            self._seek(reader.handle, reader.serial)

    def get_num_new_matched_tokens(self, request: RequestArrived, num_computed_tokens: int) -> Matched:
        """The last token is recomputed here: who has all before it needs nothing."""
        reader = self.readers.get(request.rid)
        if reader is None:
            return Matched(0)
        if not reader.lanes:
            return Matched(None)
        tokens = request.prompt.tokens
        return Matched(0) if num_computed_tokens >= tokens - 1 else Matched(tokens - num_computed_tokens, waits=True)

    def update_state_after_alloc(
        self, request: RequestArrived, blocks: Sequence[PageId], num_external_tokens: int
    ) -> None:
        reader = self.readers.get(request.rid)
        if reader is None:
            return
        if not num_external_tokens:
            reader.apply(LE.NOTHING_TO_READ)
            return
        self._grants += 1
        grant = GrantNo(self._grants)
        self._of_grant[grant] = reader
        reader.start(tuple(blocks), grant)

    def request_finished(self, request: RequestArrived, blocks: Sequence[PageId]) -> Finished:
        reader = self.readers.get(request.rid)
        if reader is None:
            return Finished()
        reader.apply(LE.CANCEL, cause=Cause("not_wanted", "the request at decode is over", 499, side="decode"))
        return Finished(delay_free=not reader.over)

    def refused(self, handle: Handle, cause: Cause) -> None:
        if _name(handle) not in self._of_hold:
            self.let_go(handle, NO_GRANT, cause)

    # --- for the scheduler around it --------------------------------------------------------------------------------

    def take_output(self) -> KVOutput:
        output, self._output = self._output, KVOutput()
        return output

    def take_ready(self) -> Sequence[Rid]:
        ready, self._ready = self._ready, []
        return ready

    def take_event(self, event: Event) -> None:
        match event:
            case FrameIn(conn, frame):
                self._frame(conn, frame)
            case PagesLanded(grant, link, pages):
                if reader := self._granted_as(grant, "landed"):
                    self._scheduler.progressed(reader.rid)
                    reader.page_landed(link, pages)
            case GrantQuiet(grant, here, kind):
                if reader := self._granted_as(grant, "quiet"):
                    reader.fenced(here, kind)
            case Dialled() | DialFailed() | ConnLost():
                self._peers.event(event)
            case TornDown(peer, upto):
                for reader in list(self.readers.values()):
                    if reader.handle.instance == peer and reader.grant <= upto:
                        reader.torn_down()
            case _:
                self.node.count("late", type(event).__name__)
        self._answer_look_ups()

    def tick(self) -> float | None:
        self._peers.tick()
        self._answer_look_ups()
        return self.members.next_due()

    def due(self, kind: str, name: object) -> None:
        if kind == "renew" and isinstance(name, str):
            self._leases.due(Instance(name))
        elif kind == "owed" and isinstance(name, tuple):
            self._owed.pop(name, None)

    def reader_of(self, grant: GrantNo) -> Reader | None:
        """Whose grant this is, until its load is over."""
        return self._of_grant.get(grant)

    # --- Desk of readers --------------------------------------------------------------------------------------------

    def send(self, link: Link, frame: Frame) -> bool:
        conn = self.members.conn(link)
        if conn is None:
            return False
        self.node.out.append(SendFrame(conn, frame))
        return True

    def let_go(self, handle: Handle, grant: GrantNo, cause: Cause) -> None:
        """Now where a session is up; else it is owed, and somebody dials. Beyond that the lease ends it."""
        link = self._link_to(handle.instance)
        if link is not None:
            self._release(link, handle.hold, Owed(grant, cause, handle.rid))
            return
        self._owed[_name(handle)] = Owed(grant, cause, handle.rid)
        self.node.timers.set(("owed", _name(handle)), self.node.now + self.node.limits.peer_wait_s)
        self._seek(handle, self._next_serial())

    def _release(self, link: Link, hold: HoldNo, owed: Owed) -> None:
        there = link.there
        named = HoldIdentity(hold=hold, grant=owed.grant, src=self.instance, dst=there.instance, rank=there.rank)
        self.send(link, Release(**named, cause=owed.cause, rid=owed.rid))

    def drop_lease(self, reader: Reader) -> None:
        self._leases.drop(reader.handle.instance, reader.handle.hold)

    def report(self, reader: Reader, action: LA) -> None:
        rid, output = reader.rid, self._output
        if action is LA.RECEIVED:
            output.finished_recving.add(rid)
        elif action is LA.COMMIT:
            output.confirmed.add(rid)
        elif action is LA.BAD_TAIL:
            output.invalid_block_ids |= set(reader.blocks[reader.head :])
        elif action is LA.FAIL:
            assert reader.cause is not None
            output.failed_recving[rid] = reader.cause

    def ended(self, reader: Reader) -> None:
        self.readers.pop(reader.rid, None)
        self._of_hold.pop(_name(reader.handle), None)
        self._of_grant.pop(reader.grant, None)
        self._of_serial.pop(reader.serial, None)
        self.members.forget(reader.serial)

    # --- peers ------------------------------------------------------------------------------------------------------

    def route_ok(self, room: Serial, lanes: tuple[Lane, ...]) -> None:
        reader = self._of_serial.get(room)
        if reader is None:
            return
        there = lanes[0].link.there.instance
        if there == reader.handle.instance:
            reader.bind(lanes)
            self._ready.append(reader.rid)
            return
        at = reader.handle.endpoints[0][1]
        text = f"prefill {reader.handle.instance} is not at {at} any more: {there} is; ask prefill again"
        reader.apply(LE.UNREACHABLE, cause=Cause("wrong_instance", text, 409, retryable=True, side="prefill"))

    def route_bad(self, room: Serial, cause: Cause) -> None:
        if reader := self._of_serial.get(room):
            if cause.code == "prefill_unreachable":
                self._missed.note(_place(reader.handle), cause, self.node.now)
            reader.apply(LE.UNREACHABLE, cause=cause)

    def session_up(self, link: Link) -> None:
        peer = link.there.instance
        self._missed.met(peer)
        for name in [name for name in self._owed if name[0] == peer]:
            self.node.timers.clear(("owed", name))
            self._release(link, name[1], self._owed.pop(name))
        self._leases.session_up(link)
        for reader in list(self.readers.values()):
            if reader.handle.instance == peer:
                reader.session_up(link)

    def instance_gone(self, instance: Instance) -> None:
        self.node.count("peer_gone")
        text = f"prefill {instance} is gone: its session ended and did not come back"
        for reader in list(self.readers.values()):
            if reader.lanes and reader.handle.instance == instance:
                reader.apply(LE.PEER_GONE, cause=Cause("peer_gone", text, 503, retryable=True, side="prefill"))
        self._leases.peer_gone(instance)
        for reader in self.readers.values():
            if not reader.lanes and reader.handle.instance == instance:  # not all sessions were up yet: it still waits
                self._leases.keep(instance, reader.handle.hold, reader.handle.lease_s)
        self.node.out.append(Teardown(instance, GrantNo(self._grants)))

    def unproven(self) -> set[Link]:
        return set()

    def _frame(self, conn: ConnId, frame: Frame) -> None:
        link = self._peers.frame(conn, frame)
        if not isinstance(frame, (Confirmed, ReadFailed, Renewed)):
            return
        if link is None or (frame.dst, frame.src, frame.rank) != (self.instance, link.there.instance, link.there.rank):
            self.node.count("late", "identity")
        elif isinstance(frame, Renewed):
            self._renewed(link, frame)
        else:
            self._of_read(link, frame)

    def _of_read(self, link: Link, frame: Confirmed | ReadFailed) -> None:
        reader = self._of_grant.get(frame.grant)
        if reader is None or (link not in reader.links or frame.hold != reader.handle.hold):
            self.node.count("late", "grant")
        elif isinstance(frame, ReadFailed):
            reader.apply(LE.READ_FAILED, cause=frame.cause)
        elif frame.refusal is None:
            reader.apply(LE.CONFIRMED)
        else:
            reader.apply(LE.REFUSED, cause=frame.refusal)

    def _renewed(self, link: Link, frame: Renewed) -> None:
        for hold, cause in self._leases.answered(link, frame).items():
            reader = self._of_hold.get((frame.src, hold))
            if reader and reader.state not in (L.CONFIRMING, L.SALVAGING):  # there CONFIRMED will say it
                reader.apply(LE.LOST, cause=cause)

    def _link_to(self, instance: Instance) -> Link | None:
        """Any session with this instance that is up."""
        return next((link for link in self.members.links_up() if link.there.instance == instance), None)

    def _granted_as(self, grant: GrantNo, what: str) -> Reader | None:
        reader = self._of_grant.get(grant)
        if reader is None:
            self.node.count("late", what)
        return reader

    # --- where a prefill is -----------------------------------------------------------------------------------------

    def _seek(self, handle: Handle, serial: Serial) -> None:
        _, address = _place(handle)
        self._routes[address] = RouteKnown(address, handle.endpoints, handle.shape, follow_room=False)
        self._peers.seek(address, serial, handle.dp)
        self._answer_look_ups()
        self._routes.pop(address, None)
        self._known[address] = None
        self._known.move_to_end(address)
        self._forget_old()

    def _forget_old(self) -> None:
        """Handles name addresses without end."""
        for address in list(self._known)[: max(0, len(self._known) - MAX_KNOWN)]:
            group = self.members.groups.get(address)
            if group is None or not group.waiting:
                self.members.failed(address)
                del self._known[address]

    def _look_up(self, address: str) -> None:
        self._asked.append(address)

    def _answer_look_ups(self) -> None:
        """What a registry would say, the handles have said."""
        while self._asked:
            route = self._routes[self._asked.pop()]
            for serial, cause in self.members.known(route, self.node.now):
                self.route_bad(serial, cause)

    def _next_serial(self) -> Serial:
        self._serials += 1
        return Serial(self._serials)

    def _beat(self) -> Beat:
        return Beat(src=self.instance)


def _place(handle: Handle) -> Place:
    return handle.instance, f"{','.join(str(at) for _, at in handle.endpoints)}/{handle.shape}/{handle.dp}"


def _name(handle: Handle) -> Name:
    return handle.instance, handle.hold
