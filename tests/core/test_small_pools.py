"""Small pools, everything that can happen in them, in every order: no wait without end, and no page too many.

A world is a pool of few pages, and a few hand-offs. What can happen at a moment is a *move*: the engine steps or ends
one request, answers a retract, an abort or a finish; a hand-off comes in, fails, drains, or is lost in quarantine; a
client leaves. A world in which no move is left is over: whoever still waits at the door lacks pages that are in
quarantine, and the queue's clock ends him.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdplane.core.ids import Rid
from pdplane.core.node import Limits
from pdplane.core.pages import Page
from pdplane.core.retract import Phase, Running

from .pool import HandOff, Pool

Move = tuple[str, str]  # what, who


class Wish(msgspec.Struct, frozen=True):
    """One hand-off. `fails`: its pages drain, and come back. `lost`: they never do. `leaves`: its client may leave at
    any time; `stops`: its answer may end at any token; `late`: it comes at any time, not at the start."""

    tokens: int
    max_new: int
    priority: int = 0
    fails: bool = False
    lost: bool = False
    leaves: bool = False
    stops: bool = False
    late: bool = False


class World:
    def __init__(self, limits: Limits, wishes: list[Wish]) -> None:
        self.pool = Pool(limits)
        self.wishes = {f"r{number}": wish for number, wish in enumerate(wishes)}
        self.to_come = [name for name, wish in self.wishes.items() if wish.tokens <= limits.pages * limits.page_size]
        self.seen: set[str] = set()
        for name in list(self.to_come):
            if not self.wishes[name].late:
                self._ask(name)

    def _ask(self, name: str) -> None:
        wish = self.wishes[name]
        self.to_come.remove(name)
        self.pool.ask(name, wish.tokens, wish.max_new, wish.priority)

    def moves(self) -> list[Move]:
        found: list[Move] = [("ask", name) for name in self.to_come]
        for name, off in self.pool.offs.items():
            found += self._of_hand_off(name, off)
        for request in self.pool.batch.running.values():
            found += self._of_running(request)
        return found

    def _of_hand_off(self, name: str, off: HandOff) -> list[Move]:
        if off.gone or not off.pages:
            return []
        wish, state = self.wishes[name], self.pool.ledger.state_of(off.pages[0])
        if state is Page.GRANTED:
            return [("fail" if wish.fails or wish.lost else "fill", name)]
        if state is Page.DRAINING:
            return [("give_up" if wish.lost else "prove", name)]
        return []

    def _of_running(self, request: Running) -> list[Move]:
        name, limits = str(request.rid), self.pool.limits
        wish, need = self.wishes[name], self.pool.offs[name].need
        ended = request.tokens == wish.tokens + need.max_new - 1
        found: list[Move] = []
        if request.phase is Phase.SPILLING:
            found.append(("retract", name))
        if request.leaving or (request.phase is not Phase.PARKED and (ended or wish.stops)):
            found.append(("release", name))
        elif wish.leaves:
            found.append(("cancel", name))
        if request.steps and not ended and request.tokens < len(request.pages) * limits.page_size:
            found.append(("step", name))
        return found

    def do(self, move: Move) -> None:
        what, name = move
        granted = len(self.pool.granted)
        if what == "ask":
            self._ask(name)
        elif what == "step":
            self.pool.compute(name, self.pool.batch.running[Rid(name)].tokens + 1)
        elif what == "prove":
            self.pool.offs[name].gone = True
            self.pool.prove(name)
        else:
            getattr(self.pool, what)(name)
        if what == "give_up":
            self.pool.offs[name].gone = True
        self.seen.update(type(effect).__name__ for effect in self.pool.log)
        places = [r for r in self.pool.batch.running.values() if r.phase is not Phase.PARKED]
        assert len(places) <= self.pool.limits.max_running
        assert self.pool.batch.full == (len(places) == self.pool.limits.max_running)
        if len(self.pool.granted) > granted:
            self.growth_of_one_step_is_free()
        self.pool.log.clear()

    def growth_of_one_step_is_free(self) -> None:
        """Granted + filled + active + the largest growth of one step of what runs <= capacity, at every admission."""
        growing = [r for r in self.pool.batch.running.values() if r.steps and len(r.pages) < r.most]
        assert self.pool.ledger.free_count >= len(growing)

    def over(self) -> None:
        pool = self.pool
        assert len(pool.batch) == len(pool.reserve) == pool.batch.parked == 0, "somebody waits for ever"
        quarantined = pool.ledger.counts[Page.QUARANTINED]
        assert pool.ledger.free_count + quarantined == pool.limits.pages
        waiting = [off for off in pool.door._waiting]
        assert not waiting or waiting[0].need.pages > pool.ledger.free_count, "nobody is let in though there is room"

    def key(self) -> tuple[object, ...]:
        """All that may make a difference to what comes; which page has which number does not."""
        pool = self.pool
        offs = tuple(
            (off.gone, len(off.pages), pool.ledger.state_of(off.pages[0]) if off.pages and not off.gone else None)
            for off in pool.offs.values()
        )
        batch = tuple(
            (r.rid, r.phase, r.leaving, r.aborting, len(r.pages), r.tokens, r.rank) for r in pool.batch.running.values()
        )
        queue = tuple(self.to_come), tuple((entry.item.rid, entry.overtaken) for entry in pool.door._waiting._entries)
        return offs, batch, queue, tuple(pool.batch._hungry), tuple(r.rid for r in pool.door._arrived.values())


def explore(limits: Limits, wishes: list[Wish]) -> tuple[int, set[str]]:
    """Every order of moves, depth first, each state reached by playing its moves from the start. Fails where one does
    not end, or comes back to where it was: that is a wait without end too. Returns how many states there are, and
    what was asked of the engine on the way to any of them."""
    start = World(limits, wishes)
    done: set[object] = set()
    path = {start.key(): iter(start.moves())}
    played: list[Move] = []
    seen: set[str] = set()
    while path:
        key, options = next(reversed(path.items()))
        move = next(options, None)
        if move is None:
            done.add(key)
            path.popitem()
            if played:
                played.pop()
            continue
        world = World(limits, wishes)
        for earlier in [*played, move]:
            world.do(earlier)
        at, moves = world.key(), world.moves()
        assert at not in path, f"{played} and {move} lead back"
        if at in done:
            continue
        if not moves:
            world.over()
        seen |= world.seen
        played.append(move)
        path[at] = iter(moves)
    return len(done), seen


def tight(pages: int, max_running: int = 2, reserve_tokens: int = 0, page_size: int = 1) -> Limits:
    return Limits(
        pages=pages, page_size=page_size, max_running=max_running, reserve_tokens=reserve_tokens, max_overtakes=1
    )


WORLDS = {
    "two that need more than there is": (tight(5), [Wish(2, 4, stops=True), Wish(2, 4, leaves=True)]),
    "three, one place": (tight(4, max_running=1), [Wish(1, 4), Wish(2, 3), Wish(1, 3, late=True)]),
    "three, two places": (tight(6), [Wish(2, 5), Wish(2, 4), Wish(2, 3)]),
    "priorities": (tight(5), [Wish(1, 5), Wish(2, 3, priority=1, late=True), Wish(1, 3), Wish(1, 2)]),
    "growth is kept": (tight(6, max_running=3, reserve_tokens=1), [Wish(1, 5), Wish(1, 5), Wish(1, 5)]),
    "pages lost": (tight(5, max_running=3), [Wish(1, 5), Wish(1, 5), Wish(2, 1, lost=True, priority=1, late=True)]),
    "pages drain": (tight(5), [Wish(1, 5), Wish(1, 4), Wish(1, 2, priority=1, fails=True, late=True)]),
    "pages lost, one place": (tight(5, max_running=1), [Wish(1, 5), Wish(1, 5, leaves=True), Wish(2, 1, lost=True)]),
}


@pytest.mark.parametrize("name", WORLDS)
def test_in_a_small_world_every_order_of_moves_ends(name: str) -> None:
    limits, wishes = WORLDS[name]
    states, seen = explore(limits, wishes)
    assert states > 10
    assert {"RetractEngine", "RestoreEngine"} <= seen
    assert ("FinishEngine" in seen) == ("lost" in name)


wishes = st.builds(
    Wish,
    tokens=st.integers(1, 12),
    max_new=st.integers(1, 12),
    priority=st.integers(0, 2),
    fails=st.booleans(),
    lost=st.integers(0, 4).map(lambda n: n == 0),
    leaves=st.booleans(),
    stops=st.booleans(),
    late=st.booleans(),
)


@given(
    limits=st.builds(
        tight,
        pages=st.integers(1, 12),
        max_running=st.integers(1, 4),
        reserve_tokens=st.integers(0, 6),
        page_size=st.integers(1, 4),
    ),
    wanted=st.lists(wishes, max_size=8),
    choices=st.randoms(use_true_random=False),
)
@settings(max_examples=300)
def test_in_any_world_a_random_order_of_moves_ends(limits: Limits, wanted: list[Wish], choices: object) -> None:
    world = World(limits, wanted)
    for _ in range(5000):
        moves = world.moves()
        if not moves:
            break
        world.do(choices.choice(moves))  # type: ignore[attr-defined]
    world.over()
