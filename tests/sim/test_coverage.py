"""What the plans reach: a rule that no run tries is a rule that nobody has checked."""

from __future__ import annotations

from collections import Counter

import pytest

from pdplane.core.layout import PARAMS, ROOMS
from pdplane.core.params.table import HOLDER, READER
from pdplane.core.rooms.table import RECEIVER, SENDER
from pdplane.sim.coverage import BEYOND, COUNTS, Reached, cells, report, unreached
from pdplane.sim.faults import StuckMoves
from pdplane.sim.patterns import PATTERN_NAMES
from pdplane.sim.plan import plan
from pdplane.sim.run import Outcome, reached_by_pattern, run_many, run_seed

SEEDS = 2 * len(PATTERN_NAMES)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """Two seeds of each pattern, mixed ones aside."""
    return run_many(SEEDS, jobs=1, coverage=True)


@pytest.fixture(scope="module")
def total(outcomes: list[Outcome]) -> Reached:
    total: Reached = Counter()
    for outcome in outcomes:
        total.update(outcome.reached)
    return total


def test_two_seeds_of_each_pattern_reach_most_of_the_table(total: Reached) -> None:
    assert sum(bool(total[cell]) for cell in cells((ROOMS,))) >= 70
    assert sum(bool(total[cell]) for cell in cells((PARAMS,))) >= 35


@pytest.mark.parametrize("dialect", [ROOMS, PARAMS])
def test_every_rarer_thing_happens(total: Reached, dialect: str) -> None:
    seldom = {"cut by quarantine", "teardown proofs", "foreign bytes"}
    assert [count for count in COUNTS[dialect] if count not in seldom and not total[count]] == []


def test_cells_beyond_honest_sessions_are_cells_and_are_not_reached(total: Reached) -> None:
    assert set(BEYOND) <= set(cells())
    assert [cell for cell in BEYOND if total[cell]] == []


def test_all_cells_of_the_table_are_named_once() -> None:
    assert len(set(cells())) == len(cells()) == sum(map(len, (RECEIVER, SENDER, HOLDER, READER)))


@pytest.mark.parametrize(
    ("pattern", "cell"),
    [
        ("stuck_moves", "decode Quarantine/quiet_all"),
        ("stuck_moves", "decode Quarantine/peer_failed"),
        ("stuck_moves", "prefill Draining/drain_limit"),
        ("operator", "decode Quarantine/operator_release"),
        ("mismatches", "decode Granted/row_bad"),
        ("lost_frames", "prefill New/grant"),
        ("lost_frames", "prefill Streaming/grant"),
        ("hold_expiry", "prefill Held/hold_end"),
        ("full_batch", "decode Success/cancel"),
        ("busy_prefill", "prefill Armed/cancel"),
        ("replays", "holder Released/read, another consumer"),
        ("replays", "holder Bound/read, another consumer"),
        ("between_hops", "holder Held/cancel"),
        ("late_reads", "holder Bound/lease_end"),
        ("late_reads", "reader Confirming/refused"),
        ("late_reads", "foreign bytes"),
        ("lost_renewals", "reader Reading/lost"),
        ("restarts_between", "reader Parked/unreachable"),
        ("tampered", "holder Held/read, of another prompt or other pages"),
        ("half_loads", "reader Draining/quiet, a head of the pages came"),
        ("half_loads", "reader Salvaging/confirmed"),
        ("full_decode", "reader Parked/cancel"),
    ],
)
def test_a_pattern_reaches_what_it_was_made_for(pattern: str, cell: str) -> None:
    dialect = ROOMS if cell.startswith(("decode", "prefill")) else PARAMS
    for seed in range(60):
        outcome = run_seed(seed, pattern=pattern, dialect=dialect, coverage=True)
        assert outcome.violation == ""
        if outcome.reached.get(cell):
            return
    pytest.fail(f"60 seeds of {pattern} do not reach {cell}")


def test_watching_changes_nothing_and_costs_nothing_when_it_is_off() -> None:
    quiet, watched = run_seed(7), run_seed(7, coverage=True)
    assert (quiet.events, quiet.verdicts, quiet.virtual_s) == (watched.events, watched.verdicts, watched.virtual_s)
    assert quiet.reached == {}


def test_the_report_names_what_was_never_reached(outcomes: list[Outcome]) -> None:
    calm = [outcome for outcome in outcomes if outcome.pattern == "calm" and outcome.dialect == ROOMS]
    lines = report(reached_by_pattern(calm))
    assert lines[1].startswith("calm ")
    assert "  never: decode Quarantine/operator_release" in lines
    assert not any("prefill Ahead/grant" in line for line in lines)
    assert "prefill Flushing/writes_done" not in unreached(reached_by_pattern(calm)[ROOMS, "calm"])
    assert not any("holder" in line for line in lines)


def test_stuck_moves_outlast_the_drain_limits_that_their_plans_draw() -> None:
    for seed in range(20):
        drawn = plan(seed, pattern="stuck_moves", dialect=ROOMS)
        longest = max(fault.for_s for fault in drawn.faults if isinstance(fault, StuckMoves))
        assert longest > 2.0 == min(drawn.decode_limits.drain_limit_s, 2.0)
