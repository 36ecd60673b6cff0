"""The decode worker's core: rooms from leg to batch, admission, and the sessions with its prefills.

Order of work after every event: sessions' clocks, then growth of what runs, then finished hand-offs into the batch,
then admission (I14: what is finished is harvested before anything new is let in).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..admission import queue_full, refuse
from ..batch import Batch
from ..effects import AnswerFailed, Lane, SendFrame, Teardown
from ..errors import Cause, deadline, duplicate_room
from ..events import (
    Cancel,
    Computed,
    ConnLost,
    DialFailed,
    Dialled,
    Drain,
    Event,
    FrameIn,
    GrantQuiet,
    LegArrived,
    OperatorRelease,
    PagesLanded,
    RankKnown,
    Released,
    Retracted,
    RouteFailed,
    RouteKnown,
    TornDown,
)
from ..frames import Beat, Drained, Failed, Frame, Ready, Success
from ..ids import NO_GRANT, ConnId, GrantNo, Instance, Link, PageId, Rank, Rid, Room
from ..layout import EARLY
from ..membership import Membership
from ..node import Limits, Node, TimerKey
from ..pages import NOBODY, Owner
from ..peers import Peers
from ..prompt_pages import PromptPages
from ..reserve import Reserve
from ..session import Identity
from .book import Rooms, Tombstone
from .door import Door
from .owed import FromPrefill, Owed
from .receiver import Receiver
from .table import RE, R

ENDED_STATES = (R.DRAINING, R.QUARANTINE)
BOUND_STATES = (R.ANNOUNCED, R.ALLOCATING, R.GRANTED)


class DecodeNode(Node):
    """`fenced`: the kinds of transport that are receiver-placed, so that revoking a grant here is a proof."""

    side = "decode"

    def __init__(self, me: Identity, limits: Limits, *, fenced: frozenset[str]) -> None:
        super().__init__(limits)
        self.instance: Instance = me.instance
        self.policy = me.stamp.policy
        self.fenced = fenced
        self.rooms: Rooms[Receiver] = Rooms(limits.tombstone_s)
        self.pages = PromptPages(self.ledger, limits)
        self.reserve = Reserve(self.pages, limits)
        self.batch = Batch(self, self.pages, self.reserve)
        self.members: Membership[Room] = Membership(me, limits.session, self.out, self._beat)
        self.door = Door(self, self.pages, self.reserve, self.batch)
        self._waiting: set[Room] = set()
        self._allocating: set[Room] = set()  # of these, what stands at the door for pages
        self._owed = Owed(self)
        self._peers: Peers[Room] = Peers(self, self.members)
        self._by_rid: dict[Rid, Receiver] = {}
        self._by_grant: dict[GrantNo, Receiver] = {}
        self._progress: dict[Room, int] = {}
        self._grants = 0

    # --- Desk -------------------------------------------------------------------------------------------------------

    @property
    def node(self) -> Node:
        return self

    def next_grant(self) -> GrantNo:
        self._grants += 1
        return GrantNo(self._grants)

    def send(self, link: Link, frame: Frame) -> bool:
        conn = self.members.conn(link)
        if conn is None:
            return False
        self.out.append(SendFrame(conn, frame))
        return True

    def settled(self, receiver: Receiver) -> None:
        """Clocks and queues follow the machine's state."""
        room, state = receiver.room, receiver.state
        if state not in (R.QUEUED, R.ANNOUNCED, R.ALLOCATING):
            self._waiting.discard(room)
            self._allocating.discard(room)
        if state is R.ANNOUNCED:
            self.timers.clear(("queue", room))
            if not self.timers.is_set(("progress", room)):
                self._wind_progress(room)
        elif state is R.ALLOCATING and room not in self._allocating:
            self._ask_for_pages(receiver)
        elif state is R.GRANTED:
            self.timers.clear(("queue", room))
        elif state is R.SUCCESS:
            self.door.arrived(receiver)
            self.timers.clear(("progress", room))
        elif state is R.DRAINING:
            self._ended(receiver)
        elif state is R.QUARANTINE:
            self.timers.clear(("drain", room))
        elif state is R.GONE:
            self._gone(receiver)

    # --- events -----------------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        return len(self.rooms.live) + len(self.batch)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _event(self, event: Event) -> None:
        match event:
            case FrameIn(conn, frame):
                self._frame(conn, frame)
            case PagesLanded(grant, link, pages):
                self._landed(grant, link, pages)
            case Computed(rid=rid, tokens=tokens):
                self.batch.computed(rid, tokens)
            case Released(rid=rid, error=error):
                self.batch.released(rid, error)
            case LegArrived():
                self._leg(event)
            case Cancel(rid, cause):
                self._cancel(rid, cause)
            case Retracted(rid=rid, tokens=tokens):
                self.batch.retracted(rid, tokens)
            case GrantQuiet(grant, here, kind):
                if receiver := self._granted_as(grant, "quiet"):
                    receiver.fenced(here, kind)
            case TornDown(peer, upto):
                for receiver in list(self.rooms.live.values()):
                    if receiver.grant <= upto:  # a later grant went to the same instance over a connection made anew
                        receiver.torn_down(peer)
            case RouteKnown() | RankKnown() | RouteFailed() | Dialled() | DialFailed() | ConnLost():
                self._peers.event(event)
            case Drain(reason):
                self.draining = reason
            case OperatorRelease(grant):
                self._operator_release(grant)
            case _:
                self.count("late", type(event).__name__)

    def _due(self, key: TimerKey) -> None:
        kind, name = key
        if kind == "running" and isinstance(name, str):
            self.batch.overdue(Rid(name))
            return
        if kind == "owed" and isinstance(name, Link):
            self._owed.expire(name)
            return
        receiver = self.rooms.get(Room(name)) if isinstance(name, int) else None
        if receiver is None:
            return
        waited = self.now - receiver.arrived_at
        if kind == "deadline":
            receiver.apply(RE.CANCEL, cause=deadline(self.side, waited))
        elif kind == "queue":
            receiver.apply(RE.CANCEL, cause=queue_full(self))
        elif kind == "progress":
            text = f"prefill has shown no progress for {self.limits.progress_limit_s:g} s"
            receiver.apply(RE.CANCEL, cause=Cause("no_progress", text, 504, retryable=True, side="prefill"))
        elif kind == "drain":
            receiver.owes_abort = False
            receiver.apply(RE.DRAIN_LIMIT if receiver.pages else RE.ABORT_LIMIT)

    def _after(self) -> None:
        self._peers.tick()
        self.batch.grow()
        self.batch.restore()
        self.door.harvest()
        for receiver in self.door.admit(self.next_grant):
            self._by_grant[receiver.grant] = receiver
            self._wind_progress(receiver.room)
            receiver.apply(RE.PAGES_OK)
        due = self.members.next_due()
        if due is not None:
            self.timers.set(("sessions", 0), due)

    def owner_of(self, rid: Rid) -> Owner:
        """Under which name the ledger knows this request's pages; NOBODY where it holds none."""
        if running := self.batch.running.get(rid):
            return running.owner
        receiver = self._by_rid.get(rid)
        return receiver.owner if receiver and receiver.pages else NOBODY

    # --- legs -------------------------------------------------------------------------------------------------------

    def _leg(self, leg: LegArrived) -> None:
        taken = leg.rid in self._by_rid or leg.rid in self.batch.running
        if taken or leg.room in self.rooms.live or self.rooms.tombstone(leg.room, self.now):
            self.out.append(AnswerFailed(leg.rid, duplicate_room(leg.room, self.side)))
            self.count("duplicate_room")
            return
        if refusal := refuse(self, leg.prompt.tokens, self.waiting):
            self.answer_failed(leg.rid, leg.room, refusal)
            self.rooms.bury(leg.room, refusal, leg.rid, NO_GRANT, self.now)
            return
        receiver = Receiver(leg, self.now, self)
        self.rooms.live[leg.room] = receiver
        self._by_rid[leg.rid] = receiver
        self._waiting.add(leg.room)
        self.timers.set(("deadline", leg.room), leg.deadline)
        self.timers.set(("queue", leg.room), self.now + self.limits.queue_limit_s)
        self.note(leg.rid, leg.room, R.QUEUED)
        self._peers.seek(leg.address, leg.room, leg.dp_rank)

    def _cancel(self, rid: Rid, cause: Cause) -> None:
        if self.batch.cancel(rid, cause):
            return
        receiver = self._by_rid.get(rid)
        if receiver is None:
            self.count("late", "cancel")
            return
        receiver.apply(RE.CANCEL, cause=cause)

    def route_ok(self, room: Room, lanes: tuple[Lane, ...]) -> None:
        receiver = self.rooms.get(room)
        if receiver is None:
            return
        receiver.bind(lanes)
        if receiver.owes_abort:
            receiver.owed_abort()
        else:
            receiver.apply(RE.ROUTE_OK if self.policy == EARLY else RE.ROUTE_OK_AHEAD)

    def _ask_for_pages(self, receiver: Receiver) -> None:
        """It stands at the door from now on; where it was computed ahead, its wait for pages begins only now."""
        room = receiver.room
        self._allocating.add(room)
        self.door.push(receiver)
        self.timers.clear(("progress", room))
        if not self.timers.is_set(("queue", room)):
            self.timers.set(("queue", room), self.now + self.limits.queue_limit_s)

    def _wind_progress(self, room: Room) -> None:
        self.timers.set(("progress", room), self.now + self.limits.progress_limit_s)

    def route_bad(self, room: Room, cause: Cause) -> None:
        receiver = self.rooms.get(room)
        if receiver is None:
            return
        if receiver.owes_abort:
            receiver.owes_abort = False
            receiver.apply(RE.ABORT_LIMIT)
        else:
            receiver.apply(RE.ROUTE_BAD, cause=cause)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _ended(self, receiver: Receiver) -> None:
        """Entered Draining: no clock but the drain's runs on."""
        room = receiver.room
        for kind in ("deadline", "queue", "progress"):
            self.timers.clear((kind, room))
        if not self.timers.is_set(("drain", room)):
            limit = self.limits.drain_limit_s if receiver.pages else self.limits.peer_wait_s
            self.timers.set(("drain", room), self.now + limit)
        self.door.forget(receiver)
        self.reserve.drop(receiver.owner)

    def _gone(self, receiver: Receiver) -> None:
        room = receiver.room
        for kind in ("deadline", "queue", "progress", "drain"):
            self.timers.clear((kind, room))
        self.door.forget(receiver)
        self._progress.pop(room, None)
        self._by_rid.pop(receiver.rid, None)
        self._by_grant.pop(receiver.grant, None)
        self.members.forget(room)
        if not receiver.running:
            self.reserve.drop(receiver.owner)
        self.rooms.bury(room, receiver.cause, receiver.rid, receiver.grant, self.now)
        if receiver.cause is not None:
            self._owed.note(room, receiver.unconfirmed)

    def _operator_release(self, grant: GrantNo) -> None:
        receiver = self._by_grant.get(grant)
        if receiver is None:
            self.count("late", "operator_release")
            return
        receiver.apply(RE.OPERATOR_RELEASE)

    # --- peers ------------------------------------------------------------------------------------------------------

    def _frame(self, conn: ConnId, frame: Frame) -> None:
        link = self._peers.frame(conn, frame)
        if isinstance(frame, Beat):
            if link and frame.src == link.there.instance:
                self._peer_progress(link, frame)
        elif isinstance(frame, (Ready, Success, Failed, Drained)):
            if link is None or (frame.dst, frame.src, frame.rank) != (self.instance, *_named(link)):
                self.count("late", "identity")
            else:
                self._room_frame(link, frame)

    def _room_frame(self, link: Link, frame: FromPrefill) -> None:
        receiver = self.rooms.get(frame.room)
        if receiver is None:
            self._owed.latecomer(link, frame)
            return
        # A FAILED may have left before prefill saw the grant; nothing else proves for a grant that it does not name.
        known = (receiver.grant, NO_GRANT) if isinstance(frame, Failed) else (receiver.grant,)
        if link not in receiver.landed or frame.grant not in known:
            self.count("late", "grant")
        elif isinstance(frame, Ready):
            receiver.computed(link)
        elif isinstance(frame, Success):
            receiver.success(link, frame.row)
        elif isinstance(frame, Failed):
            receiver.apply(RE.PEER_FAILED, cause=frame.cause, link=link)
        else:
            receiver.drained(link)

    def tombstone(self, room: Room) -> Tombstone | None:
        return self.rooms.tombstone(room, self.now)

    def session_up(self, link: Link) -> None:
        """The frame of each room's state again, and what is owed for those that are over here."""
        for receiver in list(self.rooms.live.values()):
            receiver.session_up(link)
        self._owed.resync(link)

    def _landed(self, grant: GrantNo, link: Link, pages: tuple[PageId, ...]) -> None:
        receiver = self._granted_as(grant, "landed")
        if receiver is None:
            return
        if receiver.state is not R.GRANTED or link not in receiver.landed:
            self.count("late", "landed")
            return
        self._wind_progress(receiver.room)
        receiver.page_landed(link, set(pages).intersection(receiver.pages))

    def granted_as(self, grant: GrantNo) -> Receiver | None:
        """Whose grant this is, until its pages are free; None where it is nobody's (any more)."""
        return self._by_grant.get(grant)

    def _granted_as(self, grant: GrantNo, what: str) -> Receiver | None:
        receiver = self.granted_as(grant)
        if receiver is None:
            self.count("late", what)
        return receiver

    def _peer_progress(self, link: Link, beat: Beat) -> None:
        """A room that prefill still queues (-1), or has got further with, is not stuck."""
        for number, tokens in beat.progress.items():
            room = Room(number)
            receiver = self.rooms.get(room)
            if receiver is None or receiver.state not in (R.ANNOUNCED, R.GRANTED) or link not in receiver.landed:
                continue
            if tokens < 0 or self._progress.get(room) != tokens:
                self._progress[room] = tokens
                self._wind_progress(room)

    def unproven(self) -> set[Link]:
        ended = (receiver for receiver in self.rooms.live.values() if receiver.state in ENDED_STATES)
        return {link for receiver in ended for link in receiver.holders}

    def instance_gone(self, instance: Instance) -> None:
        text = f"prefill {instance} is gone: its session ended and did not come back"
        cause = Cause("peer_gone", text, 503, retryable=True, side="prefill")
        self.count("peer_gone")
        for receiver in list(self.rooms.live.values()):
            for link in receiver.links:
                if link.there.instance == instance and receiver.state in (*BOUND_STATES, *ENDED_STATES):
                    end = receiver.state not in ENDED_STATES
                    receiver.apply(RE.PEER_GONE, cause=cause if end else None, link=link)
        self.out.append(Teardown(instance, GrantNo(self._grants)))

    def audit(self) -> list[str]:
        return super().audit() + self.pages.audit(self._heads())

    def audit_all(self) -> list[str]:
        return super().audit_all() + self.pages.audit_all(self._heads())

    def _heads(self) -> Iterator[Sequence[PageId]]:
        """What each request shares, on its way or in the batch."""
        yield from (receiver.shared for receiver in self.rooms.live.values())
        yield from self.batch.heads

    def _beat(self) -> Beat:
        return Beat(src=self.instance, running=len(self.batch), waiting=self.waiting)


def _named(link: Link) -> tuple[Instance, Rank]:
    return link.there.instance, link.there.rank
