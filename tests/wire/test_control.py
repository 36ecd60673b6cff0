"""The control wire: golden bytes of every frame, and what is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.core.errors import Cause
from pdplane.core.frames import (
    Abort,
    Announce,
    Beat,
    Confirm,
    Confirmed,
    DataEndpoint,
    Drained,
    Failed,
    Frame,
    Grant,
    Hello,
    PromptId,
    Read,
    ReadFailed,
    Ready,
    Received,
    Reject,
    Release,
    Renew,
    Renewed,
    Row,
    Success,
    TopLogprob,
    Welcome,
)
from pdplane.core.ids import MAX_ROOM, GrantNo, HoldNo, Instance, PageId, Rank, Rid, Room, Shape
from pdplane.core.layout import OLDEST_PROTOCOL, PROTOCOL_VERSION, LayoutGroup, Stamp
from pdplane.wire.control import (
    KINDS,
    MAX_ENDPOINTS,
    MAX_FRAME_BYTES,
    MAX_HOLD,
    MAX_LINKS,
    MAX_SHAPE,
    BadFrame,
    FrameReader,
    UnknownKind,
    encode,
)

P, D = Instance("p1"), Instance("d1")
STAMP = Stamp(
    model="m",
    weights="w",
    tokenizer="k",
    page_size=16,
    page_bytes=64,
    kv_dtype="f32",
    groups=(LayoutGroup("kv", 4, (0,), "f32", parts=2, heads=1),),
    protocol_max=2,
)
WHO: dict[str, Any] = {"room": Room(7), "grant": GrantNo(3), "src": P, "dst": D, "rank": Rank()}
STAMP_HEX = (
    "a57374616d708ca56d6f64656ca16da777656967687473a177a9746f6b656e697a6572a16ba9706167655f73697a6510aa706167655f62797465"
    "7340a86b765f6474797065a3663332a667726f7570739186a46e616d65a26b76a9726f775f627974657304a66c61796572739100a56474797065"
    "a3663332a5706172747302a5686561647301a6706f6c696379a56561726c79a870726f746f636f6c01ac70726f746f636f6c5f6d696e01"
    "ac70726f746f636f6c5f6d617802a76469616c656374a5726f6f6d73"
)
HELD: dict[str, Any] = {"hold": HoldNo(9), "grant": GrantNo(3), "src": D, "dst": P, "rank": Rank()}
LEASES: dict[str, Any] = {"src": D, "dst": P, "rank": Rank(), "holds": (HoldNo(9), HoldNo(300))}
HELD_HEX = "a4686f6c6409a56772616e7403a3737263a26431a3647374a27031a472616e6b9400000000"
LEASES_HEX = "a3737263a26431a3647374a27031a472616e6b9400000000a5686f6c64739209cd012c"
WHO_HEX = "a4726f6f6d07a56772616e7403a3737263a27031a3647374a26431a472616e6b9400000000"

GOLDEN: list[tuple[Frame, str]] = [
    (
        Hello(
            D,
            P,
            Rank(tp=1),
            STAMP,
            protocol_max=2,
            data_host="::1",
            data_port=9,
            data_token="t",
            secret="s",
            shape=Shape(tp=2),
            data=(DataEndpoint("shm", "h", "/x", 0, "u"), DataEndpoint("tcp", "", "::1", 9, "t")),
        ),
        f"5f010000018da174a568656c6c6fa3737263a26431a3647374a27031a472616e6b9400000100{STAMP_HEX}"
        "ac70726f746f636f6c5f6d696e01ac70726f746f636f6c5f6d617802a9646174615f686f7374a33a3a31a9646174615f706f727409"
        "aa646174615f746f6b656ea174a6736563726574a173a573686170659401010201"
        "a4646174619295a373686da168a22f7800a17595a3746370a0a33a3a3109a174",
    ),
    (
        Welcome(P, D, Rank(tp=1), STAMP, 2, Shape(tp=2), "shm"),
        f"0e0100000188a174a777656c636f6d65a3737263a27031a3647374a26431a472616e6b9400000100{STAMP_HEX}"
        "a870726f746f636f6c02a573686170659401010201a9646174615f6b696e64a373686d",
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
    (
        Announce(**WHO, prompt=PromptId(b"\1\2", 20)),
        f"4c0000000188a174a8616e6e6f756e6365{WHO_HEX}a6706f6c696379a56561726c79a670726f6d707492c402010214",
    ),
    (
        Grant(
            **WHO,
            pages=(PageId(1), PageId(300)),
            prompt=PromptId(b"\1\2", 20),
            time_left_s=1.5,
            links=((Rank(), Rank()), (Rank(), Rank(tp=1))),
        ),
        f"79000000018aa174a56772616e74{WHO_HEX}a570616765739201cd012ca670726f6d707492c402010214"
        "ab74696d655f6c6566745f73cb3ff8000000000000a56c696e6b739292940000000094000000009294000000009400000100",
    ),
    (
        Abort(**WHO, cause=Cause("aborted", "x", 499)),
        f"570000000187a174a561626f7274{WHO_HEX}a5636175736583a4636f6465a761626f72746564a76d657373616765a178"
        "a6737461747573cd01f3",
    ),
    (Ready(**WHO, held_s=1.5), f"3f0000000187a174a57265616479{WHO_HEX}a668656c645f73cb3ff8000000000000"),
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
    (
        Read(
            **HELD,
            src_pages=(PageId(1), PageId(300)),
            dst_pages=(PageId(4), PageId(5)),
            prompt=PromptId(b"\1\2", 20),
            links=((Rank(), Rank()), (Rank(), Rank(tp=1))),
        ),
        f"79000000018ba174a472656164{HELD_HEX}"
        "a97372635f70616765739201cd012ca96473745f7061676573920405a670726f6d707492c402010214"
        "a56c696e6b739292940000000094000000009294000000009400000100"
        "a3726964a0",
    ),
    (Confirm(**HELD), f"310000000186a174a7636f6e6669726d{HELD_HEX}"),
    (Confirmed(**HELD), f"3c0000000187a174a9636f6e6669726d6564{HELD_HEX}a77265667573616cc0"),
    (
        Confirmed(**HELD, refusal=Cause("spent", "x", 409)),
        f"5b0000000187a174a9636f6e6669726d6564{HELD_HEX}a77265667573616c83a4636f6465a57370656e74a76d657373616765a178"
        "a6737461747573cd0199",
    ),
    (
        ReadFailed(**HELD, cause=Cause("expired", "y", 409)),
        f"5d0000000187a174ab726561645f6661696c6564{HELD_HEX}"
        "a5636175736583a4636f6465a765787069726564a76d657373616765a179"
        "a6737461747573cd0199",
    ),
    (
        Release(**HELD, cause=Cause("aborted", "x", 499)),
        f"5e0000000188a174a772656c65617365{HELD_HEX}a5636175736583a4636f6465a761626f72746564a76d657373616765a178"
        "a6737461747573cd01f3a3726964a0",
    ),
    (
        Release(**HELD, cause=Cause("aborted", "x", 499), rid=Rid("r.0.0")),
        f"630000000188a174a772656c65617365{HELD_HEX}a5636175736583a4636f6465a761626f72746564a76d657373616765a178"
        "a6737461747573cd01f3a3726964a5722e302e30",
    ),
    (Renew(**LEASES), f"2d0000000185a174a572656e6577{LEASES_HEX}"),
    (Renewed(**LEASES, lease_s=1.5), f"400000000186a174a772656e65776564{LEASES_HEX}a76c656173655f73cb3ff8000000000000"),
]


def kind_of(frame: object) -> str:
    return str(frame.__struct_config__.tag)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("frame", "golden"), GOLDEN, ids=[kind_of(frame) for frame, _ in GOLDEN])
def test_every_kind_has_these_bytes(frame: Frame, golden: str) -> None:
    assert encode(frame).hex() == golden
    assert FrameReader().feed(bytes.fromhex(golden)) == [frame]


def test_no_kind_is_without_golden_bytes() -> None:
    assert {kind_of(frame) for frame, _ in GOLDEN} == KINDS


# --- a peer of protocol 1 ---------------------------------------------------------------------------------------
# Frames as it writes them. The other kinds have not changed: GOLDEN has them.

STAMP_1 = msgspec.structs.replace(STAMP, groups=(LayoutGroup("kv", 4, (0,), "f32"),), protocol_max=1)
STAMP_1_HEX = (
    "a57374616d7089a56d6f64656ca16da777656967687473a177a9746f6b656e697a6572a16ba9706167655f73697a6510aa706167655f62797465"
    "7340a86b765f6474797065a3663332a667726f7570739184a46e616d65a26b76a9726f775f627974657304a66c61796572739100a56474797065"
    "a3663332a6706f6c696379a56561726c79a870726f746f636f6c01"
)

GOLDEN_1: list[tuple[Frame, str]] = [
    (
        Hello(D, P, Rank(), STAMP_1, 1, 1, "::1", 9, "t", "s", shape=Shape(), data=()),
        f"fc000000018ba174a568656c6c6fa3737263a26431a3647374a27031a472616e6b9400000000{STAMP_1_HEX}"
        "ac70726f746f636f6c5f6d696e01ac70726f746f636f6c5f6d617801a9646174615f686f7374a33a3a31a9646174615f706f727409"
        "aa646174615f746f6b656ea174a6736563726574a173",
    ),
    (
        Welcome(P, D, Rank(), STAMP_1, 1, Shape(), "tcp"),
        f"bd0000000186a174a777656c636f6d65a3737263a27031a3647374a26431a472616e6b9400000000{STAMP_1_HEX}"
        "a870726f746f636f6c01",
    ),
    (
        Grant(**WHO, pages=(PageId(1), PageId(300)), prompt=PromptId(b"\1\2", 20), time_left_s=1.5, links=()),
        f"5c0000000189a174a56772616e74{WHO_HEX}a570616765739201cd012ca670726f6d707492c402010214"
        "ab74696d655f6c6566745f73cb3ff8000000000000",
    ),
]


@pytest.mark.parametrize(("frame", "golden"), GOLDEN_1, ids=[kind_of(frame) for frame, _ in GOLDEN_1])
def test_what_protocol_1_writes_means_one_rank_and_tcp(frame: Frame, golden: str) -> None:
    assert FrameReader().feed(bytes.fromhex(golden)) == [frame]


def within(before: object, now: object) -> bool:
    """All that `before` says, at any depth, `now` says too."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(key in now and within(value, now[key]) for key, value in before.items())
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(within, before, now))
    return before == now


