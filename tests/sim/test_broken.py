"""Checkers are only worth something if they see faults: each seeded one is caught, and by it alone."""

from __future__ import annotations

from functools import cache

import pytest

from pdplane.core.rooms.receiver import Receiver
from pdplane.core.rooms.table import RECEIVER, SENDER
from pdplane.sim.broken import BROKEN, variant
from pdplane.sim.run import Caught, run_broken, run_seed


@cache
def catch(name: str) -> Caught:
    (caught,) = run_broken([name])
    return caught


@pytest.mark.parametrize("name", BROKEN)
def test_the_seeded_fault_is_caught_and_the_same_seed_holds_without_it(name: str) -> None:
    caught = catch(name)
    assert caught.seed is not None, f"{BROKEN[name].story}: not seen within {BROKEN[name].within_seeds} seeds"
    fault = BROKEN[name]
    honest = run_seed(caught.seed, pattern=fault.pattern, fence=fault.fence, dialect=fault.dialect)
    assert honest.violation == ""


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("free_at_abort", "O4"),
        ("success_at_submit", "O3"),
        ("resync_to_successor", "O4"),
        ("lost_identity_check", "O4|agreement"),
        ("freed_in_flight", "O2"),
        ("double_grant", "O2"),
        ("silent_failure", "crossing"),
        ("second_verdict", "verdict"),
        ("no_tombstone", "room"),
        ("teardown_trusted", "O4"),
        ("drained_trusted", "O4"),
        ("any_model", "O4"),
        ("half_a_prompt", "O3"),
        ("part_of_a_grant", "O3"),
        ("sent_becomes_failed", "verdict"),
        ("cached_abort", "O4"),
        ("shared_granted", "O2"),
        ("unproven_kept", "O3"),
        ("share_forgotten", "conservation"),
        ("shared_freed", "O2"),
        ("cached_boasted", "cached"),
        ("ready_too_early", "O4"),
        ("endless_hold", "wait"),
        ("freed_under_read", "O4"),
        ("freed_at_retract", "O2"),
        ("restored_elsewhere", "O2"),
        ("short_restore", "restore"),
        ("harvest_starved", "wait"),
        ("never_retracts", "end"),
        ("lacking_rank", "O3"),
        ("rank_ignored", "agreement"),
        ("reaper_by_order", "lease"),
        ("renewal_revives", "lease"),
        ("never_renews", "verdict"),
        ("freed_under_number", "lease"),
        ("endless_lease", "lease"),
        ("deaf_to_release", "back"),
        ("release_forgotten", "back"),
        ("second_read", "consumer"),
        ("stranger_releases", "confirm"),
        ("any_answer", "confirm"),
        ("replay_computed", "consumer"),
        ("refusal_forgotten", "back"),
        ("reader_untold", "back"),
        ("commit_unconfirmed", "confirm"),
        ("confirm_too_early", "confirm"),
        ("half_a_read", "confirm"),
        ("always_yes", "confirm"),
        ("refusal_ignored", "confirm"),
        ("silence_is_yes", "confirm"),
        ("no_digest", "prompt"),
        ("any_pages", "O3"),
        ("bytes_before_confirm", "confirm"),
        ("freed_before_fence", "O4"),
        ("head_of_bad_pages", "confirm"),
    ],
)
def test_it_is_caught_by_the_rule_that_it_breaks(name: str, rule: str) -> None:
    caught = catch(name)
    assert caught.violation.partition(": ")[0] in rule.split("|")


def test_a_variant_leaves_no_trace_in_the_core() -> None:
    before = (Receiver._move_pages, dict(RECEIVER), dict(SENDER))
    for name in BROKEN:
        with variant(name):
            pass
    assert (Receiver._move_pages, dict(RECEIVER), dict(SENDER)) == before


def test_an_unknown_variant_is_named_with_the_choices() -> None:
    with pytest.raises(ValueError, match="no broken variant 'nonsense'; choose one of free_at_abort"):
        run_seed(0, broken="nonsense")
