"""Carries the faults of a plan out."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from pdplane.core.events import Drain, FrameIn, OperatorRelease
from pdplane.core.frames import Drained, Row, Success
from pdplane.core.ids import GrantNo, Instance, Link, Seat
from pdplane.core.params.decode import ParamsDecodeNode
from pdplane.core.rooms.decode import DecodeNode
from pdplane.core.rooms.receiver import Receiver

from .checkers import Pages
from .ends import Ends, Waits
from .faults import (
    Crash,
    DrainWorker,
    Fault,
    Freeze,
    LostFrame,
    LostMoves,
    MissingRank,
    Partition,
    RegistryDown,
    Release,
    SessionLoss,
    SlowLink,
    SlowRank,
    SlowRegistry,
    SlowTransfer,
    StrayFrame,
    StuckMoves,
    WrongRow,
)
from .hold_rules import HoldRules
from .moves import Moves
from .network import Network
from .params_strikes import quarantined, stray_answer
from .process import Process
from .registries import Registries
from .router import SimRouter


class World(Protocol):
    now: float
    rng: Random
    network: Network
    moves: Moves
    registries: Registries
    pages: Pages
    ends: Ends
    waits: Waits
    hold_rules: HoldRules
    router: SimRouter

    def at(self, when: float, do: Callable[[], None]) -> None: ...

    def uniform(self, low: float, high: float) -> float: ...

    def process(self, name: str) -> Process: ...

    def start(self, name: str, weights: str) -> None: ...

    def say(self, who: str, text: str) -> None: ...


class Striker:
    def __init__(self, world: World) -> None:
        self._world = world
        self._strays: dict[str, list[StrayFrame]] = {}

    def strike(self, fault: Fault) -> None:
        world = self._world
        world.say("fault", repr(fault))
        match fault:
            case Crash():
                self._crash(fault)
            case Freeze(process=name, for_s=for_s):
                self._freeze(world.process(name), for_s)
            case StrayFrame(decode=name):
                self._strays.setdefault(name, []).append(fault)
            case DrainWorker(process=name):
                world.process(name).post(Drain())
            case WrongRow(process=name, wrong=wrong):
                world.process(name).wrong_rows.append(wrong)
            case Release(process=name):
                self._release(world.process(name))
            case LostMoves(process=name):
                world.moves.lose(world.process(name))
            case StuckMoves(process=name, for_s=for_s):
                world.moves.stick(name, world.now + for_s)
            case SlowTransfer(process=name, extra_s=extra_s, for_s=for_s):
                world.moves.slow(name, extra_s)
                self._after(for_s, lambda: world.moves.slow(name, 0.0))
            case SlowRank(process=name, tp=tp, extra_s=extra_s, for_s=for_s):
                self._slow_rank(name, tp, extra_s)
                self._after(for_s, lambda: self._slow_rank(name, tp, 0.0))
            case RegistryDown(process=name, for_s=for_s):
                world.registries.go_down(name, world.now + for_s)
            case SlowRegistry(process=name, extra_s=extra_s, for_s=for_s):
                world.registries.slow(name, extra_s)
                self._after(for_s, lambda: world.registries.slow(name, 0.0))
            case MissingRank(process=name, tp=tp, for_s=for_s):
                world.registries.miss(name, tp, world.now + for_s)
            case Partition() | SessionLoss() | LostFrame() | SlowLink():
                self._strike_network(fault)

    def _strike_network(self, fault: Partition | SessionLoss | LostFrame | SlowLink) -> None:
        network = self._world.network
        match fault:
            case Partition(src=src, dst=dst, both=both, for_s=for_s):
                for way in [(src, dst), (dst, src)] if both else [(src, dst)]:
                    network.cut(*way)
                    self._after(for_s, lambda way=way: network.heal(*way))  # type: ignore[misc]
            case SessionLoss(prefill=prefill, decode=decode, tp=tp):
                network.break_between(prefill, decode, tp)
            case LostFrame(prefill=prefill, decode=decode, frame=frame, whole=whole):
                network.lose_next(prefill, decode, frame, whole=whole)
            case SlowLink(src=src, dst=dst, extra_s=extra_s, for_s=for_s):
                network.slow(src, dst, extra_s)
                self._after(for_s, lambda: network.slow(src, dst, 0.0))

    def _after(self, wait_s: float, do: Callable[[], None]) -> None:
        self._world.at(self._world.now + wait_s, do)

    def _slow_rank(self, name: str, tp: int, extra_s: float) -> None:
        self._world.moves.slow(name, extra_s, tp)
        self._world.network.slow_rank(name, tp, extra_s)

    def _crash(self, fault: Crash) -> None:
        world, process = self._world, self._world.process(fault.process)
        if not process.alive:
            return
        world.moves.crash(process, keep=fault.ghosts, within_s=fault.ghost_within_s)
        world.network.process_died(process)
        process.die()
        world.pages.forget(process.instance)
        world.ends.died(process, world.now)
        world.waits.died(process)
        world.hold_rules.died(process)
        world.router.worker_died(process)
        self._after(fault.restart_after_s, lambda: world.start(fault.process, fault.weights))

    def _freeze(self, process: Process, for_s: float) -> None:
        if process.frozen or not process.alive:
            return
        process.frozen = True
        process.at(self._world.now + for_s, process.thaw)

    def _release(self, process: Process) -> None:
        """The operator looks at what is quarantined, and at the fabric."""
        pending = self._world.moves.fabric.pending
        under_way = {batch.grant for batch in pending if batch.dst.instance == process.instance}
        if isinstance(process.node, ParamsDecodeNode):
            for grant in quarantined(process.node) - under_way:
                process.post(OperatorRelease(grant))
        if not isinstance(process.node, DecodeNode):
            return
        for receiver in list(process.node.rooms.live.values()):
            if receiver.state == "Quarantine" and receiver.grant not in under_way:
                process.post(OperatorRelease(receiver.grant))

    # --- frames that no honest session carries ----------------------------------------------------------------------

    def look(self, who: Process) -> None:
        """Something has happened at `who`: a stray frame may have its chance."""
        if strays := self._strays.get(who.name):
            self._stray(who, strays)

    def _stray(self, who: Process, strays: list[StrayFrame]) -> None:
        """A frame that no honest session carries: right room, wrong grant or wrong process."""
        node = who.node
        if isinstance(node, ParamsDecodeNode):
            if event := stray_answer(node, strays[0].wrong):
                strays.pop(0)
                who.at(self._world.now + self._world.uniform(0.0, 0.001), lambda: who.post(event))
            return
        assert isinstance(node, DecodeNode)
        waiting = [receiver for receiver in node.rooms.live.values() if receiver.pages and receiver.holders]
        rooms = [receiver for receiver in waiting if receiver.state == "Draining" or strays[0].kind == "success"]
        if not rooms:
            return
        receiver = rooms[int(self._world.rng.random() * len(rooms))]
        link = receiver.links[0]
        conn = node.members.conn(link)
        if conn is None:
            return
        fault = strays.pop(0)
        posing, grant = link, GrantNo(receiver.grant + 1000)
        if fault.wrong == "instance":
            there = Seat(Instance(f"{link.there.instance} before"), link.there.rank)
            posing, grant = Link(link.here, there), receiver.grant
        frame = _stray_frame(fault.kind, receiver, node.instance, posing, grant)
        who.at(self._world.now + self._world.uniform(0.0, 0.001), lambda: who.post(FrameIn(conn, frame)))


def _stray_frame(kind: str, receiver: Receiver, to: Instance, link: Link, grant: GrantNo) -> Drained | Success:
    room, prompt, src, rank = receiver.room, receiver.leg.prompt, link.there.instance, link.there.rank
    if kind == "drained":
        return Drained(room=room, grant=grant, src=src, dst=to, rank=rank)
    row = Row(first_token=9, prompt_tokens=prompt.tokens, prompt_digest=prompt.digest)
    return Success(room=room, grant=grant, src=src, dst=to, rank=rank, row=row)