@pytest.mark.parametrize(("frame", "golden"), GOLDEN_1, ids=[kind_of(frame) for frame, _ in GOLDEN_1])
def test_what_we_write_still_says_all_that_protocol_1_reads(frame: Frame, golden: str) -> None:
    before, now = (msgspec.msgpack.decode(raw[5:]) for raw in (bytes.fromhex(golden), encode(frame)))
    assert within(before, now)
    assert not within(now, before)


# --- round trips ------------------------------------------------------------------------------------------------

names = st.text(min_size=1, max_size=12).map(Instance)
counts = st.integers(0, 2**31)
places = st.integers(0, MAX_SHAPE - 1)
ranks = st.builds(Rank, places, places, places, places)
ports = st.integers(0, 65_535)
endpoints = st.builds(DataEndpoint, st.sampled_from(["tcp", "shm"]), names, names, ports, names)
whole_group = Shape(MAX_SHAPE, MAX_SHAPE, MAX_SHAPE, MAX_SHAPE)
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
holds = st.integers(1, MAX_HOLD).map(HoldNo)
held = {name: drawn for name, drawn in identity.items() if name != "room"} | {"hold": holds}
frames: st.SearchStrategy[Frame] = st.one_of(
    st.builds(
        Hello,
        names,
        names,
        ranks,
        st.just(STAMP),
        data_host=st.text(max_size=9),
        data_port=ports,
        shape=st.just(whole_group),
        data=st.lists(endpoints, max_size=MAX_ENDPOINTS).map(tuple),
    ),
    st.builds(Welcome, names, names, ranks, st.just(STAMP), shape=st.just(whole_group), data_kind=st.just("shm")),
    st.builds(Reject, names, causes),
    st.builds(Beat, names, st.floats(0, 1e6), counts, counts, st.dictionaries(st.integers(1, MAX_ROOM), counts)),
    st.builds(Announce, **identity),
    st.builds(
        Grant,
        **{**identity, "rank": st.just(Rank(tp=3))},
        links=st.lists(ranks, max_size=4, unique=True).map(lambda theirs: tuple((Rank(tp=3), rank) for rank in theirs)),
        pages=st.lists(counts.map(PageId), max_size=40).map(tuple),
        prompt=st.builds(PromptId, st.binary(max_size=16), counts),
        time_left_s=st.floats(0, 1e6),
    ),
    st.builds(Abort, **identity, cause=causes),
    st.builds(Ready, **identity, held_s=st.floats(0, 1e6)),
    st.builds(Received, **identity),
    st.builds(Success, **identity, row=rows),
    st.builds(Failed, **identity, cause=causes),
    st.builds(Drained, **identity),
    st.builds(
        Read,
        **{**held, "rank": st.just(Rank(tp=3))},
        src_pages=st.just((PageId(1), PageId(7))),
        dst_pages=st.tuples(counts.map(PageId), counts.map(PageId)),
        prompt=st.builds(PromptId, st.binary(max_size=16), counts),
        links=st.lists(ranks, max_size=4, unique=True).map(lambda theirs: tuple((Rank(tp=3), rank) for rank in theirs)),
    ),
    st.builds(Confirm, **held),
    st.builds(Confirmed, **held, refusal=st.none() | causes),
    st.builds(ReadFailed, **held, cause=causes),
    st.builds(Release, **held, cause=causes, rid=names.map(Rid)),
    st.builds(Renew, src=names, dst=names, rank=ranks, holds=st.lists(holds, max_size=40).map(tuple)),
    st.builds(Renewed, src=names, dst=names, rank=ranks, holds=st.just((HoldNo(1),)), lease_s=st.floats(0, 1e6)),
)


