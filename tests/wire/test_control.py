"""The control wire: golden bytes of every frame, and what is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdplane.core.errors import Cause
from pdplane.core.frames import (
    Abort,
    Announce,
    Beat,
    Drained,
    Failed,
    Frame,
    Grant,
    Hello,
    PromptId,
    Received,
    Reject,
    Row,
    Success,
    TopLogprob,
    Welcome,
)
from pdplane.core.ids import MAX_ROOM, GrantNo, Instance, PageId, Rank, Room
from pdplane.core.layout import LayoutGroup, Stamp
from pdplane.wire.control import KINDS, MAX_FRAME_BYTES, BadFrame, FrameReader, UnknownKind, encode

P, D = Instance("p1"), Instance("d1")
STAMP = Stamp(
    model="m",
    weights="w",
    tokenizer="k",
    page_size=16,
    page_bytes=64,
    kv_dtype="f32",
    groups=(LayoutGroup("kv", 4, (0,), "f32"),),
)
WHO: dict[str, Any] = {"room": Room(7), "grant": GrantNo(3), "src": P, "dst": D, "rank": Rank()}
STAMP_HEX = (
    "a57374616d7089a56d6f64656ca16da777656967687473a177a9746f6b656e697a6572a16ba9706167655f73697a6510aa706167655f62797465"
    "7340a86b765f6474797065a3663332a667726f7570739184a46e616d65a26b76a9726f775f627974657304a66c61796572739100a56474797065"
    "a3663332a6706f6c696379a56561726c79a870726f746f636f6c01"
)
WHO_HEX = "a4726f6f6d07a56772616e7403a3737263a27031a3647374a26431a472616e6b9400000000"

GOLDEN: list[tuple[Frame, str]] = [
    (
        Hello(D, P, Rank(), STAMP, data_host="::1", data_port=9, data_token="t", secret="s"),
        f"fc000000018ba174a568656c6c6fa3737263a26431a3647374a27031a472616e6b9400000000{STAMP_HEX}"
        "ac70726f746f636f6c5f6d696e01ac70726f746f636f6c5f6d617801a9646174615f686f7374a33a3a31a9646174615f706f727409"
        "aa646174615f746f6b656ea174a6736563726574a173",
    ),
    (
        Welcome(P, D, Rank(tp=1), STAMP),
        f"bd0000000186a174a777656c636f6d65a3737263a27031a3647374a26431a472616e6b9400000100{STAMP_HEX}"
        "a870726f746f636f6c01",
    ),
    (
        Reject(P, Cause("stale", "no")),
        "2f0000000183a174a672656a656374a3737263a27031a5636175736582a4636f6465a57374616c65a76d657373616765a26e6f",
    ),
    (
        Beat(P, 0.5, 1, 2, {7: 3}),
        "420000000186a174a462656174a3737263a27031aa737465705f6167655f73cb3fe0000000000000a772756e6e696e6701"
        "a777616974696e6702a870726f6772657373810703",
    ),
    (Announce(**WHO), f"3f0000000187a174a8616e6e6f756e6365{WHO_HEX}a6706f6c696379a56561726c79"),
    (
        Grant(**WHO, pages=(PageId(1), PageId(300)), prompt=PromptId(b"\1\2", 20), time_left_s=1.5),
        f"5c0000000189a174a56772616e74{WHO_HEX}a570616765739201cd012ca670726f6d707492c402010214"
        "ab74696d655f6c6566745f73cb3ff8000000000000",
    ),
    (
        Abort(**WHO, cause=Cause("aborted", "x", 499)),
        f"570000000187a174a561626f7274{WHO_HEX}a5636175736583a4636f6465a761626f72746564a76d657373616765a178"
        "a6737461747573cd01f3",
    ),
    (Received(**WHO), f"320000000186a174a87265636569766564{WHO_HEX}"),
    (
        Success(**WHO, row=Row(5, 20, b"\1\2", 0, -0.5, (TopLogprob(5, -0.5),), "stop")),
        f"a10000000187a174a773756363657373{WHO_HEX}a3726f7786ab66697273745f746f6b656e05ad70726f6d70745f746f6b656e7314"
        "ad70726f6d70745f646967657374c4020102a76c6f6770726f62cbbfe0000000000000ac746f705f6c6f6770726f6273"
        "919205cbbfe0000000000000ad66696e6973685f726561736f6ea473746f70",
    ),
    (
        Failed(**WHO, cause=Cause("deadline", "y", 504, True, "prefill", "p", 1)),
        f"880000000187a174a66661696c6564{WHO_HEX}a5636175736587a4636f6465a8646561646c696e65a76d657373616765a179"
        "a6737461747573cd01f8a9726574727961626c65c3a473696465a770726566696c6ca5706172616da170"
        "ad72657472795f61667465725f7301",
    ),
    (Drained(**WHO), f"310000000186a174a7647261696e6564{WHO_HEX}"),
]


def kind_of(frame: object) -> str:
    return type(frame).__name__.lower()


@pytest.mark.parametrize(("frame", "golden"), GOLDEN, ids=[kind_of(frame) for frame, _ in GOLDEN])
def test_every_kind_has_these_bytes(frame: Frame, golden: str) -> None:
    assert encode(frame).hex() == golden
    assert FrameReader().feed(bytes.fromhex(golden)) == [frame]


def test_no_kind_is_without_golden_bytes() -> None:
    assert {kind_of(frame) for frame, _ in GOLDEN} == KINDS


# --- round trips ------------------------------------------------------------------------------------------------

names = st.text(max_size=12).map(Instance)
counts = st.integers(0, 2**31)
ranks = st.builds(Rank, *([st.integers(0, 64)] * 4))
causes = st.builds(Cause, st.text(max_size=9), st.text(max_size=30), st.integers(400, 599), st.booleans())
rows = st.builds(
    Row,
    first_token=counts,
    prompt_tokens=counts,
    prompt_digest=st.binary(max_size=16),
    logprob=st.none() | st.floats(allow_nan=False),
    top_logprobs=st.lists(st.builds(TopLogprob, counts, st.floats(allow_nan=False)), max_size=3).map(tuple),
    finish_reason=st.sampled_from([None, "stop", "length"]),
)
identity = {
    "room": st.integers(1, MAX_ROOM).map(Room),
    "grant": st.integers(0, 2**62).map(GrantNo),
    "src": names,
    "dst": names,
    "rank": ranks,
}
frames: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Hello, names, names, ranks, st.just(STAMP), data_host=st.text(max_size=9), data_port=counts),
    st.builds(Welcome, names, names, ranks, st.just(STAMP)),
    st.builds(Reject, names, causes),
    st.builds(Beat, names, st.floats(0, 1e6), counts, counts, st.dictionaries(st.integers(1, MAX_ROOM), counts)),
    st.builds(Announce, **identity),
    st.builds(
        Grant,
        **identity,
        pages=st.lists(counts.map(PageId), max_size=40).map(tuple),
        prompt=st.builds(PromptId, st.binary(max_size=16), counts),
        time_left_s=st.floats(0, 1e6),
    ),
    st.builds(Abort, **identity, cause=causes),
    st.builds(Received, **identity),
    st.builds(Success, **identity, row=rows),
    st.builds(Failed, **identity, cause=causes),
    st.builds(Drained, **identity),
)


@settings(deadline=None)
@given(st.lists(frames, max_size=6), st.integers(1, 97))
def test_frames_come_back_in_order_however_the_stream_is_cut(sent: list[Frame], cut: int) -> None:
    stream = b"".join(encode(frame) for frame in sent)
    reader = FrameReader()
    got = [frame for i in range(0, len(stream), cut) for frame in reader.feed(stream[i : i + cut])]
    assert got == sent
    assert reader.half_frame_bytes == 0


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_refused_or_waits_for_more_and_raises_nothing_else(garbage: bytes) -> None:
    reader = FrameReader()
    with contextlib.suppress(BadFrame):
        got = reader.feed(garbage)
        assert all(type(frame) is UnknownKind or kind_of(frame) in KINDS for frame in got)


# --- what is tolerated ------------------------------------------------------------------------------------------


def framed(body: object, version: int = 1) -> bytes:
    packed = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return (1 + len(packed)).to_bytes(4, "little") + bytes([version]) + packed


def drained_with(**fields: object) -> bytes:
    return framed({"t": "drained", "room": 7, "grant": 3, "src": "p1", "dst": "d1", "rank": [0, 0, 0, 0], **fields})


def test_an_unknown_kind_is_returned_to_be_counted_and_the_session_goes_on() -> None:
    stream = framed({"t": "gossip", "room": "any"}) + encode(Drained(**WHO))
    assert FrameReader().feed(stream) == [UnknownKind("gossip"), Drained(**WHO)]


def test_an_unknown_field_is_ignored() -> None:
    assert FrameReader().feed(drained_with(later_invention=[1, {"x": 2}])) == [Drained(**WHO)]


def test_a_half_frame_waits_and_is_visible_as_such() -> None:
    whole = encode(Drained(**WHO))
    reader = FrameReader()
    assert reader.feed(whole[:-1]) == []
    assert reader.half_frame_bytes == len(whole) - 1
    assert reader.feed(whole[-1:]) == [Drained(**WHO)]


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "named"),
    [
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "little") + b"\1", str(MAX_FRAME_BYTES)),
        (b"GET / HTTP/1.1\r\n\r\n", "is this a control port"),
        (b"\1\0\0\0\1", "frame of 1 bytes"),
        (framed({"t": "drained"}, version=2), "frame version 2"),
        (framed(b"\xc1\xc1\xc1"), "not msgpack"),
        (framed(b"\x81\xa1"), "not msgpack"),
        (framed(msgspec.msgpack.encode({"t": "beat", "src": "p"}) + b"\0"), "not msgpack"),
        (framed(b"\x83\xa1t\xa4beat\xa3src\xa1p\xa1z" + b"\x91" * 100_000 + b"\0"), "not msgpack"),
        (framed([1, 2]), "no kind"),
        (framed({"room": 7}), "no kind"),
        (framed({"t": 7}), "no kind"),
        (framed({"t": "beat"}), "'beat' is malformed"),
        (framed({"t": "beat", "src": b"\xff"}), "'beat' is malformed"),
        (framed(b"\x82\xa1t\xa4beat\xa3src\xa1\xff"), "not msgpack"),
        (drained_with(room="7"), "'drained' is malformed"),
        (drained_with(room=7.5), "'drained' is malformed"),
        (drained_with(room=0), "room 0"),
        (drained_with(room=-1), "room -1"),
        (drained_with(room=2**63), f"room {2**63}"),
        (drained_with(grant=-1), "grant -1"),
        (drained_with(rank=[0, "x", 0, 0]), "'drained' is malformed"),
    ],
)
def test_a_bad_frame_is_refused_by_name(stream: bytes, named: str) -> None:
    with pytest.raises(BadFrame, match=named):
        FrameReader().feed(stream)


def test_a_grant_whose_time_left_is_no_number_is_refused() -> None:
    grant = Grant(**WHO, pages=(), prompt=PromptId(b"", 0), time_left_s=float("nan"))
    with pytest.raises(BadFrame, match="time left nan"):
        FrameReader().feed(encode(grant))


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_first_token_that_no_vocabulary_has_is_refused(token: int) -> None:
    frame = Success(**WHO, row=Row(first_token=token, prompt_tokens=1, prompt_digest=b""))
    with pytest.raises(BadFrame, match=f"first token {token}"):
        FrameReader().feed(encode(frame))


def test_an_oversize_frame_is_refused_from_its_head_alone() -> None:
    with pytest.raises(BadFrame, match="4294967295 bytes"):
        FrameReader().feed(b"\xff\xff\xff\xff\1")


def test_an_oversize_frame_is_not_sent() -> None:
    with pytest.raises(BadFrame, match="the most is"):
        encode(Reject(P, Cause("long", "x" * MAX_FRAME_BYTES)))


def test_the_largest_frame_passes() -> None:
    spare = len(encode(Reject(P, Cause("long", "x" * 70_000)))) - 70_000 - 4
    largest = Reject(P, Cause("long", "x" * (MAX_FRAME_BYTES - spare)))
    assert FrameReader().feed(encode(largest)) == [largest]


def test_good_frames_before_a_bad_one_are_not_lost() -> None:
    with pytest.raises(BadFrame) as raised:
        FrameReader().feed(encode(Drained(**WHO)) + b"\xff" * 5)
    assert raised.value.before == [Drained(**WHO)]


def test_after_a_bad_frame_the_reader_refuses_everything() -> None:
    reader = FrameReader()
    with pytest.raises(BadFrame):
        reader.feed(b"\xff" * 5)
    with pytest.raises(BadFrame):
        reader.feed(encode(Drained(**WHO)))
