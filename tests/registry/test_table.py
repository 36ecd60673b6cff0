"""The registry's tables, without sockets and with time as an argument."""

from __future__ import annotations

from typing import Any

import pytest

from pdplane.core.ids import Rank, Room
from pdplane.registry.refused import MAX_REFUSED, RouteRefused
from pdplane.registry.rooms import RoomTable
from pdplane.registry.table import RouteTable
from pdplane.wire.registry import RankEndpoint

from .conftest import registration

TWO = {"attn_tp_size": 2}


def refused(status: int, table: RouteTable, **change: Any) -> str:
    with pytest.raises(RouteRefused) as raised:
        table.register(registration(**change), 0.0)
    assert raised.value.status == status
    return str(raised.value)


def test_a_group_is_ready_when_every_rank_is_there() -> None:
    table = RouteTable()
    table.register(registration(**TWO), 0.0)
    assert not table.ready
    table.register(registration(**TWO, attn_tp_rank=1, rank_port=4001), 0.0)
    assert table.ready
    assert table.endpoint(Rank(tp=1)) == RankEndpoint("10.0.0.1", 4001)


def test_one_rank_that_registers_twice_makes_no_group_of_two() -> None:
    table = RouteTable()
    table.register(registration(**TWO), 0.0)
    table.register(registration(**TWO), 0.0)
    assert not table.ready
    assert table.status(0, 0.0).missing == [Rank(tp=1)]
    with pytest.raises(RouteRefused, match=r"not fully registered yet \(1 workers registered\)\.") as raised:
        table.server_info()
    assert raised.value.status == 503


def test_a_rank_of_a_group_that_is_not_whole_is_not_found_yet() -> None:
    table = RouteTable()
    table.register(registration(**TWO), 0.0)
    with pytest.raises(RouteRefused) as raised:
        table.endpoint(Rank())
    assert raised.value.status == 503


def test_a_rank_that_the_group_has_not_is_404() -> None:
    table = RouteTable()
    table.register(registration(), 0.0)
    with pytest.raises(RouteRefused, match="dp_rank=0 cp_rank=0 tp_rank=5 pp_rank=0") as raised:
        table.endpoint(Rank(tp=5))
    assert raised.value.status == 404


def test_a_rank_registered_again_moves() -> None:
    table = RouteTable()
    table.register(registration(), 0.0)
    epoch = table.epoch
    table.register(registration(), 0.0)
    assert table.epoch == epoch
    table.register(registration(rank_port=4001), 0.0)
    assert table.endpoint(Rank()).rank_port == 4001
    assert table.epoch == epoch + 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pp_size", 2),
        ("page_size", 32),
        ("kv_cache_dtype", "bfloat16"),
        ("kv_cache_dtype", None),
        ("decode_allocation_policy", "prefill_complete"),
        ("dsv41_spec_layout", {"num_draft_tokens": 1}),
        ("kv_layout", "b"),
    ],
)
def test_ranks_of_one_prefill_must_agree_and_the_refusal_names_both_values(field: str, value: object) -> None:
    table = RouteTable()
    table.register(registration(**TWO, kv_layout="a"), 0.0)
    text = refused(400, table, **{**TWO, "attn_tp_rank": 1, "kv_layout": "a", field: value})
    assert text.startswith(f"{field} of rank dp0cp0tp1pp0 is {value!r}, the group registered ")


