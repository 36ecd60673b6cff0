"""Random hands on the file store, with ranks that report as they like: whatever is answered is right, and everything
ends and is given back.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdplane.core.effects import AnswerFailed, RunPrefill, RunWhole
from pdplane.core.events import Released, ReleaseHold, Sampled
from pdplane.core.ids import Rid

from ..core.facing import limits
from ..core.facing_params import Engines, answers, cause
from .facing_store import FacingStore
from .failing import Again, Bend, FailsLate, fails, fails_and_confirms, fails_at, never_confirms

PROMPTS = [(b"a", 40, "ab"), (b"b", 64, "cdef"), (b"c", 17, "g"), (b"d", 1, ""), (b"e", 33, "hi")]


class StoreChaos:
    """One schedule, by `random`. `wrong`: requests that were answered from pages that were not theirs."""

    def __init__(self, folder: Path, random: Random) -> None:
        self.random = random
        ranks = random.choice([1, 2, 3])
        self.world = FacingStore(
            folder,
            ranks=ranks,
            watched=False,  # some of these breach the contract
            bends={rank: self._bend() for rank in range(ranks) if random.random() < 0.4},
            p_bends={rank: Again() for rank in range(ranks) if random.random() < 0.3},
            recompute=random.random() < 0.5,
            d_limits=limits(pages=random.choice([6, 16]), max_running=random.choice([1, 4])),
            p_limits=limits(pages=random.choice([6, 16])),
        )
        self.engines = Engines(self.world)
        self.wrong: list[str] = []
        self.rids: list[Rid] = []
        self.ended: set[Rid] = set()

    def _bend(self) -> Bend:
        kinds = [Again(), FailsLate(), fails, fails_and_confirms, never_confirms, fails_at(0), fails_at(1), fails_at(2)]
        return self.random.choice(kinds)

    def run(self, steps: int) -> None:
        hands = [
            self.first,
            self.first,
            self.second,
            self.second,
            self.leave,
            self.job,
            self.job,
            self.report,
            self.report,
        ]
        hands += [self.engine, self.engine, self.engine, self.time]
        for _ in range(steps):
            self.random.choice(hands)()
        self.settle()

    def first(self) -> None:
        name, tokens, keys = self.random.choice(PROMPTS)
        self.rids.append(self.world.ask(len(self.rids), tokens, name, keys=keys[: tokens // 16]))

    def second(self) -> None:
        name, tokens, keys = self.random.choice(PROMPTS)
        deadline = self.world.now + self.random.choice([2.0, 60.0, 60.0])
        number = len(self.rids)
        self.rids.append(self.world.wants(number, tokens, name, keys=keys[: tokens // 16], deadline=deadline))

    def leave(self) -> None:
        if self.rids:
            rid = self.random.choice(self.rids)
            box = self.world.p if rid.startswith("p") else self.world.d
            if self.random.random() < 0.2:
                self.world.p.take(ReleaseHold(rid, cause()))
            elif rid in box.node.requests:  # type: ignore[attr-defined]
                self.world.leave(box, rid)

    def job(self) -> None:
        if self.world.executor.jobs:
            self.world.executor.jobs.popleft()()

    def report(self) -> None:
        box = self.random.choice([self.world.p, self.world.d])
        self.world.reports(box, self.random.randrange(self.world.store.ranks))

    def engine(self) -> None:
        running = self.engines.running()
        if not running:
            return
        box, run = self.random.choice(running)
        if isinstance(run, RunPrefill):
            box.take(Sampled(rid=run.rid, token=1))
            self.engines.end(box, run.rid, self.random.choice(["", "", "", "fault"]))
        else:
            self.ends(run)

    def ends(self, run: RunWhole) -> None:
        """Decode's engine has the answer."""
        number = int(run.rid[1:])
        aborted = self.engines.aborted(self.world.d, run.rid)
        wrong = self.world.wrong_pages(number)
        self.engines.end(self.world.d, run.rid)
        if not aborted and self.world.may_leave(number):
            self.ended.add(run.rid)
            self.wrong += [run.rid] if wrong else []

    def time(self) -> None:
        self.world.wait(self.random.choice([0.1, 0.1, 0.5, 3.0]))

    def settle(self) -> None:
        for _ in range(40):
            while running := self.engines.running():
                box, run = running[0]
                if isinstance(run, RunPrefill):
                    box.take(Sampled(rid=run.rid, token=1))
                    box.take(Released(rid=run.rid))
                    self.engines.ended[run.rid] = self.engines.ended.get(run.rid, 0) + 1
                else:
                    self.ends(run)
            self.world.work()
            self.world.wait(10.0)

    def unanswered(self) -> list[str]:
        """Requests at decode without exactly one end."""
        bad = []
        for rid in (rid for rid in self.rids if rid.startswith("d")):
            failed = [answer for answer in answers(self.world.d, rid) if isinstance(answer, AnswerFailed)]
            if len(failed) + (rid in self.ended and not failed) != 1:
                bad.append(rid)
        return bad


@settings(max_examples=40, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 80))
def test_whatever_is_answered_is_right_and_everything_is_given_back(seed: int, steps: int) -> None:
    with TemporaryDirectory() as folder:
        chaos = StoreChaos(Path(folder), Random(seed))
        chaos.run(steps)
        assert chaos.wrong == []
        assert chaos.unanswered() == []
        assert chaos.world.idle()


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_does_the_same(seed: int) -> None:
    logs = []
    for _ in range(2):
        with TemporaryDirectory() as folder:
            chaos = StoreChaos(Path(folder), Random(seed))
            chaos.run(40)
            logs.append([repr(effect) for box in (chaos.world.p, chaos.world.d) for effect in box.log])
    assert logs[0] == logs[1]