@given(st.lists(frames, max_size=6), st.integers(1, 97))
def test_frames_come_back_in_order_however_the_stream_is_cut(sent: list[Frame], cut: int) -> None:
    stream = b"".join(encode(frame) for frame in sent)
    reader = FrameReader()
    got = [frame for i in range(0, len(stream), cut) for frame in reader.feed(stream[i : i + cut])]
    assert got == sent
    assert reader.half_frame_bytes == 0


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_waits_for_more_and_raises_nothing_else(garbage: bytes) -> None:
    reader = FrameReader()
    with contextlib.suppress(BadFrame):
        got = reader.feed(garbage)
        assert all(type(frame) is UnknownKind or kind_of(frame) in KINDS for frame in got)


@given(frames, st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_a_frame_with_broken_bytes_in_it_raises_nothing_else_either(frame: Frame, at: int, junk: bytes) -> None:
    whole = bytearray(encode(frame))
    at = 5 + at % (len(whole) - 5)
    whole[at : at + len(junk)] = junk[: len(whole) - at]
    reader = FrameReader()
    with contextlib.suppress(BadFrame):
        got = reader.feed(whole)
        assert all(type(one) is UnknownKind or kind_of(one) in KINDS for one in got)


# --- greetings of later schemas ---------------------------------------------------------------------------------

LATER: dict[str, Any] = {
    "t": "hello",
    "src": "d9",
    "dst": "p1",
    "protocol_min": PROTOCOL_VERSION + 1,
    "protocol_max": PROTOCOL_VERSION + 2,
    "rank": {"of": "another form"},
    "stamp": [["quite", "another"]],
}


def later(**fields: object) -> bytes:
    return framed({**LATER, **fields})


def test_a_later_hello_is_read_as_far_as_the_core_needs_it_to_refuse_it() -> None:
    [hello] = FrameReader().feed(later(secret="s"))
    assert isinstance(hello, Hello)
    assert (hello.src, hello.dst, hello.secret) == ("d9", "p1", "s")
    assert (hello.protocol_min, hello.protocol_max) == (PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2)
    assert hello.stamp.protocol_min == PROTOCOL_VERSION + 1


def test_a_later_welcome_is_read_alike() -> None:
    [welcome] = FrameReader().feed(later(t="welcome", src="p9", dst="d1", shape="none"))
    assert isinstance(welcome, Welcome)
    assert (welcome.src, welcome.dst) == ("p9", "d1")
    assert (welcome.stamp.protocol_min, welcome.stamp.protocol_max) == (PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2)


def test_a_greeting_from_before_our_oldest_protocol_is_read_alike() -> None:
    [hello] = FrameReader().feed(later(protocol_min=0, protocol_max=OLDEST_PROTOCOL - 1))
    assert isinstance(hello, Hello)


def test_a_later_hello_that_ours_could_be_but_for_its_ranges_is_read_alike() -> None:
    told = msgspec.msgpack.decode(encode(Hello(D, P, Rank(), STAMP, data=(ONE,)))[5:])
    many = {**told, "data": told["data"] * (MAX_ENDPOINTS + 1), "protocol_min": 77, "protocol_max": 78}
    [hello] = FrameReader().feed(framed(many))
    assert isinstance(hello, Hello)
    assert hello.protocol_max == 78


@pytest.mark.parametrize(
    "fields",
    [
        {"protocol_min": 1},
        {"protocol_min": PROTOCOL_VERSION, "protocol_max": PROTOCOL_VERSION},
        {"protocol_min": "new"},
        {"src": ""},
        {"src": "x" * 129},
        {"src": 7},
        {"t": "reject"},
    ],
    ids=str,
)
def test_a_greeting_that_shares_a_protocol_or_says_too_little_is_malformed(fields: dict[str, object]) -> None:
    with pytest.raises(BadFrame, match="is malformed"):
        FrameReader().feed(later(**fields))


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
        (drained_with(rank=[0, 0, MAX_SHAPE, 0]), f"rank dp0cp0tp{MAX_SHAPE}pp0"),
        (drained_with(rank=[-1, 0, 0, 0]), "rank dp-1cp0tp0pp0"),
    ],
)
def test_a_bad_frame_is_refused_by_name(stream: bytes, named: str) -> None:
    with pytest.raises(BadFrame, match=named):
        FrameReader().feed(stream)


