"""Two layouts fit, or the refusal names what differs, both values and the remedy; and protocol 1 still pairs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.core.frames import DataEndpoint, Hello, Welcome
from pdplane.core.ids import Instance, Rank, Shape
from pdplane.core.layout import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    LayoutGroup,
    Stamp,
    misfit,
    mismatch,
    pages_for,
    too_old,
)

NEW: dict[str, Any] = {"protocol_min": OLDEST_PROTOCOL, "protocol_max": PROTOCOL_VERSION}
STAMP = Stamp("m", "w", "t", 16, 2048, "f32", (LayoutGroup("kv", 64, (0, 1), "f32", parts=2, heads=4),), **NEW)
OTHER: dict[str, tuple[Any, str]] = {
    "model": ("n", "--served-model-name"),
    "weights": ("v", "same weights"),
    "tokenizer": ("u", "tokenizer files"),
    "page_size": (32, "--page-size"),
    "page_bytes": (4096, "KV layout"),
    "kv_dtype": ("f16", "KV dtype"),
    "policy": ("prefill_complete", "--decode-allocation-policy"),
    "dialect": ("params", "--dialect"),
}


def changed(stamp: Stamp = STAMP, **fields: Any) -> Stamp:
    return msgspec.structs.replace(stamp, **fields)


def with_group(**fields: Any) -> Stamp:
    return changed(groups=(msgspec.structs.replace(STAMP.groups[0], **fields),))


def refusal(prefill: Stamp, decode: Stamp) -> str:
    cause = mismatch(prefill, decode)
    assert cause is not None
    assert (cause.code, cause.status, cause.retryable, cause.side) == ("incompatible", 503, True, "")
    return cause.message


def test_equal_stamps_fit() -> None:
    assert mismatch(STAMP, changed()) is None


def test_every_field_is_compared() -> None:
    apart = {"groups", "protocol", "protocol_min", "protocol_max"}
    assert set(OTHER) | apart == set(Stamp.__struct_fields__)


@pytest.mark.parametrize("field", OTHER)
def test_a_difference_names_field_both_values_and_the_remedy(field: str) -> None:
    value, remedy = OTHER[field]
    said = refusal(STAMP, changed(**{field: value}))
    assert said.startswith(f"{field} differs: prefill has {getattr(STAMP, field)!r}, decode has {value!r}; ")
    assert remedy in said


@pytest.mark.parametrize(
    ("fields", "ours", "theirs"),
    [
        ({"row_bytes": 128}, "rows of 64 B", "rows of 128 B"),
        ({"layers": (0, 2)}, "2 layers (0-1)", "2 layers (0,2)"),
        ({"layers": ()}, "2 layers (0-1)", "0 layers ()"),
        ({"dtype": "f16"}, "('f32')", "('f16')"),
        ({"parts": 1}, "2 parts", "1 parts"),
        ({"heads": 8}, "4 heads", "8 heads"),
        ({"name": "k"}, "'kv': ", "'k': "),
    ],
)
def test_a_group_that_differs_is_described_on_both_sides(fields: dict[str, Any], ours: str, theirs: str) -> None:
    said = refusal(STAMP, with_group(**fields))
    prefill, decode = said.removeprefix("groups differs: prefill has ").split(", decode has ")
    assert ours in prefill
    assert theirs in decode


def test_of_several_groups_only_those_that_differ_are_named() -> None:
    index = LayoutGroup("index", 132, tuple(range(0, 61, 3)), "uint8")
    ours, theirs = changed(groups=(*STAMP.groups, index)), STAMP
    assert "'kv'" not in refusal(ours, theirs)
    assert "prefill has 'index': rows of 132 B of 1 parts and 0 heads ('uint8') on 21 layers (0,3,6" in refusal(
        ours, theirs
    )
    assert "decode has no other; " in refusal(ours, theirs)
    assert "prefill has no other, decode has 'index'" in refusal(theirs, ours)


def test_the_order_of_groups_counts_for_it_is_their_order_in_a_page() -> None:
    index = LayoutGroup("index", 132, (0,), "uint8")
    said = refusal(changed(groups=(*STAMP.groups, index)), changed(groups=(index, *STAMP.groups)))
    assert said.index("'kv'") < said.index("'index'")


def test_a_value_of_any_length_is_cut() -> None:
    said = refusal(STAMP, changed(model="m" * 100_000))
    assert len(said) < 1000
    assert "(100002 characters)" in said


def test_protocols_that_do_not_meet_are_refused_naming_both() -> None:
    later = changed(protocol_min=4, protocol_max=5)
    assert refusal(STAMP, later).startswith("protocol differs: prefill has 1 to 3, decode has 4 to 5; run releases")
    assert refusal(later, STAMP).startswith("protocol differs: prefill has 4 to 5, decode has 1 to 3; run releases")
    assert mismatch(STAMP, changed(protocol_min=3, protocol_max=4)) is None


few = st.sampled_from(["a", "b"])
groups = st.lists(
    st.builds(
        LayoutGroup,
        few,
        st.sampled_from([64, 128]),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        few,
        parts=st.sampled_from([1, 2]),
        heads=st.sampled_from([0, 4]),
    ),
    max_size=2,
).map(tuple)
stamps = st.builds(
    Stamp, few, few, few, st.sampled_from([16, 32]), st.sampled_from([1, 2]), few, groups, few, **{
        name: st.just(value) for name, value in NEW.items()
    }
)  # fmt: skip


@given(stamps, stamps, st.data())
def test_they_fit_just_when_all_is_equal(prefill: Stamp, decode: Stamp, data: st.DataObject) -> None:
    assert (mismatch(prefill, decode) is None) == (prefill == decode)
    field = data.draw(st.sampled_from(Stamp.__struct_fields__[:8]))
    close = changed(prefill, **{field: getattr(decode, field)})
    assert (mismatch(prefill, close) is None) == (prefill == close)
    assert mismatch(prefill, changed(prefill)) is None


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10), (161, 11)])
def test_pages_for_tokens(tokens: int, pages: int) -> None:
    assert pages_for(tokens, 16) == pages


def test_bytes_of_a_token() -> None:
    assert STAMP.token_bytes * STAMP.page_size == STAMP.page_bytes


# --- a peer of protocol 1 -----------------------------------------------------------------------------------------
# Its types as they were, and what it made of a HELLO and a WELCOME.


class Group1(msgspec.Struct, frozen=True):
    name: str
    row_bytes: int
    layers: tuple[int, ...]
    dtype: str


class Stamp1(msgspec.Struct, frozen=True):
    model: str
    weights: str
    tokenizer: str
    page_size: int
    page_bytes: int
    kv_dtype: str
    groups: tuple[Group1, ...]
    policy: str = "early"
    protocol: int = 1


class Rank1(msgspec.Struct, frozen=True, array_like=True):
    dp: int = 0
    cp: int = 0
    tp: int = 0
    pp: int = 0


class Hello1(msgspec.Struct, frozen=True, tag="hello", tag_field="t"):
    src: str
    dst: str
    rank: Rank1
    stamp: Stamp1
    protocol_min: int = 1
    protocol_max: int = 1
    data_host: str = ""
    data_port: int = 0
    data_token: str = ""
    secret: str = ""


class Welcome1(msgspec.Struct, frozen=True, tag="welcome", tag_field="t"):
    src: str
    dst: str
    rank: Rank1
    stamp: Stamp1
    protocol: int = 1


STAMP_1 = Stamp1("m", "w", "t", 16, 2048, "f32", (Group1("kv", 64, (0, 1), "f32"),))


def fits_1(ours: Stamp1, theirs: Stamp1) -> bool:
    return all(getattr(ours, field) == getattr(theirs, field) for field in Stamp1.__struct_fields__)


def prefill_1_accepts(hello: Hello1) -> bool:
    return hello.protocol_min <= 1 <= hello.protocol_max and fits_1(STAMP_1, hello.stamp)


def hello_of(stamp: Stamp) -> Hello:
    data = (DataEndpoint("shm", "host", "/run/x"), DataEndpoint("tcp", "", "::1", 9, "word"))
    return Hello(
        Instance("d"),
        Instance(""),
        Rank(),
        stamp,
        OLDEST_PROTOCOL,
        PROTOCOL_VERSION,
        data_host="::1",
        data_port=9,
        data_token="word",
        shape=Shape(),
        data=data,
    )


def test_a_prefill_of_protocol_1_accepts_our_hello() -> None:
    hello = msgspec.msgpack.decode(msgspec.msgpack.encode(hello_of(STAMP)), type=Hello1)
    assert prefill_1_accepts(hello)
    assert (hello.data_host, hello.data_port, hello.data_token) == ("::1", 9, "word")


def test_a_decode_of_protocol_1_accepts_our_welcome() -> None:
    welcome = Welcome(Instance("p"), Instance("d"), Rank(), STAMP, OLDEST_PROTOCOL, Shape(), "tcp")
    assert fits_1(msgspec.msgpack.decode(msgspec.msgpack.encode(welcome), type=Welcome1).stamp, STAMP_1)


@pytest.mark.parametrize("fields", [{"policy": "prefill_complete"}, {"page_size": 32}, {"weights": "v"}])
def test_protocol_1_refuses_what_it_cannot_do_and_so_do_we(fields: dict[str, Any]) -> None:
    ours = changed(**fields)
    hello = msgspec.msgpack.decode(msgspec.msgpack.encode(hello_of(ours)), type=Hello1)
    assert not prefill_1_accepts(hello)
    assert next(iter(fields)) in refusal(told_by_1(STAMP_1), ours)


def told_by_1(stamp: Stamp1) -> Stamp:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(stamp), type=Stamp)


def test_we_accept_a_stamp_of_protocol_1_which_knows_no_heads() -> None:
    assert told_by_1(STAMP_1).protocol_max == 1
    assert mismatch(told_by_1(STAMP_1), STAMP) is None
    assert mismatch(STAMP, told_by_1(STAMP_1)) is None


def test_we_refuse_a_stamp_of_protocol_1_whose_rows_differ() -> None:
    theirs = told_by_1(msgspec.structs.replace(STAMP_1, groups=(Group1("kv", 64, (0, 1, 2), "f32"),)))
    said = refusal(theirs, STAMP)
    assert "prefill has 'kv': rows of 64 B ('f32') on 3 layers (0-2), decode has" in said
    assert "heads" not in said


@pytest.mark.parametrize("shape", [Shape(tp=2), Shape(pp=2), Shape(cp=2)])
def test_protocol_1_cannot_serve_a_side_that_is_split_and_the_refusal_says_so(shape: Shape) -> None:
    cause = too_old(1, shape)
    assert cause is not None
    assert (cause.code, cause.status) == ("incompatible", 503)
    assert f"one side has {shape}" in cause.message
    assert too_old(2, shape) is None


@pytest.mark.parametrize("shape", [Shape(), Shape(dp=4)])
def test_data_parallel_groups_are_instances_of_their_own_and_no_matter_to_protocol_1(shape: Shape) -> None:
    assert too_old(1, shape) is None


# --- the whole rule -------------------------------------------------------------------------------------------------

SPLIT = "start it with one context and one pipeline parallel rank"


def test_groups_of_any_data_and_tensor_parallel_shapes_fit() -> None:
    assert misfit(STAMP, Shape(dp=2, tp=4), STAMP, Shape(dp=4, tp=2), PROTOCOL_VERSION) is None


@pytest.mark.parametrize(
    ("prefill", "decode", "spoken", "said"),
    [
        (Shape(), Shape(tp=2), 1, "protocol 1, which knows no parts of pages"),
        (Shape(tp=2), Shape(), 1, "protocol 1, which knows no parts of pages"),
        (Shape(cp=2), Shape(), 2, f"prefill has {Shape(cp=2)}"),
        (Shape(pp=2), Shape(), 2, f"prefill has {Shape(pp=2)}"),
        (Shape(), Shape(cp=2), 2, f"decode has {Shape(cp=2)}"),
        (Shape(), Shape(pp=2), 2, f"decode has {Shape(pp=2)}"),
    ],
)
def test_shapes_that_no_session_can_serve_do_not_fit(prefill: Shape, decode: Shape, spoken: int, said: str) -> None:
    cause = misfit(STAMP, prefill, STAMP, decode, spoken)
    assert cause is not None
    assert (cause.code, cause.status) == ("incompatible", 503)
    assert said in cause.message
    assert spoken == 1 or SPLIT in cause.message


@given(st.sampled_from(sorted(OTHER)), st.integers(1, 2), st.integers(1, 2))
def test_what_stamps_say_comes_before_what_shapes_say(field: str, spoken: int, cp: int) -> None:
    theirs = changed(**{field: OTHER[field][0]})
    assert misfit(STAMP, Shape(cp=cp), theirs, Shape(), spoken) == mismatch(STAMP, theirs)