def test_a_layout_that_only_some_ranks_name_is_the_groups() -> None:
    table = RouteTable()
    table.register(registration(**TWO), 0.0)
    table.register(registration(**TWO, attn_tp_rank=1, kv_layout="a", prefill_http_port=30000), 0.0)
    info = table.server_info()
    assert info.kv_layout == "a"
    assert info.prefill_http_port == 30000


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attn_tp_rank": 1}, "attn_tp_rank 1 is not a rank of attn_tp_size 1"),
        ({"pp_rank": -1}, "pp_rank -1"),
        ({"attn_dp_size": 0}, "attn_dp_size 0"),
        ({"attn_tp_size": 70_000}, "a group of 70000 ranks"),
        ({"rank_port": 0}, "'10.0.0.1':0"),
        ({"rank_port": 65_536}, "'10.0.0.1':65536"),
        ({"rank_ip": ""}, "'':4000"),
        ({"page_size": 0}, "page_size 0"),
        ({"page_size": 2**70}, "is not from 1 to 1048576"),
        ({"pd_ttl_s": float("nan")}, "pd_ttl_s nan is no number of seconds"),
        ({"pd_ttl_s": float("inf")}, "pd_ttl_s inf is no number of seconds"),
        ({"rank_ip": "a" * 100_000}, "rank_ip has 100000 characters"),
        ({"pd_instance": "a" * 513}, "pd_instance has 513 characters"),
        ({"pd_instance": ""}, "pd_instance is empty"),
        ({"pd_ttl_s": 0.0}, "pd_ttl_s 0 is no number of seconds over 0"),
    ],
)
def test_what_no_rank_can_be_is_refused_and_leaves_nothing(change: dict[str, Any], named: str) -> None:
    table = RouteTable()
    assert named in refused(400, table, **change)
    assert table.status(0, 0.0).expected == 0


def test_a_new_instance_replaces_the_old_one_whole() -> None:
    table = RouteTable()
    for rank in (0, 1):
        table.register(registration(**TWO, attn_tp_rank=rank, pd_instance="p-1"), 0.0)
    table.register(registration(pd_instance="p-2", rank_port=5000, page_size=32), 0.0)
    assert table.instance == "p-2"
    assert table.ready
    assert table.server_info().page_size == 32
    assert table.endpoint(Rank()).rank_port == 5000


def test_a_replaced_instance_cannot_come_back() -> None:
    table = RouteTable()
    table.register(registration(pd_instance="p-1"), 0.0)
    table.register(registration(pd_instance="p-2", rank_port=5000), 0.0)
    assert "p-1 was replaced by p-2" in refused(409, table, pd_instance="p-1")
    assert table.endpoint(Rank()).rank_port == 5000


def test_deregistering_is_by_instance_and_the_last_rank_takes_the_shape_along() -> None:
    table = RouteTable()
    for rank in (0, 1):
        table.register(registration(**TWO, attn_tp_rank=rank, pd_instance="p-1"), 0.0)
    assert table.deregister("p-0") == 0
    assert table.ready
    assert table.deregister("p-1") == 2
    assert table.status(0, 0.0).expected == 0
    table.register(registration(page_size=32, pd_instance="p-1"), 0.0)
    assert table.ready


def test_ranks_without_an_instance_leave_together() -> None:
    table = RouteTable()
    table.register(registration(), 0.0)
    assert table.deregister("p-1") == 0
    assert table.deregister(None) == 1


# --- silence -----------------------------------------------------------------------------------------------------


def group_of_two(table: RouteTable, now: float, **more: Any) -> None:
    for rank in (0, 1):
        table.register(registration(**TWO, attn_tp_rank=rank, **more), now)


def test_a_rank_that_registered_once_and_named_no_time_stays() -> None:
    table = RouteTable()
    group_of_two(table, 0.0)
    table.expire(1e9)
    assert table.ready


def test_a_rank_that_falls_silent_is_missing_and_named() -> None:
    table = RouteTable()
    group_of_two(table, 0.0, pd_instance="p-1", pd_ttl_s=15.0)
    table.register(registration(**TWO, pd_instance="p-1", pd_ttl_s=15.0), 10.0)
    table.expire(14.9)
    assert table.ready
    epoch = table.epoch
    table.expire(15.0)
    with pytest.raises(RouteRefused, match=r"\(1 workers registered\)") as raised:
        table.endpoint(Rank())
    assert raised.value.status == 503
    status = table.status(0, 15.0)
    assert status.missing == status.expired == [Rank(tp=1)]
    assert [(each.rank, each.expires_in_s) for each in status.registered] == [(Rank(), 10.0)]
    assert table.epoch == epoch + 1


def test_a_rank_that_speaks_again_is_there_again() -> None:
    table = RouteTable()
    group_of_two(table, 0.0, pd_ttl_s=15.0)
    table.expire(20.0)
    group_of_two(table, 21.0, pd_ttl_s=15.0)
    assert table.ready
    assert table.status(0, 21.0).expired == []
    table.expire(36.0)
    assert table.registered == 0


