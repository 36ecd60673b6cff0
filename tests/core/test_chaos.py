"""Random hands on two facing machines: whatever happens in whatever order, everything ends, once, and is given back."""

from __future__ import annotations

from random import Random

import pytest

from pdplane.core.effects import AbortEngine, AnswerFailed, AnswerRow, MovePages, RunDecode, RunPrefill
from pdplane.core.events import Computed, ConnLost, Released, Sampled
from pdplane.core.rooms.table import R

from .facing import Box, Facing, limits

ROOMS = 8


class Chaos:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = Facing(
            fence=self.random.random() < 0.5,
            d_limits=limits(pages=self.random.choice([4, 6, 16]), max_running=self.random.choice([1, 2, 16])),
            p_limits=limits(pages=self.random.choice([4, 16]), max_running=self.random.choice([1, 4])),
        )
        self.moved: set[int] = set()
        self.arrived: set[tuple[int, str]] = set()
        self.released: set[tuple[str, str]] = set()

    def run(self, steps: int = 120) -> None:
        for _ in range(steps):
            self.random.choice(
                [self.leg, self.leg, self.cancel, self.pump, self.frame, self.engine, self.engine, self.move, self.time]
            )()
        self.settle()

    def leg(self) -> None:
        number = self.random.randint(1, ROOMS)
        side = self.random.choice(["d", "p"])
        if (number, side) in self.arrived:
            return
        self.arrived.add((number, side))
        world = self.world
        if number not in world.legs:
            tokens = self.random.randint(1, 64)
            world.leg(number, tokens, max_new=self.random.randint(1, 40), deadline=world.now + 60.0)
        getattr(world, side).take(world.legs[number])

    def cancel(self) -> None:
        if self.world.legs:
            number = self.random.choice(list(self.world.legs))
            self.world.cancel(self.random.choice([self.world.d, self.world.p]), number)

    def pump(self) -> None:
        self.world.pump()

    def frame(self) -> None:
        if self.world.mail:
            item = self.world.mail.popleft()
            if item[0] in self.world.conns:
                self.world._hand_over(*item)

    def engine(self) -> None:
        box, run = self.running()
        if box is None or run is None:
            return
        aborted = any(effect.rid == run.rid for effect in box.all(AbortEngine))
        if isinstance(run, RunPrefill):
            tokens = next(leg.prompt.tokens for leg in self.world.legs.values() if leg.rid == run.rid)
            if not aborted and self.random.random() < 0.4:
                box.take(Computed(rid=run.rid, tokens=self.random.randint(0, tokens)))
                return
            if not aborted or self.random.random() < 0.5:
                box.take(Sampled(rid=run.rid, token=1, ended=self.random.choice([None, "stop"])))
        self.released.add((box.node.side, run.rid))
        box.take(Released(rid=run.rid, error=self.random.choice(["", "", "", "fault"])))

    def running(self) -> tuple[Box | None, RunPrefill | RunDecode | None]:
        world = self.world
        runs: list[tuple[Box, RunPrefill | RunDecode]] = [(world.p, run) for run in world.p.all(RunPrefill)]
        runs += [(world.d, run) for run in world.d.all(RunDecode)]
        runs = [(box, run) for box, run in runs if (box.node.side, run.rid) not in self.released]
        return self.random.choice(runs) if runs else (None, None)

    def move(self) -> None:
        moves = [move for move in self.world.p.all(MovePages) if move.move not in self.moved]
        if moves:
            move = self.random.choice(moves)
            self.moved.add(move.move)
            self.world.land(move)

    def time(self) -> None:
        what = self.random.random()
        if what < 0.3:
            self.world.cut(reachable=self.random.random() < 0.7)
        elif what < 0.4 and self.world.conns:
            conn = self.random.choice(list(self.world.conns))
            dialler, _ = self.world.conns.pop(conn)  # only decode notices
            dialler.take(ConnLost(conn))
        else:
            self.world.reachable = True
            self.world.wait(self.random.choice([0.1, 0.5, 1.0, 3.0]), pump=self.random.random() < 0.8)

    def settle(self) -> None:
        """Transport and engine return all that they owe; time does the rest."""
        world = self.world
        world.reachable = True
        for _ in range(60):
            world.pump()
            while self.running()[0] is not None:
                self.engine()
            for move in world.p.all(MovePages):
                if move.move not in self.moved:
                    self.moved.add(move.move)
                    world.land(move)
            world.wait(2.0)


@pytest.mark.parametrize("base", range(0, 120, 10))
def test_everything_ends_once_and_is_given_back(base: int) -> None:
    for seed in range(base, base + 10):
        chaos = Chaos(seed)
        chaos.run()
        world = chaos.world
        assert world.idle(), seed
        ran = {run.rid for run in world.d.all(RunDecode)}
        for number, side in chaos.arrived:
            box, rid = getattr(world, side), world.legs[number].rid
            answers = box.answers(rid)
            assert len(answers) <= 1, seed
            assert answers or (side == "d" and rid in ran), (seed, number, side)
            if side == "d" and rid in ran:
                assert not any(isinstance(answer, AnswerRow) for answer in answers)
            if (number, "p") not in chaos.arrived:
                assert all(isinstance(answer, AnswerFailed) for answer in answers), "decode alone never succeeds"
        assert {world.d_state(number) for number in world.legs} <= {R.GONE}
