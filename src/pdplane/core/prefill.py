"""The prefill worker's core: rooms from leg or grant to SUCCESS, the queue for computing, and decode's sessions.

Prompts start in order of their grants, while credits and pages last: none free is back-pressure, not failure.
"""

from __future__ import annotations

from .admission import queue_full, refuse
from .effects import AnswerFailed, ConnectData, RunPrefill, SendFrame, Teardown
from .errors import Cause, deadline
from .events import (
    Accepted,
    Cancel,
    Computed,
    ConnLost,
    Drain,
    Event,
    FrameIn,
    LegArrived,
    LegRefused,
    MoveDone,
    Released,
    Sampled,
)
from .frames import Abort, Announce, Beat, Drained, Failed, Frame, Grant, Received, Row
from .ids import NO_GRANT, ConnId, GrantNo, Instance, MoveNo, Rank, Rid, Room
from .layout import pages_for
from .node import Limits, Node, TimerKey
from .pages import Owner, Page
from .queues import AdmissionQueue
from .rooms import Rooms, Tombstone
from .sender import Sender
from .session import NO_CONN, Acceptor, Gone, Identity, Notice, Up
from .table import SE, S

ToPrefillFrame = Announce | Grant | Abort | Received
QUEUED_MARK = -1  # in a beat: known, and not begun


