"""What a router writes into a leg: the ranks, by either of their names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdplane.core.errors import Refused
from pdplane.wire.legs import LegFields


@pytest.mark.parametrize(
    ("newer", "older", "rank"), [(None, None, None), (0, None, 0), (None, 3, 3), (2, 2, 2), (0, 0, 0)]
)
def test_either_name_pins_the_rank(newer: int | None, older: int | None, rank: int | None) -> None:
    assert LegFields(routed_dp_rank=newer, data_parallel_rank=older).own_rank() == rank


def test_rank_0_contradicts_rank_1_like_any_other() -> None:
    with pytest.raises(Refused, match="data_parallel_rank 1 contradicts routed_dp_rank 0"):
        LegFields(routed_dp_rank=0, data_parallel_rank=1).own_rank()


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("routed_dp_rank", LegFields.own_rank),
        ("data_parallel_rank", LegFields.own_rank),
        ("disagg_prefill_dp_rank", LegFields.prefill_rank),
    ],
)
def test_a_negative_rank_names_its_field(name: str, read: Callable[[LegFields], int | None]) -> None:
    with pytest.raises(Refused) as refused:
        read(LegFields(**{name: -1}))
    assert (refused.value.cause.status, refused.value.cause.param) == (400, name)
