"""Two machines facing each other: decode and prefill nodes on one virtual clock, FIFO frames, scripted outcomes.

Nothing happens by itself: a test delivers frames (`pump`), computes (`compute`, `sample`, `release`), lands moves
(`land`) and passes time (`wait`). What was asked of shells is kept in the node's `log`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeVar

from pdplane.core.effects import (
    AnswerFailed,
    AnswerRow,
    ArmGrant,
    CloseConn,
    Count,
    Dial,
    DisarmGrant,
    Effect,
    LookUp,
    LookUpRank,
    MovePages,
    RevokeGrant,
    SendFrame,
    Teardown,
)
from pdplane.core.errors import Cause, client_left
from pdplane.core.events import (
    Accepted,
    Cancel,
    Computed,
    ConnLost,
    ControlEndpoint,
    DialFailed,
    Dialled,
    Event,
    FrameIn,
    GrantQuiet,
    LegArrived,
    MoveDone,
    PagesLanded,
    RankKnown,
    Released,
    RouteFailed,
    RouteKnown,
    Sampled,
    Tick,
    TornDown,
)
from pdplane.core.frames import Beat, DataEndpoint, Frame, PromptId
from pdplane.core.ids import ConnId, GrantNo, Instance, Link, MoveNo, PageId, Rank, Rid, Room, Seat, Shape
from pdplane.core.layout import LayoutGroup, Stamp
from pdplane.core.node import Limits, Node
from pdplane.core.rooms.decode import DecodeNode
from pdplane.core.rooms.prefill import PrefillNode
from pdplane.core.rooms.receiver import Receiver
from pdplane.core.rooms.sender import Sender
from pdplane.core.rooms.table import R, S
from pdplane.core.session import Identity

E = TypeVar("E")
F = TypeVar("F")

PAGE = 16
ADDRESS = "registry"
STAMP = Stamp("m", "w", "t", PAGE, PAGE * 128, "f32", (LayoutGroup("kv", 64, (0, 1), "f32", parts=2, heads=4),))
AHEAD = Stamp(*(getattr(STAMP, name) for name in STAMP.__struct_fields__[:7]), policy="prefill_complete")
MEMORY = DataEndpoint("memory", "", "host", 9, "word")


def limits(pages: int = 16, **more: object) -> Limits:
    return Limits(pages=pages, page_size=PAGE, **more)  # type: ignore[arg-type]


def prompt(tokens: int, name: bytes = b"prompt") -> PromptId:
    return PromptId(name, tokens)


class Box:
    """A node and what it has asked for. `hears`: whether its shell still runs (a frozen one keeps its mail)."""

    def __init__(self, node: Node, world: Facing) -> None:
        self.node = node
        self.log: list[Effect] = []
        self.hears = True
        self._world = world

    def take(self, event: Event) -> list[Effect]:
        effects = self.node.handle(event, self._world.now)
        assert self.node.audit() == []
        self.log += effects
        for effect in effects:
            self._world.carry_out(self, effect)
        return effects

    def all(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.log if isinstance(effect, kind)]

    def last(self, kind: type[E]) -> E:
        return self.all(kind)[-1]

    def sent(self, kind: type[F]) -> list[F]:
        return [effect.frame for effect in self.all(SendFrame) if isinstance(effect.frame, kind)]

    def counted(self, name: str) -> list[str]:
        return [count.label for count in self.all(Count) if count.name == name]

    def failed(self, rid: str) -> Cause:
        """The one failure that was answered to this leg."""
        (answer,) = [a for a in self.all(AnswerFailed) if a.rid == rid]
        return answer.cause

    def answers(self, rid: str) -> list[AnswerFailed | AnswerRow]:
        return [a for a in self.log if isinstance(a, (AnswerFailed, AnswerRow)) and a.rid == rid]

    @property
    def free(self) -> int:
        return self.node.ledger.free_count


class Facing:
    """One decode (`d`), one prefill (`p`) unless more are added; `fence`: receiver-placed transport. `tp`: tensor
    parallel ranks of (prefill, decode). `teardown_proves`: the transport's, on a peer's end."""

    def __init__(
        self,
        *,
        fence: bool = True,
        d_limits: Limits | None = None,
        p_limits: Limits | None = None,
        tp: tuple[int, int] = (1, 1),
        auto_fence: bool = True,
        teardown_proves: bool = False,
        stamp: Stamp = STAMP,
        follow_room: bool = True,
    ) -> None:
        self.now = 0.0
        self.tp, self.stamp, self.follow_room = tp, stamp, follow_room
        self.teardown_proves = teardown_proves
        self.fence, self.auto_fence = fence, auto_fence
        self.d_limits, self.p_limits = d_limits or limits(), p_limits or limits()
        self.reachable = True
        self.route_cause: Cause | None = None
        self.stale_route: RouteKnown | None = None  # what the registry still says
        self.boxes: list[Box] = []
        self.listeners: dict[ControlEndpoint, tuple[Box, Rank]] = {}
        self.conns: dict[ConnId, tuple[Box, Box]] = {}
        self.mail: deque[tuple[ConnId, Box, Frame | None]] = deque()  # None: the sender has closed
        self.closed: dict[ConnId, Box] = {}
        self.knocks: list[tuple[Box, Accepted]] = []  # at a frozen listener's port: its kernel has let them in
        self.armed: dict[tuple[Box, GrantNo, Link], set[PageId]] = {}
        self.legs: dict[int, LegArrived] = {}
        self._conn = 0
        self.d = self.add_decode("D1")
        self.p = self.add_prefill("P1")

    # --- who is there -----------------------------------------------------------------------------------------------

    def add_decode(self, name: str) -> Box:
        fenced = frozenset({"memory"}) if self.fence else frozenset()
        self.boxes.append(Box(DecodeNode(identity(name, self.stamp, self.tp[1]), self.d_limits, fenced=fenced), self))
        return self.boxes[-1]

    def add_prefill(self, name: str, stamp: Stamp | None = None) -> Box:
        me = identity(name, stamp or self.stamp, self.tp[0])
        box = Box(PrefillNode(me, self.p_limits), self)
        self.boxes.append(box)
        for rank in me.ranks:
            self.listeners[ControlEndpoint("p", 1 + rank.tp)] = box, rank
        return box

    def restart_prefill(self, name: str = "P1b", stamp: Stamp | None = None) -> Box:
        """The process dies; another instance listens on its address."""
        self.boxes.remove(self.p)
        self.p.hears = False
        self.p = self.add_prefill(name, stamp=stamp)
        self.cut()
        return self.p

    @property
    def decode(self) -> DecodeNode:
        assert isinstance(self.d.node, DecodeNode)
        return self.d.node

    @property
    def prefill(self) -> PrefillNode:
        assert isinstance(self.p.node, PrefillNode)
        return self.p.node

    # --- effects ----------------------------------------------------------------------------------------------------

    def carry_out(self, box: Box, effect: Effect) -> None:
        match effect:
            case LookUpRank(address, room):
                box.take(RankKnown(address, room, None))
            case LookUp(address):
                if self.route_cause:
                    box.take(RouteFailed(address, self.route_cause))
                elif self.stale_route:
                    box.take(self.stale_route)
                else:
                    ranks = tuple((rank, at) for at, (_, rank) in self.listeners.items())
                    box.take(RouteKnown(address, ranks, Shape(tp=self.tp[0]), self.follow_room))
            case Dial(endpoint, here):
                self._dial(box, endpoint, here)
            case SendFrame(conn, frame) if conn in self.conns:
                self.mail.append((conn, box, frame))
            case CloseConn(conn) if conn in self.conns:
                self.closed[conn] = box
                self.mail.append((conn, box, None))
            case ArmGrant(grant, pages, lanes):
                for lane in lanes:
                    self.armed[box, grant, lane.link] = set(pages)
            case RevokeGrant(grant, here, kind):
                self._disarm(box, grant, here)
                if self.auto_fence and self.fence:
                    box.take(GrantQuiet(grant, here, kind))
            case DisarmGrant(grant, here):
                self._disarm(box, grant, here)
            case Teardown(peer, upto) if self.teardown_proves and box.node.side == "decode":
                box.take(TornDown(peer, upto))
            case _:
                pass

    def _disarm(self, box: Box, grant: GrantNo, here: Rank) -> None:
        for key in [key for key in self.armed if key[:2] == (box, grant) and key[2].here == here]:
            del self.armed[key]

    def _dial(self, box: Box, endpoint: ControlEndpoint, here: Rank) -> None:
        listener, rank = self.listeners[endpoint]
        if not self.reachable or listener not in self.boxes:
            box.take(DialFailed(endpoint, here, "refused"))
            return
        self._conn += 1
        conn = ConnId(self._conn)
        self.conns[conn] = (box, listener)
        if listener.hears:
            listener.take(Accepted(conn, rank))
        else:
            self.knocks.append((listener, Accepted(conn, rank)))
        box.take(Dialled(endpoint, here, conn))

    def _other(self, conn: ConnId, box: Box) -> Box:
        a, b = self.conns[conn]
        return b if box is a else a

    def _hand_over(self, conn: ConnId, sender: Box, frame: Frame | None) -> None:
        box = self._other(conn, sender)
        if frame is None:
            del self.conns[conn]
            if self.closed.pop(conn) is sender and box in self.boxes:
                box.take(ConnLost(conn))
        elif self.closed.get(conn) is not box:
            box.take(FrameIn(conn, frame))

    # --- network and time -------------------------------------------------------------------------------------------

    def pump(self, most: int = 10_000) -> None:
        """Delivers frames in order until there are none (those of a frozen peer stay)."""
        kept: deque[tuple[ConnId, Box, Frame | None]] = deque()
        for box, knock in [item for item in self.knocks if item[0].hears]:
            self.knocks.remove((box, knock))
            box.take(knock)
        for _ in range(most):
            if not self.mail:
                break
            item = self.mail.popleft()
            if item[0] in self.conns:
                if self._other(item[0], item[1]).hears:
                    self._hand_over(*item)
                else:
                    kept.append(item)
        self.mail = kept + self.mail

    def deliver(self, kind: type[Frame]) -> None:
        """Delivers the oldest mail up to and with the first frame of this kind."""
        while self.mail:
            item = self.mail.popleft()
            if item[0] in self.conns:
                self._hand_over(*item)
            if isinstance(item[2], kind):
                return
        raise AssertionError(f"no {kind.__name__} under way")

    def under_way(self) -> list[Frame]:
        return [frame for _, _, frame in self.mail if frame is not None and not isinstance(frame, Beat)]

    def cut(self, *, reachable: bool = True) -> None:
        """Every session is lost, with what was under way."""
        self.reachable = reachable
        conns, self.conns = dict(self.conns), {}
        self.mail.clear()
        self.closed.clear()
        for conn, ends in conns.items():
            for box in ends:
                if box in self.boxes and box.hears:
                    box.take(ConnLost(conn))

    def wait(self, seconds: float, *, pump: bool = True) -> None:
        """Time passes, with a tick whenever a node asked for one."""
        until = self.now + seconds
        while True:
            due = [at for box in self.boxes if box.hears and (at := box.node.next_due()) is not None]
            at = max(self.now, min(due, default=until))
            self.now = min(at, until)
            for box in list(self.boxes):
                wanted = box.node.next_due()
                if box.hears and wanted is not None and wanted <= self.now:
                    box.take(Tick())
            if pump:
                self.pump()
            if at >= until:
                return

    # --- what the edges, the engine and the transport do ------------------------------------------------------------

    def leg(self, number: int, tokens: int = 40, **more: object) -> LegArrived:
        given = {"rid": f"r{number}", "max_new": 4, "deadline": self.now + 300.0, "prompt": prompt(tokens)} | more
        given.setdefault("address", ADDRESS)
        self.legs[number] = LegArrived(room=Room(number), **given)  # type: ignore[arg-type]
        return self.legs[number]

    def legs_in(self, number: int, tokens: int = 40, **more: object) -> None:
        leg = self.leg(number, tokens, **more)
        self.p.take(leg)
        self.d.take(leg)

    def meet(self, number: int, tokens: int = 40, **more: object) -> None:
        """Both legs are in and all frames delivered: granted and computing, where there is room."""
        self.legs_in(number, tokens, **more)
        self.pump()

    def compute(self, number: int, tokens: int, box: Box | None = None) -> None:
        (box or self.p).take(Computed(rid=self.rid(number), tokens=tokens))

    def sample(self, number: int, box: Box | None = None, ended: str | None = None) -> None:
        (box or self.p).take(Sampled(rid=self.rid(number), token=7, ended=ended))

    def release(self, number: int, box: Box | None = None, error: str = "") -> None:
        (box or self.p).take(Released(rid=self.rid(number), error=error))

    def land(self, move: MovePages, box: Box | None = None) -> None:
        """The move completes: visible at decode where the grant is armed, else an error at prefill."""
        box = box or self.p
        target = next(other for other in self.boxes if getattr(other.node, "instance", "") == move.link.there.instance)
        back = Link(move.link.there.rank, Seat(box.node.instance, move.link.here))  # type: ignore[attr-defined]
        armed = self.armed.get((target, move.grant, back), set())
        pages = tuple(page for page in move.dst if page in armed)
        if pages:
            target.take(PagesLanded(move.grant, back, pages))
        error = "" if pages == move.dst or not self.fence else "discarded"
        box.take(MoveDone(move.move, error))

    def landed(self, number: int, pages: Iterable[PageId]) -> None:
        """Some pages of a room with one link are visible at decode."""
        receiver = self.receiver(number)
        self.d.take(PagesLanded(receiver.grant, receiver.links[0], tuple(pages)))

    def quiet(self, number: int) -> None:
        """The local fence of a room with one rank has closed."""
        self.d.take(GrantQuiet(self.receiver(number).grant, Rank(), "memory"))

    def land_all(self, box: Box | None = None) -> None:
        box = box or self.p
        done: set[MoveNo] = getattr(box, "landed", set())
        for move in box.all(MovePages):
            if move.move not in done:
                done.add(move.move)
                self.land(move, box)
        box.landed = done  # type: ignore[attr-defined]

    def send_all(self, number: int, box: Box | None = None, ended: str | None = None) -> None:
        """Prefill's whole work on a room that computes: sampled, released, moved, SUCCESS under way."""
        self.sample(number, box, ended)
        self.release(number, box)
        self.land_all(box)

    def run_to_batch(self, number: int, tokens: int = 40) -> None:
        self.meet(number, tokens)
        self.send_all(number)
        self.pump()

    def cancel(self, box: Box, number: int) -> list[Effect]:
        return box.take(Cancel(self.rid(number), client_left(box.node.side)))

    def rid(self, number: int) -> Rid:
        return self.legs[number].rid

    # --- what a test looks at ---------------------------------------------------------------------------------------

    def receiver(self, number: int) -> Receiver:
        receiver = self.decode.rooms.get(Room(number))
        assert receiver is not None
        return receiver

    def sender(self, number: int, box: Box | None = None) -> Sender:
        sender = (box or self.p).node.rooms.get(Room(number))  # type: ignore[attr-defined]
        assert isinstance(sender, Sender)
        return sender

    def d_state(self, number: int) -> R:
        receiver = self.decode.rooms.get(Room(number))
        return receiver.state if receiver else R.GONE

    def p_state(self, number: int) -> S:
        sender = self.prefill.rooms.get(Room(number))
        return sender.state if sender else S.GONE

    def states(self, number: int) -> tuple[R, S]:
        return self.d_state(number), self.p_state(number)

    def idle(self) -> bool:
        """Nothing live, nothing held, no clock but the sessions' and those of what was said and is over."""
        for box in self.boxes:
            assert box.free == box.node.limits.pages, box.node.ledger.holders()
            assert box.node.live == 0
            left = {key[0] for key in box.node.timers._due} - {"sessions", "owed"}
            assert not left, left
        assert len(self.decode.reserve) == 0
        return True


def identity(name: str, stamp: Stamp = STAMP, tp: int = 1, **more: object) -> Identity:
    given = {"shape": Shape(tp=tp), "data": ((MEMORY,),) * tp} | more
    return Identity(Instance(name), stamp, **given)  # type: ignore[arg-type]


def only(items: Iterable[E]) -> E:
    (item,) = items
    return item