def test_a_grant_whose_time_left_is_no_number_is_refused() -> None:
    grant = Grant(**WHO, pages=(), prompt=PromptId(b"", 0), time_left_s=float("nan"))
    with pytest.raises(BadFrame, match="time left nan"):
        FrameReader().feed(encode(grant))


@pytest.mark.parametrize("held_s", [-0.5, float("nan"), float("inf")])
def test_a_ready_whose_term_is_no_time_is_refused(held_s: float) -> None:
    with pytest.raises(BadFrame, match=f"held for {held_s}"):
        FrameReader().feed(encode(Ready(**WHO, held_s=held_s)))


def links_of(*pairs: tuple[Rank, Rank]) -> Grant:
    return Grant(**WHO, pages=(), prompt=PromptId(b"", 0), time_left_s=1.0, links=pairs)


@pytest.mark.parametrize(
    ("grant", "named"),
    [
        (links_of(*((Rank(), Rank(tp=tp)) for tp in range(MAX_LINKS + 1))), f"{MAX_LINKS + 1} links, the most is"),
        (links_of((Rank(), Rank()), (Rank(), Rank())), "names a link twice"),
        (links_of((Rank(tp=1), Rank())), "none of them is this rank's"),
        (links_of((Rank(), Rank(tp=-1))), "rank dp0cp0tp-1pp0"),
        (links_of((Rank(pp=MAX_SHAPE), Rank())), f"rank dp0cp0tp0pp{MAX_SHAPE}"),
    ],
)
def test_links_that_cannot_be_are_refused(grant: Grant, named: str) -> None:
    with pytest.raises(BadFrame, match=named):
        FrameReader().feed(encode(grant))


