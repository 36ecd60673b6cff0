"""Explicit data parallel ranks, the policy of a pair, and priorities: how a leg's words reach the role."""

from __future__ import annotations

from typing import Any

import pytest

from .test_http_pairing import PAIR, PATH, leg, post

BODIES: dict[str, dict[str, Any]] = {
    PATH: {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/generate": {"text": "x"},
}


@pytest.mark.parametrize("name", ["data_parallel_rank", "routed_dp_rank"])
@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_pinned_rank_reaches_the_role_by_either_name(name: str, role: str, path: str) -> None:
    service = leg(role)
    assert (await post(service, BODIES[path] | PAIR | {name: 1}, path)).status_code == 200
    assert (service.batch[0].dp_rank, service.batch[0].prefill_dp_rank) == (1, None)


async def test_the_prefills_rank_is_the_peers_at_decode_and_its_own_at_prefill() -> None:
    body = {"prompt": "x", "disagg_prefill_dp_rank": 2} | PAIR
    decode, prefill, whole = leg("decode"), leg("prefill"), leg("aggregated")
    for service in (decode, prefill, whole):
        assert (await post(service, body)).status_code == 200
    assert (decode.batch[0].dp_rank, decode.batch[0].prefill_dp_rank) == (None, 2)
    assert (prefill.batch[0].dp_rank, prefill.batch[0].prefill_dp_rank) == (2, None)
    assert (whole.batch[0].dp_rank, whole.batch[0].prefill_dp_rank) == (None, None)


async def test_ranks_hold_for_every_sample() -> None:
    service = leg()
    body = {"prompt": "x", "n": 2, "routed_dp_rank": 0, "disagg_prefill_dp_rank": 1, "priority": 3}
    assert (await post(service, body | PAIR | {"bootstrap_room": [7, 9]})).status_code == 200
    assert [(g.dp_rank, g.prefill_dp_rank, g.priority) for g in service.batch] == [(0, 1, 3), (0, 1, 3)]


async def test_a_rank_of_null_names_none() -> None:
    service = leg()
    body = {"prompt": "x", "data_parallel_rank": None, "routed_dp_rank": 1, "disagg_prefill_dp_rank": None} | PAIR
    assert (await post(service, body)).status_code == 200
    assert (service.batch[0].dp_rank, service.batch[0].prefill_dp_rank) == (1, None)


@pytest.mark.parametrize("name", ["data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"])
@pytest.mark.parametrize("value", ["1", 1.5, True, -1, [0], [0, 1], {}])
@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
async def test_what_is_no_rank_is_refused_by_name(name: str, value: object, role: str) -> None:
    service = leg(role)
    response = await post(service, {"prompt": "x", name: value} | PAIR)
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    assert service.batch == []


@pytest.mark.parametrize("path", BODIES)
async def test_two_names_that_contradict_each_other_are_refused_with_both_values(path: str) -> None:
    body = BODIES[path] | PAIR | {"data_parallel_rank": 1, "routed_dp_rank": 2}
    response = await post(leg(), body, path)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "rank_contradiction")
    assert "data_parallel_rank 1 contradicts routed_dp_rank 2" in response.json()["error"]["message"]


async def test_a_prefill_refuses_two_ranks_for_itself() -> None:
    body = {"prompt": "x", "routed_dp_rank": 0, "disagg_prefill_dp_rank": 1} | PAIR
    assert (await post(leg("prefill"), body)).status_code == 400
    assert (await post(leg("decode"), body)).status_code == 200


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_paired_under_another_policy_is_refused_naming_both(role: str) -> None:
    service = leg(role)
    response = await post(service, {"prompt": "x", "decode_allocation_policy": "prefill_complete"} | PAIR)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "policy_mismatch")
    assert "'prefill_complete'" in response.json()["error"]["message"]
    assert "'early'" in response.json()["error"]["message"]
    assert service.batch == []
    service.policy = "prefill_complete"
    same = await post(service, {"prompt": "x", "decode_allocation_policy": "prefill_complete"} | PAIR)
    assert same.status_code == 200


async def test_an_aggregated_worker_has_no_pair_and_so_no_policy_to_check() -> None:
    assert (await post(leg("aggregated"), {"prompt": "x", "decode_allocation_policy": "other"})).status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_a_priority_reaches_the_role_and_is_0_where_none_is_given(path: str) -> None:
    service = leg()
    for given, expected in (({"priority": -4}, -4), ({"priority": None}, 0), ({}, 0)):
        assert (await post(service, BODIES[path] | PAIR | given, path)).status_code == 200
        assert service.batch[0].priority == expected


@pytest.mark.parametrize("value", ["high", 1.5, True, [1]])
async def test_a_priority_is_a_whole_number(value: object) -> None:
    response = await post(leg("aggregated"), {"prompt": "x", "priority": value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")
