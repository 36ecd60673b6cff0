"""Two machines facing each other: decode and prefill nodes on one virtual clock, FIFO frames, scripted outcomes.

Nothing happens by itself: a test delivers frames (`pump`), computes (`compute`, `sample`, `release`), lands moves
(`land`) and passes time (`wait`). What was asked of shells is kept in the node's `log`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeVar

from pdplane.core.decode import DecodeNode
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
    MovePages,
    RevokeGrant,
    SendFrame,
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
    Released,
    RouteFailed,
    RouteKnown,
    Sampled,
    Tick,
)
from pdplane.core.frames import Beat, Frame, PromptId
from pdplane.core.ids import ConnId, GrantNo, Instance, MoveNo, Rank, Rid, Room
from pdplane.core.layout import LayoutGroup, Stamp
from pdplane.core.node import Limits, Node
from pdplane.core.prefill import PrefillNode
from pdplane.core.receiver import Receiver
from pdplane.core.sender import Sender
from pdplane.core.session import Identity
from pdplane.core.table import R, S

E = TypeVar("E")
F = TypeVar("F")

PAGE = 16
ADDRESS = "registry"
STAMP = Stamp("m", "w", "t", PAGE, PAGE * 64, "f32", (LayoutGroup("kv", 64, (0, 1), "f32"),))


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
    """One decode (`d`), one prefill (`p`) unless more are added; `fence`: receiver-placed transport."""

    def __init__(
        self,
        *,
        fence: bool = True,
        d_limits: Limits | None = None,
        p_limits: Limits | None = None,
        ranks: int = 1,
        auto_fence: bool = True,
    ) -> None:
        self.now = 0.0
        self.fence, self.auto_fence = fence, auto_fence
        self.d_limits, self.p_limits = d_limits or limits(), p_limits or limits()
        self.reachable = True
        self.route_cause: Cause | None = None
        self.boxes: list[Box] = []
        self.listeners: dict[ControlEndpoint, Box] = {}
        self.conns: dict[ConnId, tuple[Box, Box]] = {}
        self.mail: deque[tuple[ConnId, Box, Frame | None]] = deque()  # None: the sender has closed
        self.closed: dict[ConnId, Box] = {}
        self.armed: dict[GrantNo, set[int]] = {}
        self.legs: dict[int, LegArrived] = {}
        self._conn = 0
        self.d = self.add_decode("D1")
        self.ps = [self.add_prefill(f"P{n + 1}", port=n + 1, rank=Rank(tp=n)) for n in range(ranks)]
        self.p = self.ps[0]

    # --- who is there -----------------------------------------------------------------------------------------------

    def add_decode(self, name: str) -> Box:
        me = Identity(Instance(name), Rank(), STAMP, "host", 9, "word")
        self.boxes.append(Box(DecodeNode(me, self.d_limits, fence=self.fence), self))
        return self.boxes[-1]

    def add_prefill(self, name: str, port: int = 1, rank: Rank = Rank(), stamp: Stamp = STAMP) -> Box:  # noqa: B008
        box = Box(PrefillNode(Identity(Instance(name), rank, stamp), self.p_limits), self)
        self.boxes.append(box)
        self.listeners[ControlEndpoint("p", port)] = box
        return box

    def restart_prefill(self, name: str = "P1b", stamp: Stamp = STAMP) -> Box:
        """The process dies; another instance listens on its address."""
        self.boxes.remove(self.p)
        self.p.hears = False
        self.p = self.ps[0] = self.add_prefill(name, stamp=stamp)
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
            case LookUp(address):
                if self.route_cause:
                    box.take(RouteFailed(address, self.route_cause))
                else:
                    ranks = [(who.node.rank, at) for at, who in self.listeners.items()]  # type: ignore[attr-defined]
                    box.take(RouteKnown(address, tuple(ranks)))
            case Dial(endpoint):
                self._dial(box, endpoint)
            case SendFrame(conn, frame) if conn in self.conns:
                self.mail.append((conn, box, frame))
            case CloseConn(conn) if conn in self.conns:
                self.closed[conn] = box
                self.mail.append((conn, box, None))
            case ArmGrant(grant, _, pages):
                self.armed[grant] = set(pages)
            case RevokeGrant(grant):
                self.armed.pop(grant, None)
                if self.auto_fence:
                    box.take(GrantQuiet(grant))
            case DisarmGrant(grant):
                self.armed.pop(grant, None)
            case _:
                pass

    def _dial(self, box: Box, endpoint: ControlEndpoint) -> None:
        listener = self.listeners[endpoint]
        if not self.reachable or listener not in self.boxes:
            box.take(DialFailed(endpoint, "refused"))
            return
        self._conn += 1
        conn = ConnId(self._conn)
        self.conns[conn] = (box, listener)
        if listener.hears:
            listener.take(Accepted(conn))
        box.take(Dialled(endpoint, conn))

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
        self.legs[number] = LegArrived(room=Room(number), address=ADDRESS, **given)  # type: ignore[arg-type]
        return self.legs[number]

    def legs_in(self, number: int, tokens: int = 40, **more: object) -> None:
        leg = self.leg(number, tokens, **more)
        for box in self.ps:
            box.take(leg)
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
        pages = tuple(page for page in move.dst if page in self.armed.get(move.grant, ()))
        if pages:
            self.d.take(PagesLanded(move.grant, pages))
        error = "" if pages == move.dst or not self.fence else "discarded"
        (box or self.p).take(MoveDone(move.move, error))

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


def only(items: Iterable[E]) -> E:
    (item,) = items
    return item