def test_links_that_are_not_pairs_are_refused() -> None:
    body = msgspec.to_builtins(links_of()) | {"prompt": [b"", 0], "links": [[[0, 0, 0, 0]]]}
    with pytest.raises(BadFrame, match="'grant' is malformed"):
        FrameReader().feed(framed(body))


def read(**fields: object) -> Read:
    given: dict[str, Any] = {
        "src_pages": (PageId(1),),
        "dst_pages": (PageId(2),),
        "prompt": PromptId(b"", 0),
        **HELD,
        **fields,
    }
    return Read(**given)


@pytest.mark.parametrize(
    ("frame", "named"),
    [
        (Confirm(**{**HELD, "hold": HoldNo(0)}), "hold 0"),
        (Confirm(**{**HELD, "hold": HoldNo(2**63)}), f"hold {2**63}"),
        (Confirmed(**{**HELD, "grant": GrantNo(-1)}), "grant -1 is negative"),
        (Release(**{**HELD, "rank": Rank(tp=-1)}, cause=Cause("x", "y")), "rank dp0cp0tp-1pp0"),
        (Renew(**{**LEASES, "holds": (HoldNo(1), HoldNo(-1))}), "hold -1"),
        (Renewed(**LEASES, lease_s=float("inf")), "lease of inf"),
        (Renewed(**LEASES, lease_s=-1.0), "lease of -1.0"),
        (read(dst_pages=()), "a read of 1 pages into 0"),
        (read(links=((Rank(tp=1), Rank()),)), "a read on rank .* none of them is this rank's"),
        (read(links=((Rank(), Rank()), (Rank(), Rank()))), "a read names a link twice"),
    ],
)
def test_a_hold_frame_that_cannot_be_is_refused(frame: Frame, named: str) -> None:
    with pytest.raises(BadFrame, match=named):
        FrameReader().feed(encode(frame))


