"""The registry's bodies, byte for byte."""

from __future__ import annotations

import json

import pytest

from pdplane.core.ids import Rank, Shape
from pdplane.wire import registry as wire
from pdplane.wire.registry import BadBody, PrefillRegistration, PrefillServerInfo, RankEndpoint

PUT = (
    b'{"attn_tp_size":4,"attn_tp_rank":3,"attn_cp_size":1,"attn_cp_rank":0,"attn_dp_size":1,"attn_dp_rank":0,'
    b'"pp_size":2,"pp_rank":1,"system_dp_size":1,"system_dp_rank":0,"rank_ip":"10.0.0.1","rank_port":4000,'
    b'"page_size":16,"kv_cache_dtype":"float32","kv_layout":null,"dsv41_spec_layout":null,'
    b'"load_balance_method":"follow_bootstrap_room","enable_dsa_cache_layer_split":false,'
    b'"enable_kv_cache_sharding":false,"prefill_http_port":30000,"decode_allocation_policy":"early",'
    b'"pd_instance":"p-1","pd_ttl_s":15.0}'
)
REGISTRATION = PrefillRegistration(
    attn_tp_size=4,
    attn_tp_rank=3,
    attn_cp_size=1,
    attn_cp_rank=0,
    attn_dp_size=1,
    attn_dp_rank=0,
    pp_size=2,
    pp_rank=1,
    system_dp_size=1,
    system_dp_rank=0,
    rank_ip="10.0.0.1",
    rank_port=4000,
    page_size=16,
    kv_cache_dtype="float32",
    prefill_http_port=30000,
    pd_instance="p-1",
    pd_ttl_s=15.0,
)
REQUIRED = [
    *("attn_tp_size", "attn_tp_rank", "attn_cp_size", "attn_cp_rank", "attn_dp_size", "attn_dp_rank", "pp_size"),
    *("pp_rank", "system_dp_size", "system_dp_rank", "rank_ip", "rank_port", "page_size", "kv_cache_dtype"),
]

INFO = PrefillServerInfo(
    attn_tp_size=4, attn_cp_size=1, dp_size=1, pp_size=2, page_size=16, kv_cache_dtype=None, prefill_http_port=30000
)
INFO_BYTES = (
    b'{"attn_tp_size":4,"attn_cp_size":1,"dp_size":1,"pp_size":2,"page_size":16,"kv_cache_dtype":null,'
    b'"follow_bootstrap_room":true,"enable_dsa_cache_layer_split":false,"enable_kv_cache_sharding":false,'
    b'"decode_allocation_policy":"early","prefill_http_port":30000,"target_tp_rank":null,"target_tp_ranks":null,'
    b'"target_cp_ranks":null,"target_pp_ranks":null,"required_dst_info_num":null,'
    b'"required_prefill_response_num":null}'
)


def test_a_registration_has_these_bytes() -> None:
    assert wire.encode(REGISTRATION) == PUT
    assert wire.decode(PrefillRegistration, PUT) == REGISTRATION


def test_a_server_info_has_these_bytes_and_no_layout_that_is_unset() -> None:
    assert wire.encode(INFO) == INFO_BYTES
    assert wire.decode(PrefillServerInfo, INFO_BYTES) == INFO


def test_a_server_info_with_layouts_carries_them() -> None:
    info = PrefillServerInfo(
        **{**json.loads(INFO_BYTES), "kv_layout": "nope", "dsv41_spec_layout": {"num_draft_tokens": 2}}
    )
    sent = json.loads(wire.encode(info))
    assert (sent["kv_layout"], sent["dsv41_spec_layout"]) == ("nope", {"num_draft_tokens": 2})


def test_a_rank_endpoint_has_these_bytes() -> None:
    assert wire.encode(RankEndpoint("10.0.0.1", 4000)) == b'{"rank_ip":"10.0.0.1","rank_port":4000}'


