"""The reserve: what it allows can always be met in some order, and what cannot be met it does not allow (I13)."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdplane.core.pages import Ledger, Owner, Page
from pdplane.core.reserve import Claim, Reserve, safe


@st.composite
def claims(draw: st.DrawFn, most: int = 5) -> list[Claim]:
    found = []
    for _ in range(draw(st.integers(0, most))):
        held = draw(st.integers(0, 6))
        found.append(Claim(held, held + draw(st.integers(0, 6)), draw(st.booleans())))
    return found


def brute_force(free: int, world: list[Claim]) -> bool:
    """Some order in which those that run come first, and each one's rest fits when its turn comes."""

    def works(order: tuple[Claim, ...]) -> bool:
        left = free
        for claim in order:
            if claim.remaining > left:
                return False
            left += claim.held
        return True

    running = [claim for claim in world if claim.running]
    waiting = [claim for claim in world if not claim.running]
    return any(works(first + then) for first in permutations(running) for then in permutations(waiting))


@given(st.integers(0, 8), claims())
@settings(max_examples=300, deadline=None)
def test_safe_is_what_trying_every_order_finds(free: int, world: list[Claim]) -> None:
    assert safe(free, world) == brute_force(free, world)


@given(st.integers(0, 8), claims())
def test_a_free_page_more_never_makes_a_world_unsafe(free: int, world: list[Claim]) -> None:
    assert not safe(free, world) or safe(free + 1, world)


@given(st.integers(0, 8), claims())
@settings(max_examples=300, deadline=None)
def test_in_a_safe_world_somebody_can_always_take_a_place_in_the_batch(free: int, world: list[Claim]) -> None:
    waiting = [claim for claim in world if not claim.running]
    if not waiting or not safe(free, world):
        return
    may = []
    for claim in waiting:
        others = [other for other in world if other is not claim]
        may.append(safe(free, [*others, Claim(claim.held, claim.most, running=True)]))
    assert any(may)


def reserve_of(pages: int) -> tuple[Ledger, Reserve]:
    ledger = Ledger(pages)
    return ledger, Reserve(ledger)


def enter(ledger: Ledger, reserve: Reserve, name: str, pages: int, most: int) -> None:
    assert reserve.may_admit(pages, most)
    reserve.admit(Owner(name), pages, most)
    ledger.take(pages, Page.ACTIVE, Owner(name))


def test_two_that_would_wait_for_each_other_are_not_let_in_together() -> None:
    ledger, reserve = reserve_of(8)
    enter(ledger, reserve, "a", 4, 8)
    assert reserve.may_admit(2, 4)
    assert not reserve.may_admit(4, 8)


def test_the_last_page_goes_to_the_one_that_can_end_with_it() -> None:
    ledger, reserve = reserve_of(8)
    enter(ledger, reserve, "long", 4, 8)
    enter(ledger, reserve, "short", 3, 4)
    assert not reserve.may_grow(Owner("long"))
    assert reserve.may_grow(Owner("short"))


def test_one_that_waits_for_its_place_lends_nothing_to_those_that_run() -> None:
    """A sole place: its holder needs pages of one that cannot start before the holder ends."""
    ledger, reserve = reserve_of(10)
    enter(ledger, reserve, "runs", 4, 8)
    reserve.run(Owner("runs"))
    assert not reserve.may_admit(4, 4)
    assert reserve.may_admit(2, 4)


def test_what_was_refused_is_asked_again_only_after_a_change() -> None:
    ledger, reserve = reserve_of(4)
    stamp = reserve.stamp
    enter(ledger, reserve, "a", 2, 2)
    assert reserve.stamp != stamp
    stamp = reserve.stamp
    reserve.drop(Owner("nobody"))
    assert reserve.stamp == stamp
    reserve.drop(Owner("a"))
    assert reserve.stamp != stamp


class _Job:
    def __init__(self, name: str, pages: int, most: int) -> None:
        self.owner, self.pages, self.most, self.held = Owner(name), pages, most, 0


@given(
    capacity=st.integers(1, 12),
    places=st.integers(1, 3),
    wishes=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=12),
    choices=st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_a_growth_simulation_never_stands_still(
    capacity: int, places: int, wishes: list[tuple[int, int]], choices: object
) -> None:
    """Admission, transfer, places and growth in any order that the reserve allows: all that fit end."""
    ledger, reserve = reserve_of(capacity)
    queue = [
        _Job(f"j{n}", pages, min(pages + more, capacity)) for n, (pages, more) in enumerate(wishes) if pages <= capacity
    ]
    filled: list[_Job] = []
    running: list[_Job] = []
    ended = 0
    wanted = len(queue)
    while ended < wanted:
        moves: list[tuple[str, _Job]] = [("admit", j) for j in queue if reserve.may_admit(j.pages, j.most)]
        if len(running) < places:
            moves += [("run", job) for job in filled if reserve.may_run(job.owner)]
        moves += [("grow", job) for job in running if job.held < job.most and reserve.may_grow(job.owner)]
        moves += [("end", job) for job in running if job.held == job.most]
        assert moves, "everybody waits for everybody"
        what, job = choices.choice(moves)  # type: ignore[attr-defined]
        if what == "admit":
            queue.remove(job)
            reserve.admit(job.owner, job.pages, job.most)
            ledger.take(job.pages, Page.ACTIVE, job.owner)
            job.held = job.pages
            filled.append(job)
        elif what == "run":
            filled.remove(job)
            reserve.run(job.owner)
            running.append(job)
        elif what == "grow":
            ledger.take(1, Page.ACTIVE, job.owner)
            reserve.grown(job.owner)
            job.held += 1
        else:
            running.remove(job)
            reserve.drop(job.owner)
            mine = [p for p in range(capacity) if ledger.owner_of(p) == job.owner]  # type: ignore[arg-type]
            ledger.free(mine, job.owner)  # type: ignore[arg-type]
            ended += 1
    assert ledger.free_count == capacity