ONE = DataEndpoint("tcp", "", "::1", 9, "t")


def offer(**fields: object) -> Hello:
    return Hello(D, P, Rank(), STAMP, **fields)  # type: ignore[arg-type]


def with_endpoint(**fields: object) -> Hello:
    return offer(data=(ONE, msgspec.structs.replace(ONE, **fields)))


@pytest.mark.parametrize(
    ("hello", "named"),
    [
        (offer(data=(ONE,) * (MAX_ENDPOINTS + 1)), "17 data endpoints, the most is 16"),
        (with_endpoint(kind=""), "names no kind"),
        (with_endpoint(kind="k" * 33), "data kind 'kkkk"),
        (with_endpoint(where="w" * 256), "data where 'wwww"),
        (with_endpoint(host="h" * 256), "data host 'hhhh.* has 256 characters, the most is 255"),
        (with_endpoint(token="secret" * 50), "data token has 300 characters"),
        (with_endpoint(port=65_536), "data port 65536"),
        (with_endpoint(port=-1), "data port -1"),
        (offer(data_port=65_536), "data port 65536"),
        (offer(data_host="h" * 256), "data host 'hhhh"),
        (offer(data_token="secret" * 50), "data token has 300 characters"),
        (offer(shape=Shape(tp=0)), r"shape \(dp 1, cp 1, tp 0, pp 1\)"),
        (offer(shape=Shape(dp=MAX_SHAPE + 1)), f"shape .dp {MAX_SHAPE + 1}"),
        (Hello(D, P, Rank(tp=2), STAMP, shape=Shape(tp=2)), "rank dp0cp0tp2pp0 is not one of a group of shape"),
        (Hello(D, P, Rank(cp=-1), STAMP), "rank dp0cp-1tp0pp0"),
    ],
)
def test_a_hello_that_cannot_be_is_refused(hello: Hello, named: str) -> None:
    with pytest.raises(BadFrame, match=named) as raised:
        FrameReader().feed(encode(hello))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("welcome", "named"),
    [
        (Welcome(P, D, Rank(tp=1), STAMP), "rank dp0cp0tp1pp0 is not one of a group of shape"),
        (Welcome(P, D, Rank(), STAMP, shape=Shape(pp=-1)), "pp -1"),
        (Welcome(P, D, Rank(), STAMP, data_kind="k" * 33), "data kind 'kkkk"),
    ],
)
def test_a_welcome_that_cannot_be_is_refused(welcome: Welcome, named: str) -> None:
    with pytest.raises(BadFrame, match=named):
        FrameReader().feed(encode(welcome))


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
