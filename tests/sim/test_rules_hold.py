"""Fleets of the production core under every fault pattern: no rule breaks, every request ends, nothing is left."""

from __future__ import annotations

import pytest

from pdplane.core.layout import PARAMS, ROOMS
from pdplane.sim.params_patterns import PARAMS_PATTERN_NAMES
from pdplane.sim.patterns import PATTERN_NAMES
from pdplane.sim.plan import plan
from pdplane.sim.run import run_many, run_seed

SEEDS = 2


@pytest.mark.parametrize("fence", [True, False], ids=["local_fence", "one_sided"])
@pytest.mark.parametrize("pattern", PATTERN_NAMES)
def test_no_rule_breaks(pattern: str, fence: bool) -> None:
    outcomes = [run_seed(seed, pattern=pattern, fence=fence, dialect=ROOMS) for seed in range(SEEDS)]
    assert [outcome.violation for outcome in outcomes] == [""] * SEEDS
    assert all(sum(outcome.verdicts.values()) == outcome.requests for outcome in outcomes)


@pytest.mark.parametrize("pattern", PARAMS_PATTERN_NAMES)
def test_no_rule_breaks_by_lease_and_handle(pattern: str) -> None:
    outcomes = [run_seed(seed, pattern=pattern, dialect=PARAMS) for seed in range(SEEDS)]
    assert [outcome.violation for outcome in outcomes] == [""] * SEEDS
    assert all(sum(outcome.verdicts.values()) == outcome.requests for outcome in outcomes)


@pytest.mark.parametrize("dialect", [ROOMS, PARAMS])
def test_in_calm_every_request_is_answered(dialect: str) -> None:
    outcomes = [run_seed(seed, pattern="calm", dialect=dialect) for seed in range(SEEDS)]
    assert [outcome.verdicts for outcome in outcomes] == [{"ok": outcome.requests} for outcome in outcomes]


def test_the_seeds_between_them_draw_both_dialects_every_pattern_both_transports_and_all_fleet_shapes() -> None:
    plans = [plan(seed) for seed in range(600)]
    by_dialect = {name: [drawn for drawn in plans if drawn.dialect == name] for name in (ROOMS, PARAMS)}
    assert {drawn.pattern for drawn in by_dialect[ROOMS]} == set(PATTERN_NAMES)
    assert {drawn.pattern for drawn in by_dialect[PARAMS]} == set(PARAMS_PATTERN_NAMES)
    assert {drawn.fence for drawn in plans} == {True, False}
    assert {(len(drawn.prefills), len(drawn.decodes)) for drawn in plans} == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_a_world_of_one_dialect_alone_is_asked_for_by_name() -> None:
    assert plan(3, pattern="replays").dialect == PARAMS
    assert plan(3, pattern="duplicate_rooms").dialect == ROOMS
    with pytest.raises(ValueError, match="there is no dialect 'french'; choose rooms or params"):
        plan(3, dialect="french")
    with pytest.raises(ValueError, match="it has no worlds without one"):
        plan(3, dialect=PARAMS, fence=False)
    with pytest.raises(ValueError, match="there is no pattern 'duplicate_rooms'"):
        plan(3, dialect=PARAMS, pattern="duplicate_rooms")


def test_many_seeds_come_back_in_order_from_several_processes() -> None:
    seen: list[tuple[int, int]] = []
    outcomes = run_many(25, start=100, jobs=2, progress=lambda done, of: seen.append((done, of)))
    assert [outcome.seed for outcome in outcomes] == list(range(100, 125))
    assert [outcome.violation for outcome in outcomes] == [""] * 25
    assert seen[-1] == (25, 25)
