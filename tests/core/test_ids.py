"""Identities and the errors that a bad one raises at an edge."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.core.errors import Cause, Refused, aborted, busy, client_left, deadline
from pdplane.core.ids import MAX_ROOM, BadRoom, Instance, Rank, Room, Seat, parse_room, room_named


@given(st.integers(1, MAX_ROOM))
def test_a_room_is_any_positive_integer_of_63_bits(value: int) -> None:
    assert parse_room(value) == value


@pytest.mark.parametrize("value", [0, -1, MAX_ROOM + 1, 1.0, True, "7", None, [7], {}])
def test_anything_else_is_not_a_room_and_the_message_says_what_it_got(value: object) -> None:
    with pytest.raises(BadRoom, match="bootstrap_room") as raised:
        parse_room(value)
    assert repr(value) in str(raised.value)


def test_ranks_and_seats_are_values() -> None:
    assert Rank(tp=1) == Rank(0, 0, 1, 0)
    assert str(Seat(Instance("P1"), Rank(dp=2))) == "P1/dp2cp0tp0pp0"
    assert len({Seat(Instance("P1"), Rank()), Seat(Instance("P1"), Rank()), Seat(Instance("P2"), Rank())}) == 2


def test_a_client_that_left_is_nobodys_fault() -> None:
    assert client_left("decode").expected
    assert aborted("decode").expected
    assert not deadline("decode", 3).expected


def test_busy_says_when_to_come_back_and_that_it_is_safe() -> None:
    cause = busy("full", side="decode")
    assert (cause.status, cause.retryable, cause.retry_after_s) == (429, True, 1)


def test_a_refusal_carries_its_cause() -> None:
    cause = Cause("x", "y", 400, side="prefill")
    refused = Refused(cause)
    assert refused.cause is cause
    assert str(refused) == "x (prefill): y"


@pytest.mark.parametrize("text", ["", "0", "-1", "1.0", "x", str(2**63), "9" * 5000, "\u0661"])
def test_what_is_no_rooms_number_names_no_room(text: str) -> None:
    assert room_named(text) is None


def test_a_rooms_number_names_it() -> None:
    assert room_named(str(2**63 - 1)) == Room(2**63 - 1)
