"""`kv_transfer_params`: what prefill answers, and what of it decode takes, judged field by field."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.core.effects import AnswerHeld
from pdplane.core.errors import Refused
from pdplane.core.events import ControlEndpoint
from pdplane.core.frames import PromptId, Row
from pdplane.core.ids import HoldNo, Instance, PageId, Rank, Rid, Shape
from pdplane.wire.body import decode_object
from pdplane.wire.params import answered, check_asked_to_hold, handles_in, read_hand_off, reused_tokens

DIGEST = bytes(range(16))
HELD = AnswerHeld(
    rid=Rid("r.0.0"),
    row=Row(first_token=5, prompt_tokens=33, prompt_digest=DIGEST, cached_tokens=16),
    hold=HoldNo(7),
    pages=(PageId(4), PageId(9), PageId(2)),
    lease_s=29.98765,
)
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def told(**fields: object) -> dict[str, Any]:
    params = answered(
        HELD, instance=Instance("p1"), host="10.0.0.1", ports=[9000, 9001], shape=Shape(dp=2, tp=2), dp=1, page_size=16
    )
    return {**msgspec.json.decode(msgspec.json.encode(params)), **fields}


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in told().items() if name not in names}


def refusal(raw: object) -> tuple[str | None, str]:
    with pytest.raises(Refused) as refused:
        read_hand_off(raw)
    cause = refused.value.cause
    assert (cause.code, cause.status, cause.retryable) == ("invalid_params", 400, False)
    return cause.param, cause.message


# --- there and back -----------------------------------------------------------------------------------------------


def test_prefill_answers_these_fields_and_no_others() -> None:
    assert told() == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p1",
        "remote_block_ids": [[4, 9, 2]],
        "remote_request_id": "r.0.0",
        "remote_host": "10.0.0.1",
        "remote_port": 9000,
        "tp_size": 2,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 33,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 16,
        "pd_grant": 7,
        "pd_prompt_digest": DIGEST.hex(),
        "pd_num_tokens": 33,
        "pd_lease_s": 29.988,
        "pd_instance": "p1",
        "pd_ports": [9000, 9001],
        "pd_dp": 1,
        "pd_dp_size": 2,
        "pd_page_size": 16,
    }


def test_decode_reads_from_it_who_holds_what_and_where() -> None:
    hand_off = read_hand_off(told(later_invention={"x": 1}))
    assert hand_off is not None
    handle = hand_off.handle
    assert (handle.instance, handle.hold, handle.rid, handle.dp) == ("p1", 7, "r.0.0", 1)
    assert handle.pages == (4, 9, 2)
    assert handle.prompt == PromptId(DIGEST, 33)
    assert handle.endpoints == (
        (Rank(dp=1, tp=0), ControlEndpoint("10.0.0.1", 9000)),
        (Rank(dp=1, tp=1), ControlEndpoint("10.0.0.1", 9001)),
    )
    assert handle.shape == Shape(dp=2, tp=2)
    assert hand_off.cached_tokens == 16


@pytest.mark.parametrize(
    "raw", [None, {}, {"do_remote_prefill": False}, {"prompt_token_ids": [1]}, ASK | {"do_remote_decode": None}]
)
def test_params_that_name_nothing_mean_that_decode_computes_the_prompt(raw: object) -> None:
    assert read_hand_off(raw) is None


# --- what decode refuses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in told() if name not in (
    "do_remote_prefill", "do_remote_decode", "dcp_size", "pp_size", "remote_blocks_expiry_time", "transfer_mode",
    "remote_prefill_cached_tokens", "pd_dp_size",
)])  # fmt: skip
def test_a_missing_field_is_named(name: str) -> None:
    param, message = refusal(without(name))
    assert param == f"kv_transfer_params.{name}"
    assert "unchanged" in message


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("remote_block_ids", "4,9,2", "a list of one list"),
        ("remote_block_ids", [4, 9, 2], "a list of one list"),
        ("remote_block_ids", {"0": [4, 9, 2]}, "a list of one list"),
        ("remote_block_ids", [], "0 KV cache groups"),
        ("remote_block_ids", [[4, 9, 2], [1]], "2 KV cache groups"),
        ("remote_block_ids", [[]], "has 0 blocks, and 33 tokens in blocks of 16 need 3"),
        ("remote_block_ids", [[4, 9]], "has 2 blocks"),
        ("remote_block_ids", [[*range(100_000)]], "has 100000 blocks"),
        ("remote_block_ids", [[4, 9, 9]], "names a block twice"),
        ("remote_block_ids", [[4, 9, -1]], "remote_block_ids[0][2]: expected `int`"),
        ("remote_block_ids", [[4, 9, 2**31]], "remote_block_ids[0][2]: expected `int`"),
        ("remote_block_ids", [[4, 9, True]], "got `bool`"),
        ("remote_block_ids", [[4, 9, "2"]], "got `str`"),
        ("remote_block_ids", [[4, 9, 2.5]], "got `float`"),
        ("remote_engine_id", "", "length"),
        ("remote_engine_id", 7, "got `int`"),
        ("remote_engine_id", "p2", "pd_instance is 'p1', and remote_engine_id is 'p2'"),
        ("remote_request_id", "", "length"),
        ("remote_host", "", "length"),
        ("remote_host", "x" * 300, "length"),
        ("remote_port", 0, "remote_port"),
        ("remote_port", 65_536, "remote_port"),
        ("remote_port", True, "got `bool`"),
        ("remote_port", 9001, "pd_ports"),
        ("tp_size", 0, "tp_size"),
        ("tp_size", 3, "a port for each of 3 ranks"),
        ("tp_size", 10**9, "tp_size"),
        ("dcp_size", -1, "dcp_size"),
        ("pp_size", "one", "got `str`"),
        ("remote_num_tokens", 34, "is 34, and pd_num_tokens is 33"),
        ("remote_num_tokens", 0, "remote_num_tokens"),
        ("pd_num_tokens", True, "got `bool`"),
        ("pd_num_tokens", -33, "pd_num_tokens"),
        ("pd_num_tokens", 49, "has 3 blocks, and 49 tokens in blocks of 16 need 4"),
        ("remote_prefill_cached_tokens", 34, "is 34 of 33 tokens"),
        ("transfer_mode", "push", "is 'push'"),
        ("transfer_mode", 1, "got `int`"),
        ("pd_grant", 0, "pd_grant"),
        ("pd_grant", 2**63, "pd_grant"),
        ("pd_grant", "7", "got `str`"),
        ("pd_prompt_digest", "zz" * 16, "32 hex digits"),
        ("pd_prompt_digest", "00" * 15, "32 hex digits"),
        ("pd_prompt_digest", "00 " * 16, "32 hex digits"),
        ("pd_prompt_digest", 7, "got `int`"),
        ("pd_lease_s", -1, "pd_lease_s"),
        ("pd_lease_s", float("nan"), "pd_lease_s"),
        ("pd_lease_s", float("inf"), "pd_lease_s"),
        ("pd_lease_s", "long", "got `str`"),
        ("pd_instance", "p2", "pd_instance is 'p2'"),
        ("pd_ports", [], "a port for each of 2 ranks"),
        ("pd_ports", [9000, 9000], "a port for each of 2 ranks"),
        ("pd_ports", [9000, 0], "pd_ports"),
        ("pd_ports", 9000, "got `int`"),
        ("pd_dp", 2, "is 2 of 2 dp groups"),
        ("pd_dp", -1, "pd_dp"),
        ("pd_page_size", 0, "pd_page_size"),
        ("do_remote_prefill", 1, "must be true or false, got 1"),
        ("do_remote_prefill", False, "do_remote_prefill is not true"),
        ("do_remote_decode", True, "this is a decode worker"),
        ("do_remote_decode", "no", "must be true or false"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_field_that_cannot_be_is_named_with_the_remedy(field: str, value: object, named: str) -> None:
    param, message = refusal(told(**{field: value}))
    assert named in message
    assert param is not None
    assert param.startswith("kv_transfer_params.")
    assert "; " in message


@pytest.mark.parametrize("raw", [7, "x", [], [told()], True])
def test_params_that_are_no_object_are_refused(raw: object) -> None:
    param, message = refusal(raw)
    assert param == "kv_transfer_params"
    assert "must be an object or null" in message


def test_what_a_native_vllm_answered_is_refused_and_says_with_whom_it_pairs() -> None:
    native = {name: value for name, value in told().items() if not name.startswith("pd_")}
    param, message = refusal(native)
    assert param == "kv_transfer_params.pd_grant"
    assert "a native vLLM decode only" in message.lower() or "native vLLM decode only" in message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(told())), json_values)
def test_whatever_stands_in_a_field_is_read_or_refused(field: str, value: object) -> None:
    try:
        hand_off = read_hand_off(told(**{field: value}))
    except Refused as refused:
        code = refused.cause.code
    else:
        code = "invalid_params"
        assert hand_off is None or len(hand_off.handle.pages) == 3
    assert code == "invalid_params"


# --- what prefill refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [{"do_remote_decode": True}, ASK, ASK | {"remote_tp": None}])
def test_prefill_is_asked_to_hold(raw: object) -> None:
    check_asked_to_hold(raw)


@pytest.mark.parametrize(
    ("raw", "param", "named"),
    [
        (None, "do_remote_decode", '"do_remote_decode": true'),
        ({}, "do_remote_decode", "is not true"),
        (ASK | {"do_remote_decode": "yes"}, "do_remote_decode", "true or false"),
        (ASK | {"do_remote_prefill": True}, "do_remote_prefill", "reads nobody's KV"),
        (ASK | {"remote_block_ids": [[1]]}, "remote_block_ids", "do not support"),
        (ASK | {"remote_host": "h"}, "remote_host", "do not support"),
    ],
)
def test_what_does_not_ask_prefill_to_hold_is_refused(raw: object, param: str, named: str) -> None:
    with pytest.raises(Refused, match=named) as refused:
        check_asked_to_hold(raw)
    assert refused.value.cause.code == "invalid_params"
    assert refused.value.cause.param == f"kv_transfer_params.{param}"


# --- refused bodies, and tokens that are used again -----------------------------------------------------------------


def test_a_refused_body_still_says_what_nobody_will_read() -> None:
    body = msgspec.json.encode({"prompt": 7, "kv_transfer_params": told()})
    [handle] = handles_in(body)
    assert handle.hold == 7


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"kv_transfer_params": {}}', b"{}", b"[" * 100_000])
def test_a_body_that_names_nothing_tells_nobody(body: bytes) -> None:
    assert handles_in(body) == []


def test_the_other_legs_tokens_are_used_again() -> None:
    assert reused_tokens(told(prompt_token_ids=[5, 6])) == [5, 6]
    assert reused_tokens(told()) is None
    assert reused_tokens(None) is None


@pytest.mark.parametrize("ids", [[], "56", [-1], [True], [1.5], {"0": 5}, [[5]]])
def test_tokens_that_are_none_are_refused(ids: object) -> None:
    with pytest.raises(Refused) as refused:
        reused_tokens(told(prompt_token_ids=ids))
    assert refused.value.cause.param == "kv_transfer_params.prompt_token_ids"
    assert refused.value.cause.status == 400


def deeper(frames: int, read: Callable[[], object]) -> object:
    return deeper(frames - 1, read) if frames else read()


def test_what_is_read_at_the_door_is_not_too_deep_for_whoever_refuses_it_further_in() -> None:
    depths = range(sys.getrecursionlimit() - 200, sys.getrecursionlimit())
    for depth in depths:
        try:
            fields = decode_object(b'{"kv_transfer_params":' + b"[" * depth + b"]" * depth + b"}")
        except Refused:
            continue  # too deep already
        with pytest.raises(Refused, match="must be an object or null"):
            deeper(60, functools.partial(read_hand_off, fields["kv_transfer_params"]))
