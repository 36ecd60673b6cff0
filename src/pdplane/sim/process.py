"""One life of one worker process: the production core, and a shell that carries its effects out in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pdplane.core.decode import DecodeNode
from pdplane.core.effects import (
    AbortEngine,
    AnswerFailed,
    AnswerRow,
    ArmGrant,
    CancelMoves,
    CloseConn,
    ConnectData,
    Dial,
    DisarmGrant,
    Effect,
    ExtendPages,
    LookUp,
    MovePages,
    RevokeGrant,
    RunDecode,
    RunPrefill,
    SendFrame,
    Teardown,
)
from pdplane.core.errors import Cause
from pdplane.core.events import Event, GrantQuiet, MoveDone, PagesLanded, Tick
from pdplane.core.ids import ConnId, GrantNo, Instance, MoveNo, PageId, Rank, Rid
from pdplane.core.layout import LayoutGroup, Stamp
from pdplane.core.node import Limits
from pdplane.core.prefill import PrefillNode
from pdplane.core.session import Identity
from pdplane.transport.contract import Endpoint, Pair
from pdplane.transport.memory import MemoryFabric, MemoryLanding, MemoryMover
from pdplane.transport.pool import PagePool

from .engine import PAGE_BYTES, SimEngine, Work
from .network import Connection, Network
from .plan import Plan

STAMP = Stamp(
    model="sim",
    weights="00",
    tokenizer="00",
    page_size=4,
    page_bytes=PAGE_BYTES,
    kv_dtype="tag",
    groups=(LayoutGroup("kv", PAGE_BYTES // 4, (0,), "tag"),),
)


class World(Protocol):
    """What a process needs of the world around it."""

    now: float
    network: Network
    fabric: MemoryFabric
    plan: Plan
    works: dict[Rid, Work]

    def at(self, when: float, do: Callable[[], None]) -> None: ...

    def uniform(self, low: float, high: float) -> float: ...

    def look_up(self, who: Process, address: str) -> None: ...

    def before(self, who: Process, event: Event) -> None: ...

    def effect(self, who: Process, effect: Effect) -> None: ...

    def after(self, who: Process, event: Event, effects: Sequence[Effect]) -> None: ...

    def posted(self, who: Process) -> None: ...

    def tear_down(self, who: Process, peer: Instance) -> None: ...

    def first_byte(self, who: Process, rid: Rid) -> None: ...

    def finished(self, who: Process, rid: Rid) -> None: ...

    def refused(self, who: Process, rid: Rid, cause: Cause) -> None: ...

    def foreign_tag(self, who: Process, where: str, work: Work, page: PageId, index: int) -> None: ...


class Process:
    """`name` is the address, `instance` the life. Frozen: events wait in the inbox, in order, and time goes on."""

    def __init__(self, world: World, name: str, life: int, limits: Limits, *, fence: bool, step: float) -> None:
        self.world = world
        self.name = name
        self.instance = Instance(f"{name}#{life}")
        self.side = "prefill" if name.startswith("p") else "decode"
        self.alive = True
        self.frozen = False
        self.conns: dict[ConnId, Connection] = {}
        self.pool = PagePool(limits.pages, PAGE_BYTES)
        self.engine = SimEngine(self, self.pool, limits.page_size, chunk=limits.page_size * 2, step=step)
        self.unsure: set[MoveNo] = set()  # moves that will complete with an error, landed or not
        self._inbox: list[Event] = []
        self._minted = 0
        self._tick_at: float | None = None
        self._landing: MemoryLanding | None = None
        self._mover: MemoryMover | None = None
        me = Identity(self.instance, Rank(), STAMP, data_host=name, data_port=1, data_token=f"token of {self.instance}")
        self.node: DecodeNode | PrefillNode
        if self.side == "prefill":
            self.node = PrefillNode(me, limits)
            self._mover = world.fabric.mover(self.instance, self.pool, self._wrote)
        else:
            self.node = DecodeNode(me, limits, fence=fence)
            self._landing = world.fabric.landing(
                self.instance, self.pool, self._landed, self._quiet, token=me.data_token
            )

    # --- for engine, network and world ------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.world.now

    @property
    def running(self) -> bool:
        return self.alive and not self.frozen

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Unless this process is dead by then."""
        self.world.at(when, lambda: do() if self.alive else None)

    def uniform(self, low: float, high: float) -> float:
        return self.world.uniform(low, high)

    def mint_conn(self) -> ConnId:
        self._minted += 1
        return ConnId(self._minted)

    def foreign_tag(self, where: str, work: Work, page: PageId, index: int) -> None:
        self.world.foreign_tag(self, where, work, page, index)

    def post(self, event: Event) -> None:
        """An event happens here, now."""
        if self.frozen:
            self._inbox.append(event)
        elif self.alive:
            self._handle(event)

    def die(self) -> None:
        self.alive = False
        self._inbox.clear()
        self.conns.clear()

    def thaw(self) -> None:
        """Time has passed unseen: what waited is taken in, then the clocks."""
        self.frozen = False
        waiting, self._inbox = self._inbox, []
        for event in waiting:
            self.post(event)
        self.post(Tick())
        self.engine.wake()

    @property
    def landing(self) -> MemoryLanding:
        assert self._landing is not None
        return self._landing

    @property
    def mover(self) -> MemoryMover:
        assert self._mover is not None
        return self._mover

    # --- the core ---------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        self.world.before(self, event)
        effects = self.node.handle(event, self.now)
        for effect in effects:
            self.world.effect(self, effect)
            self._carry_out(effect)
        self.world.after(self, event, effects)
        self._wind_clock()

    def _wind_clock(self) -> None:
        due = self.node.next_due()
        if due is None or (self._tick_at is not None and self._tick_at <= due):
            return
        self._tick_at = due = max(due, self.now)
        self.at(due, lambda: self._tick(due))

    def _tick(self, due: float) -> None:
        if self._tick_at == due:
            self._tick_at = None
            if not self.frozen:
                self._handle(Tick())

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SendFrame(conn, frame):
                self.world.network.send(self, conn, frame)
            case Dial(endpoint):
                self.world.network.dial(self, endpoint)
            case CloseConn(conn):
                self.world.network.close(self, conn)
            case LookUp(address):
                self.world.look_up(self, address)
            case AnswerFailed(rid, cause):
                self.world.refused(self, rid, cause)
            case AnswerRow(rid, _):
                self.world.finished(self, rid)
            case RunPrefill(rid, pages):
                self.engine.prefill(self.world.works[rid], pages)
            case RunDecode(rid, pages, row, max_new):
                self.world.first_byte(self, rid)
                self.engine.decode(self.world.works[rid], pages, row, max_new)
            case ExtendPages(rid, pages):
                self.engine.extend(rid, pages)
            case AbortEngine(rid):
                self.engine.abort(rid)
            case _:
                self._carry_out_pages(effect)

    def _carry_out_pages(self, effect: Effect) -> None:
        match effect:
            case ArmGrant(grant, peers, pages):
                assert len(peers) == 1, "one rank per worker in this fleet"
                self.landing.arm(grant, peers[0], pages)
            case RevokeGrant(grant):
                if self.landing.revoke(grant):
                    self._soon(GrantQuiet(grant), within_s=0.03)
            case DisarmGrant(grant):
                self.landing.disarm(grant)
            case ConnectData(peer, host, port, token):
                self.mover.connect(peer, Endpoint(host, port), token)
            case MovePages(move, grant, peer, src, dst):
                self.mover.move(move, grant, peer, [Pair(*pair) for pair in zip(src, dst, strict=True)])
                self.world.posted(self)
            case CancelMoves(grant, peer):
                self.mover.cancel(grant, peer)
            case Teardown(peer) if self._mover is not None:
                self.world.tear_down(self, peer)
            case Teardown(peer) if self.world.plan.fence:  # a one-sided fabric knows nothing of the receiver's wishes
                self.landing.teardown(peer)
            case _:
                pass

    # --- the transport's callbacks ----------------------------------------------------------------------------------

    def _wrote(self, move: MoveNo, error: str) -> None:
        self._soon(MoveDone(move, "connection lost" if move in self.unsure else error))

    def _landed(self, grant: GrantNo, pages: Sequence[PageId]) -> None:
        self._soon(PagesLanded(grant, tuple(pages)))

    def _quiet(self, grant: GrantNo) -> None:
        self._soon(GrantQuiet(grant))

    def _soon(self, event: Event, within_s: float = 0.001) -> None:
        """As from another thread: a little later, in no particular order."""
        self.at(self.now + self.uniform(0.0, within_s), lambda: self.post(event))
