"""The prefill worker's core: rooms from leg or grant to SUCCESS, the queue for computing, and decode's sessions.

Prompts start in order of their grants (early) or legs (prefill_complete), while credits and pages last: none free is
back-pressure, not failure. What is computed ahead of its grant is held under a term, and may fill a part of the pool
only: held KV waits for decode, and must not starve what decode has granted already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..acceptor import Acceptor
from ..admission import queue_full, refuse
from ..effects import AnswerFailed, ConnectData, RunPrefill, SendFrame, Teardown
from ..errors import Cause, deadline, duplicate_room
from ..events import (
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
from ..frames import Abort, Announce, Beat, Frame, Grant, Received, Row
from ..ids import NO_GRANT, ConnId, Instance, Link, MoveNo, PageId, Rid, Room
from ..layout import PREFILL_COMPLETE
from ..node import Limits, Node, TimerKey
from ..pages import Owner, Page
from ..prompt_pages import PromptPages
from ..queues import AdmissionQueue
from ..session import NO_CONN, Gone, Identity, Notice, Up
from .book import Rooms
from .holds import Holds
from .reception import FromDecode, Reception, duplicate
from .sender import Sender
from .table import SE, S

QUEUED_MARK = -1  # in a beat: known, and not begun
WORKING = (S.WAITING, S.ARMED, S.AHEAD, S.HELD, S.STREAMING, S.FLUSHING)
CLOCKS = ("leg", "announce", "hold", "row", "drain")


class PrefillNode(Node):
    side = "prefill"

    def __init__(self, me: Identity, limits: Limits) -> None:
        super().__init__(limits)
        self.instance: Instance = me.instance
        self.ahead = me.stamp.policy == PREFILL_COMPLETE
        self._pages = PromptPages(self.ledger, limits)
        self.rooms: Rooms[Sender] = Rooms(limits.tombstone_s)
        self.sessions = Acceptor(me, limits.session, self.out, self._beat)
        self._queue: AdmissionQueue[Sender] = AdmissionQueue(limits.max_overtakes)
        self._by_rid: dict[Rid, Sender] = {}
        self._by_move: dict[MoveNo, Sender] = {}
        self._waiting: set[Room] = set()
        self._orphans: set[Room] = set()  # asked for by a decode, without a leg
        self._holds = Holds(limits.held_pages or self.ledger.capacity // 2, limits.hold_term_s)
        self._reception = Reception(self, me)
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

    def conn_of(self, link: Link) -> ConnId:
        return self.sessions.conn_of(link)

    def send(self, link: Link, frame: Frame) -> bool:
        conn = self.sessions.conn_of(link)
        if conn == NO_CONN:
            return False
        self.out.append(SendFrame(conn, frame))
        return True

    def hold_left_s(self, sender: Sender) -> float:
        return self._holds.left_s(sender.room, self.now)

    def keep(self, sender: Sender, state: Page) -> None:
        assert sender.leg is not None
        self._pages.keep(sender.prompt, sender.pages, sender.shared, Owner(sender.leg.rid), state)

    def release(self, sender: Sender) -> None:
        self._pages.release(sender.pages[: sender.shared])

    def settled(self, sender: Sender) -> None:
        """Clocks and queues follow the machine's state."""
        room, state, limits = sender.room, sender.state, self.limits
        for rooms, states in ((self._waiting, (S.WAITING, S.ARMED)), (self._orphans, (S.ORPHAN,))):
            if state in states:
                rooms.add(room)
            else:
                rooms.discard(room)
        if state not in (S.AHEAD, S.HELD):
            self._holds.granted(room)
        if state in (S.ARMED, S.WAITING) and (self.ahead or state is S.ARMED):
            self._enqueue(sender)
        if state is S.ORPHAN:
            self._swap_clock(room, "leg", self.now + limits.peer_wait_s)
        elif state in (S.WAITING, S.AHEAD):
            if sender.peer:
                self._stop_clocks(room)
            else:
                self._swap_clock(room, "announce", self.now + limits.peer_wait_s)
        elif state is S.HELD:
            self._hold(sender)
        elif state is S.SENT:
            self._swap_clock(room, "row", self.now + limits.row_ttl_s)
            self.timers.clear(("deadline", room))
        elif state is S.DRAINING:
            if not sender.quarantined:
                self._swap_clock(room, "drain", self.now + limits.drain_limit_s)
            self.timers.clear(("deadline", room))
        elif state is S.GONE:
            self._gone(sender)
        else:
            self._stop_clocks(room)

    def _hold(self, sender: Sender) -> None:
        """The term runs once; beside it, as long as no decode has asked, the clock for its first word."""
        room = sender.room
        self.timers.set(("hold", room), self._holds.hold(room, self.now))
        if sender.peer:
            self.timers.clear(("announce", room))

    def _enqueue(self, sender: Sender) -> None:
        if sender not in self._queue:
            self._queue.push(sender, sender.leg.priority if sender.leg else 0)

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
            case Accepted(conn, here):
                self.sessions.accepted(conn, here, self.now)
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
        elif kind == "hold":
            text = f"decode did not grant room {sender.room} within {self.limits.hold_term_s:g} s of its KV being held"
            sender.apply(SE.HOLD_END, cause=Cause("hold_expired", text, 503, retryable=True, side="decode"))
        elif kind == "drain":
            sender.apply(SE.DRAIN_LIMIT)

    def _after(self) -> None:
        self._notices(self.sessions.tick(self.now))
        while self.computing < self.limits.max_running:
            sender = self._queue.pop_fitting(self._fits, (self._pages.stamp, self._holds.pages))
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
            self.out.append(AnswerFailed(leg.rid, duplicate_room(leg.room, self.side)))
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
        """There are pages; and, ahead of a grant, they are within the cap of what may be held."""
        prompt = sender.prompt
        if sender.state is S.WAITING:
            own = self._pages.need(prompt) - self._pages.hits(prompt)
            if not self._holds.has_room(own):
                return False
        return self._pages.fits(prompt)

    def _start(self, sender: Sender) -> None:
        assert sender.leg is not None
        pages, shared = taken = self._pages.take(sender.prompt, Page.COMPUTING, Owner(sender.leg.rid))
        self.out.append(RunPrefill(sender.leg.rid, pages, shared * self.limits.page_size))
        self.computing += 1
        sender.start(pages, shared)
        if sender.state is S.AHEAD:
            self._holds.start(sender.room, taken.own)

    def _released(self, rid: Rid, error: str) -> None:
        sender = self._by_rid.get(rid)
        if sender is None or not sender.in_engine:
            self.count("late", "released")
            return
        self.computing -= 1
        sender.released(error)

    def _sampled(self, event: Sampled) -> None:
        sender = self._by_rid.get(event.rid)
        if sender is None or sender.leg is None or sender.state not in (S.STREAMING, S.AHEAD):
            self.count("late", "sampled")
            return
        prompt = sender.leg.prompt
        sender.sampled(
            Row(
                first_token=event.token,
                prompt_tokens=prompt.tokens,
                prompt_digest=prompt.digest,
                cached_tokens=sender.cached_tokens,
                logprob=event.logprob,
                top_logprobs=event.top_logprobs,
                finish_reason=event.ended,
            )
        )

    def _gone(self, sender: Sender) -> None:
        for kind in ("deadline", *CLOCKS):
            self.timers.clear((kind, sender.room))
        self._holds.forget(sender.room)
        self._queue.remove(sender)
        if sender.rid:
            self._by_rid.pop(sender.rid, None)
        self.rooms.bury(sender.room, sender.cause, sender.rid, sender.grant_no, self.now)

    def _swap_clock(self, room: Room, kind: str, due: float) -> None:
        """One of the waiting clocks runs; one that runs already is not wound up again."""
        for other in CLOCKS:
            if other != kind:
                self.timers.clear((other, room))
        if not self.timers.is_set((kind, room)):
            self.timers.set((kind, room), due)

    def _stop_clocks(self, room: Room) -> None:
        for kind in CLOCKS:
            self.timers.clear((kind, room))

    # --- peers ------------------------------------------------------------------------------------------------------

    def _frame(self, conn: ConnId, frame: Frame) -> None:
        self._notices(self.sessions.frame(conn, frame, self.now))
        if not isinstance(frame, (Announce, Grant, Abort, Received)):
            return
        link = self.sessions.link_of(conn)
        if link is None:
            return
        if (frame.dst, frame.src, frame.rank) != (self.instance, link.there.instance, link.here):
            self.count("late", "identity")
            if frame.dst != self.instance:
                self.sessions.reject(conn, frame.dst, self.now)
            return
        self._room_frame(link, frame)

    def _room_frame(self, link: Link, frame: FromDecode) -> None:
        sender = self.rooms.get(frame.room)
        if sender is None:
            stone = self.rooms.tombstone(frame.room, self.now)
            if stone is not None:
                self._reception.over(link, frame, stone)
                return
            if isinstance(frame, Received):
                self.count("late", "received")
                return
            if isinstance(frame, Grant) and (wrong := self._reception.ill_formed(link, frame)):
                self._reception.refuse(link, frame, wrong)
                return
            if len(self._orphans) >= self.limits.max_queue and not isinstance(frame, Abort):
                self._reception.refuse(link, frame, queue_full(self))  # a decode that asks without end costs no memory
                return
            sender = self._open(frame.room)
        grant = sender.grant
        if sender.peer not in (None, link.there.instance):
            self._reception.not_theirs(link, frame)
        elif isinstance(frame, (Abort, Received)) and grant and grant.grant != frame.grant:
            self.count("late", "grant")
        elif isinstance(frame, Grant):
            if grant and grant.grant != frame.grant:
                self._reception.refuse(link, frame, duplicate(frame.room, f"it has grant {grant.grant}"))
            elif wrong := self._reception.ill_formed(link, frame):
                self._reception.refuse(link, frame, wrong)
            else:
                sender.grant_in(link, frame)
        elif isinstance(frame, Announce):
            sender.announced(link, frame)
        elif isinstance(frame, Abort):
            sender.aborted(link, frame)
        else:
            sender.apply(SE.RECEIVED)

    def _notices(self, notices: list[Notice]) -> None:
        for notice in notices:
            if isinstance(notice, Up):
                self._link_up(notice)
            elif isinstance(notice, Gone):
                self._peer_gone(notice.instance)

    def _link_up(self, up: Up) -> None:
        """Rooms go on when their GRANT is said again: decode may have given some of them up meanwhile."""
        self._reception.met(up.link, up.shape)
        self.out.append(ConnectData(up.link, up.endpoint, up.slice))

    def _peer_gone(self, peer: Instance) -> None:
        self.count("peer_gone")
        text = f"decode {peer} is gone: its session ended and did not come back"
        for sender in list(self.rooms.live.values()):
            if sender.peer == peer:
                sender.apply(SE.PEER_GONE, cause=Cause("peer_gone", text, 503, retryable=True, side="decode"))
        self._reception.parted(peer)
        self.out.append(Teardown(peer))

    def _beat(self, peer: Instance) -> Beat:
        """Progress of each room of this peer: tokens computed and pages moved, or the mark of one that waits."""
        progress = {
            int(room): QUEUED_MARK if sender.state in (S.WAITING, S.ARMED) else sender.computed + sender.sending
            for room, sender in self.rooms.live.items()
            if sender.peer == peer and sender.state in WORKING
        }
        return Beat(src=self.instance, running=self.computing, waiting=self.waiting, progress=progress)

    def audit(self) -> list[str]:
        return super().audit() + self._pages.audit(self._heads())

    def audit_all(self) -> list[str]:
        return super().audit_all() + self._pages.audit_all(self._heads())

    def _heads(self) -> Iterator[Sequence[PageId]]:
        """What each room shares."""
        return (sender.pages[: sender.shared] for sender in self.rooms.live.values())
