"""Faults of real systems: seen where the rules have the hole, and impossible under ours."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest

from pdplane.cli.main import main
from pdplane.sim.incidents.incident import Verdict, judge, request, world
from pdplane.sim.incidents.table import INCIDENTS, incidents_main


@cache
def verdict(number: str) -> Verdict:
    return judge(INCIDENTS[number])


@pytest.mark.parametrize("number", INCIDENTS)
def test_it_breaks_the_rule_named_where_the_rules_have_the_hole(number: str) -> None:
    assert verdict(number).theirs.violation.partition(": ")[0] == INCIDENTS[number].breaks


@pytest.mark.parametrize("number", INCIDENTS)
def test_it_breaks_nothing_under_our_rules_though_it_comes_about(number: str) -> None:
    assert verdict(number).ours.violation == ""
    assert verdict(number).missed == []
    assert sum(verdict(number).ours.verdicts.values()) == len(INCIDENTS[number].world.requests)


def test_a_read_that_outlasts_its_lease_brings_anothers_bytes_and_is_not_served() -> None:
    ours = verdict("I23").ours
    assert ours.reached["foreign bytes"] > 0
    assert ours.verdicts["expired"] > 0


def test_a_spent_handle_leaves_its_first_reader_undisturbed() -> None:
    assert set(verdict("I12").ours.verdicts) == {"ok"}


def test_a_scenario_that_does_not_bring_its_fault_about_has_shown_nothing() -> None:
    idle = msgspec.structs.replace(INCIDENTS["I06"], world=world([request(0)]))
    judged = judge(idle)
    assert judged.ours.violation == judged.theirs.violation == ""
    assert judged.missed == ["holder Held/cancel"]
    assert not judged.as_it_should_be


def test_the_table_tells_both_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["incidents", "I06"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "I06  cancelled between the hops"
    assert lines[1].startswith("  with the hole  back: p0#1 has not given back the pages of r0.0.0p")
    assert lines[2].startswith("  our rules      all held; ends: client_left 1, ok 1")


def test_an_unknown_incident_is_named_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert incidents_main(["I99"]) == 2
    assert "there is no incident I99; choose among I04, I05" in capsys.readouterr().err
