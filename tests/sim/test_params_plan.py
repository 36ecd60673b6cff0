"""What the seeds draw for the params dialect: leases, misused handles, and clients that leave between the hops."""

from __future__ import annotations

import pytest

from pdplane.core.layout import PARAMS
from pdplane.sim.drawn import Plan
from pdplane.sim.params_plan import SHORT_LEASES_S, TAMPERS
from pdplane.sim.patterns import PATTERN_NAMES
from pdplane.sim.plan import plan

SEEDS = 40


def drawn(pattern: str) -> list[Plan]:
    return [plan(seed, pattern=pattern, dialect=PARAMS) for seed in range(SEEDS)]


def test_about_a_third_of_the_seeds_speak_params() -> None:
    assert 0.25 < sum(plan(seed).dialect == PARAMS for seed in range(400)) / 400 < 0.42


def test_decode_places_the_pages_itself_whatever_the_fleet() -> None:
    assert all(made.fence for name in ("calm", "mixed", "late_reads") for made in drawn(name))


def test_calm_worlds_have_long_leases_and_honest_routers() -> None:
    for made in drawn("calm"):
        assert made.prefill_limits.hold_term_s == 30.0
        assert not any(request.replays or request.tampers or request.decode_delay_s for request in made.requests)


@pytest.mark.parametrize("pattern", ["hold_expiry", "lost_renewals", "late_reads", "full_decode", "half_loads"])
def test_leases_are_short_where_they_are_to_end(pattern: str) -> None:
    assert {made.prefill_limits.hold_term_s for made in drawn(pattern)} <= set(SHORT_LEASES_S)


def test_both_load_failure_policies_are_drawn() -> None:
    assert {made.decode_limits.recompute for made in drawn("crash_prefill")} == {True, False}


def test_handles_are_replayed_while_they_are_read_and_after() -> None:
    replayed = {request.replays for made in drawn("replays") for request in made.requests}
    assert replayed == {"", "sent", "ended"}


def test_handles_are_tampered_with_in_every_way() -> None:
    tampered = {request.tampers for made in drawn("tampered") for request in made.requests}
    assert tampered == {"", *TAMPERS}


def test_clients_leave_between_the_hops_sooner_and_later_than_the_lease() -> None:
    gaps = [
        (request.decode_delay_s, made.prefill_limits.hold_term_s)
        for made in drawn("between_hops")
        for request in made.requests
        if request.leaves_after_s is not None
    ]
    assert any(0.0 < gap_s < lease_s for gap_s, lease_s in gaps)
    assert any(gap_s > lease_s for gap_s, lease_s in gaps)


def test_a_full_decode_keeps_some_holds_waiting_and_knows_nothing_of_others() -> None:
    for made in drawn("full_decode"):
        assert made.decode_limits.max_running == 1
        assert any(request.leaves_after_s is None and request.max_new > 50 for request in made.requests)
    assert all(any(request.decode_delay_s >= 20.0 for request in made.requests) for made in drawn("full_decode"))


def test_no_request_of_the_dialect_has_a_room_or_names_a_rank() -> None:
    names = [name for name in PATTERN_NAMES if name in ("mismatches", "cancels", "rank_skew")]
    requests = [request for name in names for made in drawn(name) for request in made.requests]
    assert all(request.room_of is None and not request.wrong_rank for request in requests)
