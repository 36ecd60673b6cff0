"""The decode worker's core: rooms from leg to batch, admission, and the sessions with its prefills.

Order of work after every event: sessions' clocks, then growth of what runs, then finished hand-offs into the batch,
then admission (I14: what is finished is harvested before anything new is let in).
"""

from __future__ import annotations

from .admission import queue_full, refuse
from .batch import Batch
from .door import Door
from .effects import AnswerFailed, SendFrame, Teardown
from .errors import Cause, deadline
from .events import (
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
    Released,
    RouteFailed,
    RouteKnown,
)
from .frames import Abort, Beat, Drained, Failed, Frame, Received, Success
from .ids import NO_GRANT, ConnId, GrantNo, Instance, PageId, Rid, Room, Seat
from .membership import Membership
from .node import Limits, Node, TimerKey
from .pages import NOBODY, Owner
from .receiver import Receiver
from .reserve import Reserve
from .rooms import Rooms
from .session import Dialler, Gone, Identity, Notice, Refused, Up
from .table import RE, R

ENDED_STATES = (R.DRAINING, R.QUARANTINE)


class DecodeNode(Node):
    """`fence`: the transport is receiver-placed, so that revoking a grant here is a proof."""

    side = "decode"

    def __init__(self, me: Identity, limits: Limits, *, fence: bool) -> None:
        super().__init__(limits)
        self.instance: Instance = me.instance
        self.fence = fence
        self.rooms: Rooms[Receiver] = Rooms(limits.tombstone_s)
        self.reserve = Reserve(self.ledger)
        self.batch = Batch(self, self.reserve)
        self.members = Membership(me, limits.session, self.out, self._beat)
        self.door = Door(self, self.reserve, self.batch)
        self._waiting: set[Room] = set()
        self._owed: dict[Seat, dict[Room, None]] = {}  # rooms over here, which that seat has not confirmed
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

    def send(self, seat: Seat, frame: Frame) -> bool:
        conn = self.members.conn(seat)
        if conn is None:
            return False
        self.out.append(SendFrame(conn, frame))
        return True

    def settled(self, receiver: Receiver) -> None:
        """Clocks and queues follow the machine's state."""
        room, state = receiver.room, receiver.state
        if state not in (R.QUEUED, R.ALLOCATING):
            self._waiting.discard(room)
        if state is R.GRANTED:
            self.timers.clear(("queue", room))
        elif state is R.SUCCESS:
            self.door.arrived(receiver)
            self.timers.clear(("progress", room))
            # Its place was safe when it was admitted, but pages that were counted on may have gone into quarantine.
            self.timers.set(("queue", room), self.now + self.limits.queue_limit_s)
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
            case PagesLanded(grant, pages):
                self._landed(grant, pages)
            case Computed(rid=rid, tokens=tokens):
                self.batch.computed(rid, tokens)
            case Released(rid=rid, error=error):
                self.batch.released(rid, error)
            case LegArrived():
                self._leg(event)
            case Cancel(rid, cause):
                self._cancel(rid, cause)
            case GrantQuiet(grant):
                self._quiet(grant)
            case RouteKnown():
                self.members.known(event, self.now)
            case RouteFailed(address, cause):
                self._route_bad(self.members.failed(address), cause)
            case Dialled(endpoint, conn):
                self._notices(self.members.diallers[endpoint], self.members.diallers[endpoint].dialled(conn, self.now))
            case DialFailed(endpoint, error):
                dialler = self.members.diallers[endpoint]
                self._notices(dialler, dialler.dial_failed(error, self.now))
            case ConnLost(conn):
                if dialler_of := self.members.by_conn(conn):
                    self._notices(dialler_of, dialler_of.lost(self.now))
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
        if kind == "owed" and isinstance(name, Seat):
            self._owed.pop(name, None)
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
        for dialler, notice in self.members.tick(self.now):
            self._notices(dialler, [notice])
        for room, seats in self.members.ready():
            self._route_ok(room, seats)
        self.batch.grow()
        self.door.harvest()
        for receiver in self.door.admit(self.next_grant):
            self._by_grant[receiver.grant] = receiver
            self.timers.set(("progress", receiver.room), self.now + self.limits.progress_limit_s)
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
            text = f"room {leg.room} is in use or was used; every attempt needs a room and a rid of its own"
            self.out.append(AnswerFailed(leg.rid, Cause("duplicate_room", text, 409, side=self.side)))
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
        if seats := self.members.seek(leg.address, leg.room):
            self._route_ok(leg.room, seats)

    def _cancel(self, rid: Rid, cause: Cause) -> None:
        if self.batch.cancel(rid, cause):
            return
        receiver = self._by_rid.get(rid)
        if receiver is None:
            self.count("late", "cancel")
            return
        receiver.apply(RE.CANCEL, cause=cause)

    def _route_ok(self, room: Room, seats: tuple[Seat, ...]) -> None:
        receiver = self.rooms.get(room)
        if receiver is None:
            return
        receiver.bind(seats)
        if receiver.owes_abort:
            receiver.owed_abort()
            return
        receiver.apply(RE.ROUTE_OK)
        self.door.push(receiver)

    def _route_bad(self, rooms: list[Room], cause: Cause) -> None:
        for room in rooms:
            if receiver := self.rooms.get(room):
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
        if receiver.pages == () or receiver.cause is not None:
            self.reserve.drop(receiver.owner)
        self.rooms.bury(room, receiver.cause, receiver.rid, receiver.grant, self.now)
        if receiver.cause is not None:
            for seat in receiver.unconfirmed:
                self._owed.setdefault(seat, {})[room] = None
                self.timers.set(("owed", seat), self.now + self.limits.tombstone_s)

    def _operator_release(self, grant: GrantNo) -> None:
        receiver = self._by_grant.get(grant)
        if receiver is None:
            self.count("late", "operator_release")
            return
        receiver.apply(RE.OPERATOR_RELEASE)

    # --- peers ------------------------------------------------------------------------------------------------------

    def _frame(self, conn: ConnId, frame: Frame) -> None:
        dialler = self.members.by_conn(conn)
        if dialler is None:
            self.count("late", "frame")
            return
        self._notices(dialler, dialler.frame(frame, self.now))
        seat = dialler.bound if dialler.up else None
        if isinstance(frame, Beat):
            if seat and frame.src == seat.instance:
                self._peer_progress(seat, frame)
        elif isinstance(frame, (Success, Failed, Drained)):
            if seat is None or (frame.dst, frame.src, frame.rank) != (self.instance, seat.instance, seat.rank):
                self.count("late", "identity")
            else:
                self._room_frame(seat, frame)

    def _room_frame(self, seat: Seat, frame: Success | Failed | Drained) -> None:
        receiver = self.rooms.get(frame.room)
        if receiver is None:
            self._latecomer(seat, frame)
            return
        # A FAILED may have left before prefill saw the grant; nothing else proves for a grant that it does not name.
        known = (receiver.grant, NO_GRANT) if isinstance(frame, Failed) else (receiver.grant,)
        if seat not in receiver.seats or frame.grant not in known:
            self.count("late", "grant")
            return
        if isinstance(frame, Success):
            receiver.success(seat, frame.row)
        elif isinstance(frame, Failed):
            receiver.apply(RE.PEER_FAILED, cause=frame.cause, seat=seat)
        else:
            receiver.drained(seat)

    def _latecomer(self, seat: Seat, frame: Success | Failed | Drained) -> None:
        """For a room that is over. Prefill that still holds a row is told what became of it."""
        owed = self._owed.get(seat, {})
        if not isinstance(frame, Failed) and frame.room in owed:
            del owed[frame.room]
        else:
            self.count("late", type(frame).__name__.lower())
        stone = self.rooms.tombstone(frame.room, self.now)
        if stone is None or not isinstance(frame, Success):
            return
        room, grant = frame.room, frame.grant
        if stone.cause is None:
            self.send(seat, Received(room=room, grant=grant, src=self.instance, dst=seat.instance, rank=seat.rank))
        else:
            self._abort_again(seat, room, grant, stone.cause)

    def _abort_again(self, seat: Seat, room: Room, grant: GrantNo, cause: Cause) -> None:
        frame = Abort(room=room, grant=grant, src=self.instance, dst=seat.instance, rank=seat.rank, cause=cause)
        self.send(seat, frame)

    def _resync(self, seat: Seat) -> None:
        """The frame of each room's state again. Rooms that are over here (a closed fence needs nobody's word) and may
        not be over there are aborted: a terminal status always crosses (rule 1)."""
        for receiver in list(self.rooms.live.values()):
            receiver.session_up(seat)
        for room in list(self._owed.get(seat, ())):
            stone = self.rooms.tombstone(room, self.now)
            if stone is not None and stone.cause is not None:
                self._abort_again(seat, room, stone.grant, stone.cause)

    def _landed(self, grant: GrantNo, pages: tuple[PageId, ...]) -> None:
        receiver = self._by_grant.get(grant)
        if receiver is None:
            self.count("late", "landed")
            return
        if receiver.state is not R.GRANTED:
            self.count("late", "landed")
            return
        self.timers.set(("progress", receiver.room), self.now + self.limits.progress_limit_s)
        receiver.page_landed(set(pages).intersection(receiver.pages))

    def _quiet(self, grant: GrantNo) -> None:
        if receiver := self._by_grant.get(grant):
            receiver.fenced()
        else:
            self.count("late", "quiet")

    def _peer_progress(self, seat: Seat, beat: Beat) -> None:
        """A room that prefill still queues (-1), or has got further with, is not stuck."""
        for number, tokens in beat.progress.items():
            room = Room(number)
            receiver = self.rooms.get(room)
            if receiver is None or receiver.state is not R.GRANTED or seat not in receiver.seats:
                continue
            if tokens < 0 or self._progress.get(room) != tokens:
                self._progress[room] = tokens
                self.timers.set(("progress", room), self.now + self.limits.progress_limit_s)

    def _notices(self, dialler: Dialler, notices: list[Notice]) -> None:
        for notice in notices:
            match notice:
                case Up(seat):
                    self._resync(seat)
                case Gone(instance):
                    self._instance_gone(instance)
                    self.members.want_waiting(self.now)
                    self._chase(dialler)
                case Refused(cause):
                    self._route_bad(self.members.refused(dialler.endpoint), cause)
                    self._chase(dialler)

    def _chase(self, dialler: Dialler) -> None:
        """A peer that froze may come back: while its proof is missing, keep asking. A successor ends the search."""
        ended = [receiver for receiver in self.rooms.live.values() if receiver.state in ENDED_STATES]
        if any(dialler.was in receiver.holders for receiver in ended):
            dialler.want(self.now)

    def _instance_gone(self, instance: Instance) -> None:
        text = f"prefill {instance} is gone: its session ended and did not come back"
        cause = Cause("peer_gone", text, 503, retryable=True, side="prefill")
        self.count("peer_gone")
        self.out.append(Teardown(instance))
        for receiver in list(self.rooms.live.values()):
            for seat in receiver.seats:
                if seat.instance == instance and receiver.state in (R.ALLOCATING, R.GRANTED, *ENDED_STATES):
                    end = receiver.state not in ENDED_STATES
                    receiver.apply(RE.PEER_GONE, cause=cause if end else None, seat=seat)

    def _beat(self) -> Beat:
        return Beat(src=self.instance, running=len(self.batch), waiting=self.waiting)
