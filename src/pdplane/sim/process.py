"""One life of one worker process: the production core, and a shell that carries its effects out in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pdplane.core.aggregated import AggregatedNode
from pdplane.core.effects import (
    AbortEngine,
    AnswerFailed,
    AnswerHeld,
    AnswerRow,
    ArmGrant,
    CancelMoves,
    CloseConn,
    ConnectData,
    Dial,
    DisarmGrant,
    Effect,
    ExtendPages,
    FinishEngine,
    LookUp,
    LookUpRank,
    MovePages,
    RestoreEngine,
    RetractEngine,
    RevokeGrant,
    RunDecode,
    RunPrefill,
    RunWhole,
    SendFrame,
    Teardown,
    Ungate,
)
from pdplane.core.errors import Cause
from pdplane.core.events import Event, GrantQuiet, MoveDone, PagesLanded, Tick, TornDown
from pdplane.core.frames import DataEndpoint, Frame, Success
from pdplane.core.ids import ConnId, Instance, Link, MoveNo, PageId, Rank, Rid, Room, Seat
from pdplane.core.layout import PARAMS, PROTOCOL_VERSION, Stamp
from pdplane.core.node import Limits
from pdplane.core.params.decode import ParamsDecodeNode
from pdplane.core.params.prefill import ParamsPrefillNode
from pdplane.core.rooms.decode import DecodeNode
from pdplane.core.rooms.prefill import PrefillNode
from pdplane.core.session import Identity
from pdplane.core.slices import shard_bytes
from pdplane.transport.contract import Pairs
from pdplane.transport.memory import MemoryFabric, MemoryLanding, MemoryMover
from pdplane.transport.pool import PagePool

from .content import GROUP, PAGE_BYTES, PAGE_SIZE, Work
from .drawn import Plan
from .engine import CHUNK, SimEngine
from .faults import WEIGHTS
from .network import Connection, Network

STAMP = Stamp(
    model="sim",
    weights=WEIGHTS,
    tokenizer="00",
    page_size=PAGE_SIZE,
    page_bytes=PAGE_BYTES,
    kv_dtype="mark",
    groups=(GROUP,),
    protocol_max=PROTOCOL_VERSION,
)
AnyNode = DecodeNode | PrefillNode | AggregatedNode | ParamsDecodeNode | ParamsPrefillNode
SIDES = {"p": "prefill", "d": "decode", "a": "aggregated"}
PORTS = 16  # of each life of a process, more than it has ranks
KIND = "memory"


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

    def look_up_rank(self, who: Process, address: str, room: Room) -> None: ...

    def before(self, who: Process, event: Event) -> None: ...

    def effect(self, who: Process, effect: Effect) -> None: ...

    def after(self, who: Process, event: Event, effects: Sequence[Effect]) -> None: ...

    def posted(self, who: Process) -> None: ...

    def tear_down(self, who: Process, peer: Instance) -> None: ...

    def first_byte(self, who: Process, rid: Rid) -> None: ...

    def finished(self, who: Process, rid: Rid) -> None: ...

    def refused(self, who: Process, rid: Rid, cause: Cause) -> None: ...

    def held(self, who: Process, answer: AnswerHeld) -> None: ...

    def foreign_tag(self, who: Process, where: str, work: Work, page: PageId, index: int) -> None: ...

    def short_restore(self, who: Process, work: Work, needed: int, given: int) -> None: ...


class Process:
    """`name` is the address, `instance` the life. Frozen: events wait in the inbox, in order, and time goes on."""

    def __init__(self, world: World, name: str, life: int, limits: Limits, step: float, weights: str = WEIGHTS) -> None:
        plan = world.plan
        self.world = world
        self.name = name
        self.instance = Instance(f"{name}#{life}")
        self.side = SIDES[name[0]]
        self.dp = plan.dp_of(name)
        self.first_port = 1 + (PORTS * life if plan.new_ports else 0)
        self.alive = True
        self.frozen = False
        self.conns: dict[ConnId, Connection] = {}
        shape = plan.shape_of(self.side)
        sizes = [shard_bytes((GROUP,), PAGE_SIZE, rank, shape.tp) for rank in range(shape.tp)]
        self.pools = [PagePool(limits.pages, size) if size else None for size in sizes]
        self.engine = SimEngine(self, self.pools, chunk=CHUNK, step=step, salt=int(weights))
        self.unsure: set[MoveNo] = set()  # moves that will complete with an error, landed or not
        self.wrong_rows: list[str] = []  # what the next SUCCESSes will get wrong
        self._inbox: list[Event] = []
        self._minted = 0
        self._tick_at: float | None = None
        stamp = msgspec.structs.replace(STAMP, policy=plan.policy, weights=weights, dialect=plan.dialect)
        self._build(Identity(self.instance, stamp, "", shape, self.dp), limits)

    def _build(self, me: Identity, limits: Limits) -> None:
        fabric = self.world.fabric
        seats = [(Seat(self.instance, rank), pool) for rank, pool in zip(me.ranks, self.pools, strict=True) if pool]
        self.movers: dict[Rank, MemoryMover] = {}
        self.landings: dict[Rank, MemoryLanding] = {}
        for seat, pool in seats:
            if self.side == "prefill":
                self.movers[seat.rank] = fabric.mover(seat, pool, self.wrote)
            elif self.side == "decode":
                self.landings[seat.rank] = self._landing(seat, pool)
        ends = {rank: landing.endpoint for rank, landing in self.landings.items()}
        me = msgspec.structs.replace(me, data=tuple((ends.get(rank, DataEndpoint(KIND)),) for rank in me.ranks))
        fenced = frozenset({KIND}) if self.world.plan.fence else frozenset()
        params = self.world.plan.dialect == PARAMS
        self.node: AnyNode
        if self.side == "prefill":
            self.node = ParamsPrefillNode(me, limits) if params else PrefillNode(me, limits)
        elif self.side == "decode" and params:
            self.node = ParamsDecodeNode(me, limits)
        elif self.side == "decode":
            self.node = DecodeNode(me, limits, fenced=fenced)
        else:
            self.node = AggregatedNode(limits)

    def _landing(self, seat: Seat, pool: PagePool) -> MemoryLanding:
        here = seat.rank
        return self.world.fabric.landing(
            seat,
            pool,
            lambda grant, peer, pages: self._soon(PagesLanded(grant, Link(here, peer), tuple(pages))),
            lambda grant: self._soon(GrantQuiet(grant, here, KIND)),
            token=f"token of {seat}",
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

    def short_restore(self, work: Work, needed: int, given: int) -> None:
        self.world.short_restore(self, work, needed, given)

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
                self.world.network.send(self, conn, self._said(frame))
            case Dial(endpoint, here):
                self.world.network.dial(self, endpoint, here)
            case CloseConn(conn):
                self.world.network.close(self, conn)
            case LookUp(address):
                self.world.look_up(self, address)
            case LookUpRank(address, room):
                self.world.look_up_rank(self, address, room)
            case AnswerFailed(rid, cause):
                self.world.refused(self, rid, cause)
            case AnswerRow(rid, _):
                self.world.finished(self, rid)
            case RunPrefill(rid, pages, cached_tokens):
                self.engine.prefill(self.world.works[rid], pages, cached_tokens)
            case RunDecode(rid, pages, row, max_new):
                self.world.first_byte(self, rid)
                self.engine.decode(self.world.works[rid], pages, row, max_new)
            case RunWhole(rid, pages, max_new, computed, shared, gated):
                self.engine.whole(self.world.works[rid], pages, max_new, computed, shared, gated)
            case Ungate(rid):
                self.engine.ungate(rid)
            case AnswerHeld():
                self.world.held(self, effect)
            case ExtendPages(rid, pages):
                self.engine.extend(rid, pages)
            case RetractEngine(rid):
                self.engine.retract(rid)
            case RestoreEngine(rid, pages):
                self.engine.restore(rid, pages)
            case FinishEngine(rid):
                self.engine.finish(rid)
            case AbortEngine(rid):
                self.engine.abort(rid)
            case _:
                self._carry_out_pages(effect)

    def _carry_out_pages(self, effect: Effect) -> None:
        match effect:
            case ArmGrant(grant, pages, lanes):
                for lane in lanes:
                    self.landings[lane.link.here].arm(grant, lane.link.there, pages, lane.slice)
            case RevokeGrant(grant, here, kind):
                if self.landings[here].revoke(grant):
                    self._soon(GrantQuiet(grant, here, kind), within_s=0.03)
            case DisarmGrant(grant, here):
                self.landings[here].disarm(grant)
            case ConnectData(link, endpoint, part):
                self.movers[link.here].connect(link.there, endpoint, part)
            case MovePages(move, grant, link, src, dst):
                pairs = Pairs(src, dst)
                self.movers[link.here].move(move, grant, link.there, pairs)
                self.world.posted(self)
            case CancelMoves(grant, link):
                self.movers[link.here].cancel(grant, link.there)
            case Teardown(peer) if self.side == "prefill":
                self.world.tear_down(self, peer)
            case Teardown(peer, upto) if self.world.plan.fence or self.world.plan.teardown_proves:
                # a one-sided fabric without this knows nothing of the receiver's wishes
                if all([landing.teardown(peer) for landing in self.landings.values()]):
                    self._soon(TornDown(peer, upto))
            case _:
                pass

    def _said(self, frame: Frame) -> Frame:
        """What really leaves, where this process has a fault of its own."""
        if not self.wrong_rows or not isinstance(frame, Success):
            return frame
        change = {"prompt_digest": b"another"} if self.wrong_rows.pop(0) == "prompt" else {"first_token": 8}
        return msgspec.structs.replace(frame, row=msgspec.structs.replace(frame.row, **change))

    # --- the transport's callbacks ----------------------------------------------------------------------------------

    def wrote(self, move: MoveNo, error: str) -> None:
        self._soon(MoveDone(move, "connection lost" if move in self.unsure else error))

    def _soon(self, event: Event, within_s: float = 0.001) -> None:
        """As from another thread: a little later, in no particular order."""
        self.at(self.now + self.uniform(0.0, within_s), lambda: self.post(event))
