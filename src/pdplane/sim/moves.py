"""The data plane of a run: each posted move begins, and later arrives, is lost, is stuck, or lands as a ghost.

Where decode's end has a fence, landing takes time: who has entered writes on after a revoke, and only then is the grant
quiet. A one-sided fabric places a move's bytes at one instant, whatever was revoked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from pdplane.core.ids import Instance, MoveNo, Rank, Seat
from pdplane.transport import slicing
from pdplane.transport.landing_table import Claim, Verdict
from pdplane.transport.memory import Batch, MemoryFabric, MemoryLanding, MemoryMover
from pdplane.transport.pool import PagePool

from .checkers import Pages
from .drawn import Plan
from .network import Network

MOVE_S = (0.0005, 0.02)
STALL_S = (5.0, 45.0)  # a move over a cut link is given up after so long; at prefill it drains meanwhile
LANDING_S = (0.001, 0.001, 0.03)  # how long bytes take to be placed, at most; one is drawn
BUFFERED_S = 0.02  # how long bytes that prefill has given up may lie in a buffer
TRICKLE_S = 0.3  # how long these take to be placed


class Mover(Protocol):
    """A process as its moves see it."""

    name: str
    instance: Instance
    alive: bool
    frozen: bool
    unsure: set[MoveNo]
    movers: dict[Rank, MemoryMover]
    landings: dict[Rank, MemoryLanding]
    pools: list[PagePool | None]

    def wrote(self, move: MoveNo, error: str) -> None: ...


class World(Protocol):
    now: float
    network: Network
    plan: Plan
    pages: Pages

    def at(self, when: float, do: Callable[[], None]) -> None: ...

    def uniform(self, low: float, high: float) -> float: ...

    def choice(self, options: tuple[float, ...]) -> float: ...

    def process(self, name: str) -> Mover: ...

    def say(self, who: str, text: str) -> None: ...


class Moves:
    """All moves between the processes of one world, over one fabric."""

    def __init__(self, world: World) -> None:
        self._world = world
        plan = world.plan
        self.fabric = MemoryFabric(auto=False, fence=plan.fence, teardown_proves=plan.teardown_proves)
        self._extra_s: dict[tuple[str, int | None], float] = {}
        self._stuck_until: dict[str, float] = {}
        self._haunting: list[Batch] = []  # ghosts whose time is set
        self._landing: list[Batch] = []  # their bytes are being placed

    # --- what processes ask for -------------------------------------------------------------------------------------

    def posted(self, who: Mover) -> None:
        """A batch is on its way: it begins, and later arrives."""
        world = self._world
        if not self.fabric.pending or self.fabric.pending[-1].src.instance != who.instance:
            return
        batch = self.fabric.pending[-1]
        extra_s = self._extra_s.get((who.name, None), 0.0) + self._extra_s.get((who.name, batch.src.rank.tp), 0.0)
        delay = world.uniform(*MOVE_S) + extra_s
        world.at(world.now + delay * world.uniform(0.0, 1.0), lambda: self._begin(batch))
        give_up_at = world.now + world.uniform(*STALL_S)
        world.at(world.now + delay, lambda: self._deliver(batch, who, give_up_at))

    def tear_down(self, who: Mover, peer: Instance) -> None:
        """A one-sided fabric flushes what it has begun: each write lands now, or never. With a fence at the other end,
        what has left may still arrive."""
        mine = [b for b in self.fabric.pending if (b.src.instance, b.dst.instance) == (who.instance, peer)]
        for batch in mine if not self._world.plan.fence else ():
            index = self._index(batch)
            assert index is not None
            if self._world.uniform(0.0, 1.0) < 0.5:
                self._place(batch, index, self._owner(batch.dst))
            else:
                self.fabric.drop(index, "torn down")
        for mover in who.movers.values():
            mover.teardown(peer)
        self._haunt(5.0, who.instance)

    # --- what faults do ---------------------------------------------------------------------------------------------

    def slow(self, name: str, extra_s: float, tp: int | None = None) -> None:
        """Moves of this process, or of one rank of it, take so much longer; 0.0 ends it."""
        self._extra_s[name, tp] = extra_s

    def stick(self, name: str, until: float) -> None:
        self._stuck_until[name] = max(until, self._stuck_until.get(name, 0.0))

    def lose(self, who: Mover) -> None:
        """Each move under way is lost, or has landed when it is said to be lost, or (behind a fence) lands in part, or
        after."""
        for batch in [b for b in self.fabric.pending if b.src.instance == who.instance and b.ghost is None]:
            index, chance = self._index(batch), self._world.uniform(0.0, 1.0)
            assert index is not None
            if chance < 0.4 and batch not in self._landing:
                if chance < 0.2 and self._world.plan.fence:
                    self._land_head(batch)
                self.fabric.drop(index)
            elif chance < 0.7 or not self._world.plan.fence:
                who.unsure.add(batch.number)
            else:
                batch.ghost = self.fabric.bytes_of(batch)
                who.wrote(batch.number, "connection lost")
        self._haunt(BUFFERED_S, who.instance)

    def crash(self, who: Mover, *, keep: bool, within_s: float) -> None:
        """`keep`: what it had posted may land, up to `within_s` later."""
        self.fabric.crash(who.instance, keep=keep)
        self._haunt(within_s, who.instance)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _index(self, batch: Batch) -> int | None:
        return next((i for i, other in enumerate(self.fabric.pending) if other is batch), None)

    def _begin(self, batch: Batch) -> None:
        if (index := self._index(batch)) is not None:
            self.fabric.begin(index)

    def _deliver(self, batch: Batch, who: Mover, give_up_at: float) -> None:
        world, index = self._world, self._index(batch)
        if index is None or batch.ghost is not None:  # a ghost has a time of its own
            return
        target = self._owner(batch.dst)
        stuck_until = self._stuck_until.get(who.name, 0.0)
        if world.now < stuck_until:
            world.at(stuck_until, lambda: self._deliver(batch, who, give_up_at))
        elif not self._stalled(who, target):
            self._place(batch, index, target)
        elif world.now < give_up_at or who.frozen:
            world.at(world.now + (1.0 if who.frozen else 0.25), lambda: self._deliver(batch, who, give_up_at))
        else:
            self.fabric.drop(index)

    def _stalled(self, who: Mover, target: Mover) -> bool:
        """A one-sided fabric needs neither process to run."""
        network, plan = self._world.network, self._world.plan
        cut = network.is_cut(who.name, target.name) or network.is_cut(target.name, who.name)
        return cut or (plan.fence and (who.frozen or target.frozen))

    def _owner(self, seat: Seat) -> Mover:
        """Who lives there now; it may be another life."""
        return self._world.process(seat.instance.partition("#")[0])

    def _place(self, batch: Batch, index: int, target: Mover) -> None:
        alive = target.alive and target.instance == batch.dst.instance
        placed = alive and self.fabric.joined(batch)
        if placed and self._world.plan.fence:
            self._enter(batch, index, target)
            return
        data = self.fabric.bytes_of(batch)
        self.fabric.deliver(index)
        self._say(batch, "lands" if placed else "is discarded")
        if placed:
            self._check(batch, data)

    def _enter(self, batch: Batch, index: int, target: Mover) -> None:
        """Past the fence, or turned away by it."""
        table, world = target.landings[batch.dst.rank].table, self._world
        pages = [pair.dst for pair in batch.pairs]
        claim = table.claim(batch.grant, batch.src, pages, len(pages) * batch.slice.size_bytes)
        if not isinstance(claim, Claim) or not table.enter(claim):
            self._say(batch, "is discarded")
            self.fabric.drop(index, f"discarded: {claim}")
            return
        self._landing.append(batch)
        most = world.choice(LANDING_S) if batch.ghost is None else TRICKLE_S
        due = world.now + world.uniform(0.0, most)
        world.at(due, lambda: self._placed(batch, claim, target))

    def _placed(self, batch: Batch, claim: Claim, target: Mover) -> None:
        """The last byte of an entered move is in, whatever was revoked meanwhile."""
        world = self._world
        if target.frozen:
            world.at(world.now + 0.25, lambda: self._placed(batch, claim, target))
            return
        self._landing.remove(batch)
        if not target.alive:
            return
        landing, index = target.landings[batch.dst.rank], self._index(batch)
        if index is None:  # its prefill is dead, or cut off
            landing.table.abandon(claim)
            landing.table.leave(claim)
            return
        verdict = self._scatter(batch, claim, target)
        self.fabric.drop(index, f"discarded: {verdict}" if verdict else "")

    def _land_head(self, batch: Batch) -> None:
        """The first half of its pages, before the connection breaks."""
        target, part = (
            self._owner(batch.dst),
            msgspec.structs.replace(batch, pairs=batch.pairs[: len(batch.pairs) // 2]),
        )
        alive = target.alive and not target.frozen and target.instance == batch.dst.instance
        if not part.pairs or not alive or not self.fabric.joined(batch):
            return
        table, pages = target.landings[batch.dst.rank].table, [pair.dst for pair in part.pairs]
        claim = table.claim(batch.grant, batch.src, pages, len(pages) * batch.slice.size_bytes)
        if isinstance(claim, Claim) and table.enter(claim):
            self._scatter(part, claim, target)

    def _scatter(self, batch: Batch, claim: Claim, target: Mover) -> Verdict:
        data, pool = self.fabric.bytes_of(batch), target.pools[batch.dst.rank.tp]
        assert pool is not None
        slicing.scatter(memoryview(data), claim.slice, claim.pages, pool.memory)
        self._say(batch, "lands")
        self._check(batch, data)
        return target.landings[batch.dst.rank].table.finish(claim)

    def _check(self, batch: Batch, data: bytes) -> None:
        self._world.pages.landed(batch, data)

    def _say(self, batch: Batch, what: str) -> None:
        ghost = " (ghost)" if batch.ghost is not None else ""
        text = f"move {batch.number} of grant {batch.grant} to {batch.dst} {what}{ghost}"
        self._world.say(batch.src.instance, text)

    def _haunt(self, within_s: float, src: Instance) -> None:
        """Every ghost of this instance that has no time yet gets one."""
        world = self._world
        for batch in self.fabric.pending:
            if batch.src.instance == src and batch.ghost is not None and batch not in self._haunting:
                self._haunting.append(batch)
                world.at(world.now + world.uniform(0.0, within_s), lambda batch=batch: self._ghost(batch))  # type: ignore[misc]

    def _ghost(self, batch: Batch) -> None:
        self._haunting.remove(batch)
        index = self._index(batch)
        if index is not None and batch not in self._landing:
            self._place(batch, index, self._owner(batch.dst))