class PrefillNode(Node):
    side = "prefill"

    def __init__(self, me: Identity, limits: Limits) -> None:
        super().__init__(limits)
        self.instance: Instance = me.instance
        self.rank: Rank = me.rank
        self.rooms: Rooms[Sender] = Rooms(limits.tombstone_s)
        self.sessions = Acceptor(me, limits.session, self.out, self._beat)
        self._queue: AdmissionQueue[Sender] = AdmissionQueue(limits.max_overtakes)
        self._by_rid: dict[Rid, Sender] = {}
        self._by_move: dict[MoveNo, Sender] = {}
        self._waiting: set[Room] = set()
        self._orphans: set[Room] = set()  # asked for by a decode, without a leg
        self._moves = 0
        self.computing = 0  # prompts that the engine has

    # --- Desk -------------------------------------------------------------------------------------------------------

    @property
    def node(self) -> Node:
        return self

    def next_move(self, sender: Sender) -> MoveNo:
        self._moves += 1
        number = MoveNo(self._moves)
        self._by_move[number] = sender
        return number

    def session_up(self, peer: Instance) -> bool:
        return self.sessions.conn_of(peer) != NO_CONN

    def send(self, peer: Instance, frame: Frame) -> bool:
        conn = self.sessions.conn_of(peer)
        if conn == NO_CONN:
            return False
        self.out.append(SendFrame(conn, frame))
        return True

    def settled(self, sender: Sender) -> None:
        """Clocks and queues follow the machine's state."""
        room, state, limits = sender.room, sender.state, self.limits
        for rooms, states in ((self._waiting, (S.WAITING, S.ARMED)), (self._orphans, (S.ORPHAN,))):
            if state in states:
                rooms.add(room)
            else:
                rooms.discard(room)
        if state in (S.ORPHAN, S.WAITING):
            kind = "leg" if state is S.ORPHAN else "announce"
            self._swap_clock(room, kind, None if sender.peer and kind == "announce" else self.now + limits.peer_wait_s)
        elif state is S.ARMED:
            self._swap_clock(room, "armed", None)
            if sender not in self._queue:
                self._queue.push(sender, sender.leg.priority if sender.leg else 0)
        elif state is S.SENT:
            self._swap_clock(room, "row", self.now + limits.row_ttl_s)
            self.timers.clear(("deadline", room))
        elif state is S.DRAINING:
            if not sender.quarantined:
                self._swap_clock(room, "drain", self.now + limits.drain_limit_s)
            self.timers.clear(("deadline", room))
        elif state is S.GONE:
            self._gone(sender)

    # --- events -----------------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        return len(self.rooms.live)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _event(self, event: Event) -> None:
        match event:
            case FrameIn(conn, frame):
                self._frame(conn, frame)
            case Computed(rid=rid, tokens=tokens):
                if sender := self._by_rid.get(rid):
                    sender.chunk(tokens)
            case Sampled():
                self._sampled(event)
            case Released(rid=rid, error=error):
                self._released(rid, error)
            case MoveDone(move, error):
                if sender := self._by_move.pop(move, None):
                    sender.move_done(move, error)
            case LegArrived():
                self._leg(event)
            case LegRefused(room=room, cause=cause):
                self._leg_refused(room, cause)
            case Cancel(rid, cause):
                self._cancel(rid, cause)
            case Accepted(conn):
                self.sessions.accepted(conn, self.now)
            case ConnLost(conn):
                self.sessions.lost(conn, self.now)
            case Drain(reason):
                self.draining = reason
            case _:
                self.count("late", type(event).__name__)

    def _due(self, key: TimerKey) -> None:
        kind, name = key
        sender = self.rooms.get(Room(name)) if isinstance(name, int) else None
        if sender is None or kind == "sessions":
            return
        waited = self.now - sender.arrived_at
        if kind == "deadline":
            sender.apply(SE.CANCEL, cause=deadline(self.side, waited))
        elif kind == "leg":
            text = f"decode granted room {sender.room}, and no prefill leg came within {waited:.0f} s"
            sender.apply(SE.CANCEL, cause=Cause("no_leg", text, 504, retryable=True, side=self.side))
        elif kind == "announce":
            text = f"no decode asked for room {sender.room} within {waited:.0f} s"
            sender.apply(SE.CANCEL, cause=Cause("no_decode", text, 504, retryable=True, side=self.side))
        elif kind == "row":
            sender.apply(SE.TTL)
        elif kind == "drain":
            sender.apply(SE.DRAIN_LIMIT)

    def _after(self) -> None:
        self._notices(self.sessions.tick(self.now))
        while self.computing < self.limits.max_running:
            sender = self._queue.pop_fitting(self._fits, self.ledger.free_count)
            if sender is None:
                break
            self._start(sender)
        due = self.sessions.next_due()
        if due is not None:
            self.timers.set(("sessions", 0), due)

    # --- legs -------------------------------------------------------------------------------------------------------

    def _leg(self, leg: LegArrived) -> None:
        sender = self.rooms.get(leg.room)
        stone = self.rooms.tombstone(leg.room, self.now)
        if (sender and sender.leg) or (stone and stone.rid) or leg.rid in self._by_rid:
            text = f"room {leg.room} is in use or was used; every attempt needs a room and a rid of its own"
            self.out.append(AnswerFailed(leg.rid, Cause("duplicate_room", text, 409, side=self.side)))
            self.count("duplicate_room")
            return
        if stone and stone.cause:  # cancelled before it arrived: the verdict is there already
            self.answer_failed(leg.rid, leg.room, stone.cause)
            self.rooms.bury(leg.room, stone.cause, leg.rid, stone.grant, self.now)
            return
        if refusal := refuse(self, leg.prompt.tokens, self.waiting):
            self.answer_failed(leg.rid, leg.room, refusal)
            self._leg_refused(leg.room, refusal, leg.rid)
            return
        sender = sender or self._open(leg.room)
        self._by_rid[leg.rid] = sender
        self.timers.set(("deadline", leg.room), leg.deadline)
        self.note(leg.rid, leg.room, "Queued")
        sender.leg_in(leg)

    def _leg_refused(self, room: Room, cause: Cause, rid: Rid | None = None) -> None:
        """Tell decode now if it has asked, else as soon as it does. A room that has its leg is not touched."""
        sender = self.rooms.get(room)
        if sender is None and self.rooms.tombstone(room, self.now) is None:
            self.rooms.bury(room, cause, rid, NO_GRANT, self.now)
        elif sender is not None and sender.leg is None:
            sender.apply(SE.CANCEL, cause=cause)

    def _cancel(self, rid: Rid, cause: Cause) -> None:
        if sender := self._by_rid.get(rid):
            sender.apply(SE.CANCEL, cause=cause)
        else:
            self.count("late", "cancel")

    def _open(self, room: Room) -> Sender:
        sender = Sender(room, self.now, self)
        self.rooms.live[room] = sender
        return sender

    # --- computing --------------------------------------------------------------------------------------------------

    def _fits(self, sender: Sender) -> bool:
        return self._need(sender) <= self.ledger.free_count

    def _need(self, sender: Sender) -> int:
        assert sender.leg is not None
        return pages_for(sender.leg.prompt.tokens, self.limits.page_size)

    def _start(self, sender: Sender) -> None:
        assert sender.rid is not None
        pages = self.ledger.take(self._need(sender), Page.COMPUTING, Owner(sender.rid))
        self.out.append(RunPrefill(sender.rid, pages))
        self.computing += 1
        sender.start(pages)

    def _released(self, rid: Rid, error: str) -> None:
        sender = self._by_rid.get(rid)
        if sender is None or not sender.in_engine:
            self.count("late", "released")
            return
        self.computing -= 1
        sender.released(error)

    def _sampled(self, event: Sampled) -> None:
        sender = self._by_rid.get(event.rid)
        if sender is None or sender.leg is None or sender.state is not S.STREAMING:
            self.count("late", "sampled")
            return
        prompt = sender.leg.prompt
        sender.sampled(
            Row(
                first_token=event.token,
                prompt_tokens=prompt.tokens,
                prompt_digest=prompt.digest,
                cached_tokens=event.cached_tokens,
                logprob=event.logprob,
                top_logprobs=event.top_logprobs,
                finish_reason=event.ended,
            )
        )

    def _gone(self, sender: Sender) -> None:
        for kind in ("deadline", "leg", "announce", "row", "drain"):
            self.timers.clear((kind, sender.room))
        self._queue.remove(sender)
        if sender.rid:
            self._by_rid.pop(sender.rid, None)
        self.rooms.bury(sender.room, sender.cause, sender.rid, sender.grant_no, self.now)

    def _swap_clock(self, room: Room, kind: str, due: float | None) -> None:
        """At most one of the waiting clocks runs; one that runs already is not wound up again."""
        for other in ("leg", "announce", "row", "drain"):
            if other != kind or due is None:
                self.timers.clear((other, room))
        if due is not None and not self.timers.is_set((kind, room)):
            self.timers.set((kind, room), due)

    # --- peers ------------------------------------------------------------------------------------------------------

    def _frame(self, conn: ConnId, frame: Frame) -> None:
        self._notices(self.sessions.frame(conn, frame, self.now))
        if not isinstance(frame, (Announce, Grant, Abort, Received)):
            return
        peer = self.sessions.peer_of(conn)
        if peer is None:
            return
        if (frame.dst, frame.src, frame.rank) != (self.instance, peer, self.rank):
            self.count("late", "identity")
            if frame.dst != self.instance:
                self.sessions.reject(conn, frame.dst, self.now)
            return
        self._room_frame(peer, frame)

    def _room_frame(self, peer: Instance, frame: ToPrefillFrame) -> None:
        sender = self.rooms.get(frame.room)
        if sender is None:
            stone = self.rooms.tombstone(frame.room, self.now)
            if stone is not None:
                self._from_the_grave(peer, frame, stone)
                return
            if isinstance(frame, Received):
                self.count("late", "received")
                return
            if len(self._orphans) >= self.limits.max_queue and not isinstance(frame, Abort):
                self._answer(peer, frame, queue_full(self))  # a decode that asks without end costs no memory
                return
            sender = self._open(frame.room)
        if sender.peer not in (None, peer):
            self._not_theirs(peer, frame)
        elif isinstance(frame, (Abort, Received)) and sender.grant and sender.grant.grant != frame.grant:
            self.count("late", "grant")
        elif isinstance(frame, Grant) and sender.grant and sender.grant.grant != frame.grant:
            self._answer(peer, frame, duplicate(frame.room, f"it has grant {sender.grant.grant}"))
        elif isinstance(frame, Grant):
            sender.granted(frame)
        elif isinstance(frame, Announce):
            sender.announced(frame)
        elif isinstance(frame, Abort):
            sender.aborted(frame)
        else:
            sender.apply(SE.RECEIVED)

    def _not_theirs(self, peer: Instance, frame: ToPrefillFrame) -> None:
        """Another decode has this room: the second is told, and nothing was ever written for it."""
        self.count("duplicate_room")
        if isinstance(frame, (Announce, Grant)):
            self._answer(peer, frame, duplicate(frame.room, "another decode has asked for it"))
        elif isinstance(frame, Abort):
            self._drained(peer, frame.room, frame.grant)

    def _from_the_grave(self, peer: Instance, frame: ToPrefillFrame, stone: Tombstone) -> None:
        """The room is over here: whoever asks is told so, with the proof that nothing will be written."""
        self.count("late", type(frame).__name__.lower())
        if isinstance(frame, (Announce, Grant)):
            self._answer(peer, frame, stone.cause or duplicate(frame.room, "it is over"))
        elif isinstance(frame, Abort):
            self._drained(peer, frame.room, frame.grant)

    def _answer(self, peer: Instance, frame: ToPrefillFrame, cause: Cause) -> None:
        room, grant = frame.room, frame.grant
        self.send(peer, Failed(room=room, grant=grant, src=self.instance, dst=peer, rank=self.rank, cause=cause))
        self._drained(peer, room, grant)

    def _drained(self, peer: Instance, room: Room, grant: GrantNo) -> None:
        self.send(peer, Drained(room=room, grant=grant, src=self.instance, dst=peer, rank=self.rank))

    def _notices(self, notices: list[Notice]) -> None:
        for notice in notices:
            if isinstance(notice, Up):
                self._peer_up(notice.seat.instance)
            elif isinstance(notice, Gone):
                self._peer_gone(notice.instance)

    def _peer_up(self, peer: Instance) -> None:
        hello = self.sessions.hello_of(peer)
        if hello is not None:
            self.out.append(ConnectData(peer, hello.data_host, hello.data_port, hello.data_token))
        for sender in list(self.rooms.live.values()):
            if sender.peer == peer:
                sender.resume()

    def _peer_gone(self, peer: Instance) -> None:
        self.count("peer_gone")
        text = f"decode {peer} is gone: its session ended and did not come back"
        for sender in list(self.rooms.live.values()):
            if sender.peer == peer:
                sender.apply(SE.PEER_GONE, cause=Cause("peer_gone", text, 503, retryable=True, side="decode"))
        self.out.append(Teardown(peer))

    def _beat(self, peer: Instance) -> Beat:
        """Progress of each room of this peer: tokens computed and pages moved, or the mark of one that waits."""
        progress = {
            int(room): QUEUED_MARK if sender.state in (S.WAITING, S.ARMED) else sender.computed + sender.moved
            for room, sender in self.rooms.live.items()
            if sender.peer == peer and sender.state in (S.WAITING, S.ARMED, S.STREAMING, S.FLUSHING)
        }
        return Beat(src=self.instance, running=self.computing, waiting=self.waiting, progress=progress)


def duplicate(room: Room, why: str) -> Cause:
    return Cause("duplicate_room", f"room {room} is taken: {why}", 409, side="prefill")