@pytest.mark.parametrize(
    ("body", "golden"),
    [
        (wire.RegisterDpRank(7, 1), b'{"bootstrap_room":7,"dp_rank":1}'),
        (wire.QueryDpRanks([7, 8]), b'{"bootstrap_rooms":[7,8]}'),
        (wire.RegisterDpRanks([wire.RegisterDpRank(7, 1)]), b'{"rooms":[{"bootstrap_room":7,"dp_rank":1}]}'),
        (wire.Deregister("p-1"), b'{"pd_instance":"p-1"}'),
        (wire.Deregister(None), b'{"pd_instance":null}'),
        (wire.Removed(2), b'{"removed":2}'),
        (
            wire.RegistryStatus(
                False,
                3,
                "p-1",
                2,
                [wire.RankStatus(Rank(), "10.0.0.1", 4000, "p-1", 14.5)],
                [Rank(tp=1)],
                5,
                [Rank(tp=1)],
                [wire.RefusedRank(Rank(tp=1), "p-0", "page_size differs", 2.5)],
                INFO,
            ),
            b'{"ready":false,"epoch":3,"instance":"p-1","expected":2,"registered":[{"rank":[0,0,0,0],'
            b'"rank_ip":"10.0.0.1","rank_port":4000,"instance":"p-1","expires_in_s":14.5}],"missing":[[0,0,1,0]],'
            b'"rooms":5,"expired":[[0,0,1,0]],"refused":[{"rank":[0,0,1,0],"instance":"p-0",'
            b'"reason":"page_size differs","ago_s":2.5}],"group":' + INFO_BYTES + b"}",
        ),
    ],
)
def test_our_other_bodies_have_these_bytes(body: object, golden: bytes) -> None:
    assert wire.encode(body) == golden
    assert wire.decode(type(body), golden) == body


def test_what_sglang_leaves_out_has_sglangs_defaults() -> None:
    least = {key: value for key, value in json.loads(PUT).items() if key in REQUIRED}
    read = wire.decode(PrefillRegistration, json.dumps(least).encode())
    assert read.load_balance_method == "follow_bootstrap_room"
    assert read.decode_allocation_policy == "early"
    assert read.kv_layout is read.dsv41_spec_layout is read.prefill_http_port is None
    assert read.pd_instance is read.pd_ttl_s is None
    assert not read.enable_dsa_cache_layer_split
    assert not read.enable_kv_cache_sharding


def test_integers_may_come_as_text_and_unknown_keys_are_ignored() -> None:
    body = {**json.loads(PUT), "rank_port": "4000", "from_a_later_version": [1]}
    assert wire.decode(PrefillRegistration, json.dumps(body).encode()) == REGISTRATION


@pytest.mark.parametrize("missing", REQUIRED)
def test_each_required_key_is_named_when_missing(missing: str) -> None:
    body = {key: value for key, value in json.loads(PUT).items() if key != missing}
    with pytest.raises(BadBody, match=f"`{missing}`"):
        wire.decode(PrefillRegistration, json.dumps(body).encode())


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b'{"rank_ip":"\xff"}', b"[" * 100_000, PUT + b"x"]
)
def test_what_is_no_registration_is_refused(body: bytes) -> None:
    with pytest.raises(BadBody, match="PrefillRegistration"):
        wire.decode(PrefillRegistration, body)


@pytest.mark.parametrize(
    ("key", "value"), [("page_size", None), ("attn_tp_size", "four"), ("decode_allocation_policy", "late")]
)
def test_a_wrong_value_is_named_by_its_key(key: str, value: object) -> None:
    with pytest.raises(BadBody, match=f"{key}"):
        wire.decode(PrefillRegistration, json.dumps({**json.loads(PUT), key: value}).encode())


def test_a_rank_of_a_group_says_its_place_in_it() -> None:
    said = wire.registration_of(
        Rank(dp=1, tp=2), Shape(dp=2, tp=4), "10.0.0.1", 4000, page_size=16, kv_cache_dtype="float32"
    )
    assert (said.rank, said.dp_size, said.attn_tp_size) == (Rank(dp=1, tp=2), 2, 4)
    assert wire.decode(PrefillRegistration, wire.encode(said)) == said


@pytest.mark.parametrize(("system", "dp", "size"), [((1, 0), 2, 4), ((8, 5), 5, 8)])
def test_the_dp_group_is_the_systems_unless_that_is_one(system: tuple[int, int], dp: int, size: int) -> None:
    body = {**json.loads(PUT), "attn_dp_size": 4, "attn_dp_rank": 2}
    body |= {"system_dp_size": system[0], "system_dp_rank": system[1]}
    read = wire.decode(PrefillRegistration, json.dumps(body).encode())
    assert (read.dp_size, read.rank) == (size, Rank(dp, 0, 3, 1))