def test_a_registry_may_set_a_time_for_those_that_named_none() -> None:
    table = RouteTable(expire_s=5.0)
    table.register(registration(**TWO), 0.0)
    table.register(registration(**TWO, attn_tp_rank=1, pd_ttl_s=50.0), 0.0)
    table.expire(5.0)
    assert table.status(0, 5.0).expired == [Rank()]


def test_the_shape_of_a_silent_group_is_known_until_another_comes() -> None:
    table = RouteTable()
    group_of_two(table, 0.0, pd_ttl_s=15.0)
    table.expire(15.0)
    status = table.status(0, 15.0)
    assert (status.expected, status.missing) == (2, [Rank(), Rank(tp=1)])
    table.register(registration(page_size=32), 16.0)
    assert table.ready
    assert table.server_info().page_size == 32
    assert table.status(0, 16.0).expired == []


def test_an_instance_that_was_silent_while_another_took_its_place_cannot_come_back() -> None:
    table = RouteTable()
    table.register(registration(pd_instance="p-1", pd_ttl_s=15.0), 0.0)
    table.expire(15.0)
    table.register(registration(pd_instance="p-2", pd_ttl_s=15.0), 16.0)
    assert "p-1 was replaced by p-2" in refused(409, table, pd_instance="p-1", pd_ttl_s=15.0)


# --- refusals ----------------------------------------------------------------------------------------------------


def test_who_did_not_fit_is_remembered_with_the_reason_until_it_fits() -> None:
    table = RouteTable()
    table.register(registration(**TWO), 0.0)
    for now, size in ((1.0, 32), (2.0, 64)):
        with pytest.raises(RouteRefused):
            table.register(registration(**TWO, attn_tp_rank=1, page_size=size), now)
    (last,) = table.status(0, 5.0).refused
    assert (last.rank, last.instance, last.ago_s) == (Rank(tp=1), None, 3.0)
    assert last.reason.startswith("page_size of rank dp0cp0tp1pp0 is 64, the group registered 16")
    table.register(registration(**TWO, attn_tp_rank=1), 6.0)
    assert table.status(0, 6.0).refused == []


def test_refusals_are_bounded_and_the_latest_comes_first() -> None:
    table = RouteTable()
    table.register(registration(pd_instance="p-0"), 0.0)
    table.register(registration(pd_instance="p-1"), 0.0)
    for number in range(MAX_REFUSED + 10):
        with pytest.raises(RouteRefused):
            table.register(registration(page_size=32, attn_dp_size=99, attn_dp_rank=number, pd_instance="p-0"), 1.0)
    found = table.status(0, 1.0).refused
    assert len(found) == MAX_REFUSED
    assert found[0].rank == Rank(dp=MAX_REFUSED + 9)


# --- rooms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("written", "still_there", "gone"), [(0.0, 239.9, 240.0), (119.0, 239.9, 240.0)])
def test_a_room_lives_for_one_to_two_terms(written: float, still_there: float, gone: float) -> None:
    rooms = RoomTable(0.0, ttl_s=120.0)
    rooms.put(Room(1), 0, 0.0)
    rooms.put(Room(7), 3, written)
    assert rooms.find([7, 8], still_there) == {"7": 3}
    assert rooms.find([7], gone) == {}
    assert len(rooms) == 0


def test_a_room_written_again_has_the_later_rank_and_a_new_term() -> None:
    rooms = RoomTable(0.0, ttl_s=120.0)
    rooms.put(Room(7), 3, 0.0)
    rooms.put(Room(7), 4, 130.0)
    assert len(rooms) == 1
    assert rooms.find([7], 250.0) == {"7": 4}


def test_long_silence_forgets_everything() -> None:
    rooms = RoomTable(0.0, ttl_s=120.0)
    rooms.put(Room(7), 3, 0.0)
    assert rooms.find([7], 1e9) == {}
    rooms.put(Room(8), 1, 1e9)
    assert rooms.find([8], 1e9 + 119) == {"8": 1}


def test_the_table_is_bounded_and_keeps_the_latest() -> None:
    rooms = RoomTable(0.0, capacity=100)
    for room in range(1, 1001):
        rooms.put(Room(room), room % 8, 1.0)
    assert len(rooms) <= 100
    assert rooms.find(range(951, 1001), 1.0) == {str(room): room % 8 for room in range(951, 1001)}
