"""TCP's own: bytes of the frames, garbage and half frames on the port, and peers that stop in the middle."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import xxhash

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, Instance, MoveNo, PageId, Rank, Seat
from pdplane.core.slices import Slice, Span, whole_page
from pdplane.transport import checksum
from pdplane.transport import tcp_frames as frames
from pdplane.transport.checksum import NoChecksum
from pdplane.transport.contract import Pair
from pdplane.transport.landing import MAX_UNBOUND
from pdplane.transport.landing_table import Verdict
from pdplane.transport.tcp_landing import TcpLanding
from pdplane.transport.tcp_mover import TcpMover
from pdplane.transport.tcp_receiver import Frame
from pdplane.transport.tcp_sender import STAGING_BYTES

from .rigs import PAGE_BYTES, PATIENCE_S, D, P, Rig, Tcp, Told, content, paired, seat


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(Tcp())
    yield rig
    rig.close()


def tcp_of(rig: Rig) -> TcpLanding:
    assert isinstance(rig.landing, TcpLanding)
    return rig.landing


class RawPrefill:
    """A socket at the data port that says what it likes."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.sock = socket.create_connection(address_of(rig), PATIENCE_S)

    def __enter__(self) -> RawPrefill:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def bind(
        self, src: Seat = P, dst: Seat = D, token: str | None = None, page_bytes: int = PAGE_BYTES, version: int = 2
    ) -> None:
        token = self.rig.landing.endpoint.token if token is None else token
        self.version = version
        self.sock.sendall(frames.encode_bind(frames.Bind(src, dst, token, page_bytes, version)))

    def head(
        self, seq: int, grant: int, *pages: int, page_bytes: int = PAGE_BYTES, checksum: int | None = None
    ) -> None:
        head = frames.PagesHead(len(pages), seq, GrantNo(grant), page_bytes, checksum)
        self.sock.sendall(frames.encode_pages_head(head, [PageId(page) for page in pages], self.version))

    def ack(self) -> tuple[int, Verdict]:
        return frames.decode_ack(self.sock.recv(frames.ACK_BYTES, socket.MSG_WAITALL), self.version)

    def is_closed_by_decode(self) -> bool:
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True


def address_of(rig: Rig) -> tuple[str, int]:
    return rig.landing.endpoint.host, rig.landing.endpoint.port


# --- bytes -------------------------------------------------------------------------------------------------------


RANKS = "0000000001000000" + "0200030004000500"  # dp, cp, tp, pp of each side


@pytest.mark.parametrize(
    ("bind", "golden"),
    [
        (
            frames.Bind(seat("p1"), seat("d1"), "tok", 4096, version=1),
            "70646b76010102000200030000100000" + b"p1d1tok".hex(),
        ),
        (
            frames.Bind(Seat(Instance("p1"), Rank(tp=1)), Seat(Instance("d1"), Rank(2, 3, 4, 5)), "tok", 4096),
            "70646b76020102000200030000100000" + RANKS + b"p1d1tok".hex(),
        ),
    ],
    ids=["version 1", "version 2"],
)
def test_bind_has_these_bytes(bind: frames.Bind, golden: str) -> None:
    assert frames.encode_bind(bind).hex() == golden
    raw = bytes.fromhex(golden)
    head = frames.decode_bind_head(raw[: frames.BIND_HEAD_BYTES])
    assert head.rest == len(raw) - frames.BIND_HEAD_BYTES
    assert frames.decode_bind(head, raw[frames.BIND_HEAD_BYTES :]) == bind


@pytest.mark.parametrize(
    ("version", "checksum", "golden"),
    [
        (1, None, "70646b7601020200001000000500000000000000090000000000000003000000" + "2c010000"),
        (2, None, "70646b7602020200001000000500000000000000090000000000000000000000000000000300" + "00002c010000"),
        (2, 255, "70646b76020402000010000005000000000000000900000000000000ff0000000000000003000000" + "2c010000"),
    ],
    ids=["version 1", "version 2", "with a checksum"],
)
def test_pages_head_has_these_bytes(version: int, checksum: int | None, golden: str) -> None:
    head = frames.PagesHead(2, 5, GrantNo(9), 4096, checksum)
    assert frames.encode_pages_head(head, [PageId(3), PageId(300)], version).hex() == golden
    raw, size = bytes.fromhex(golden), frames.pages_head_bytes(version)
    assert frames.decode_pages_head(raw[:size], version) == head
    assert frames.decode_page_ids(raw[size:]) == [3, 300]


@pytest.mark.parametrize("verdict", list(Verdict))
def test_ack_has_these_bytes(verdict: Verdict) -> None:
    golden = f"70646b7602030{verdict.value}000700000000000000"
    assert frames.encode_ack(7, verdict).hex() == golden
    assert frames.decode_ack(bytes.fromhex(golden)) == (7, verdict)


def test_a_mover_of_version_1_is_told_no_verdict_that_it_does_not_know() -> None:
    assert frames.encode_ack(7, Verdict.CUT, 1).hex() == "70646b76010306000700000000000000"
    assert frames.decode_ack(frames.encode_ack(7, Verdict.MISFIT, 1), 1) == (7, Verdict.NOT_GRANTED)


# --- garbage and half frames -------------------------------------------------------------------------------------


def bad_bind(**change: object) -> bytes:
    fields: dict[str, object] = {"src": P, "dst": D, "token": "guess", "page_bytes": PAGE_BYTES, **change}
    return frames.encode_bind(frames.Bind(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 64,
        b"pdkv\x03" + b"\0" * 32,
        b"pdkv\x01\x02" + b"\0" * 64,
        b"pdkv\x01\x01" + b"\xff" * 10,
        b"pdkv\x01\x01" + b"\0" * 10,
        bad_bind(),
        bad_bind(token=""),
        frames.encode_bind(frames.Bind(P, D, "ttt", 1))[:-3] + b"\xff\xfe\xfd",
    ],
    ids=["http", "zeros", "version", "pages first", "long names", "no name", "wrong token", "no token", "not utf-8"],
)
def test_garbage_is_counted_and_closes_that_connection_alone(rig: Rig, first: bytes) -> None:
    rig.arm(1, [0, 1])
    rig.move(1, 1, [(5, 0)])
    assert rig.told.end_of(1) == ""
    with RawPrefill(rig) as raw:
        raw.sock.sendall(first)
        assert raw.is_closed_by_decode()
    assert tcp_of(rig).bad_frames == 1
    rig.move(2, 1, [(6, 1)])
    assert rig.told.end_of(2) == ""


@pytest.mark.parametrize(
    ("change", "value"),
    [("dst", seat("d-0")), ("dst", seat("d-1", 1)), ("page_bytes", 64)],
    ids=["an earlier instance", "another rank", "another layout"],
)
def test_a_bind_to_what_this_is_not_is_refused(rig: Rig, change: str, value: object) -> None:
    with RawPrefill(rig) as raw:
        raw.bind(**{change: value})  # type: ignore[arg-type]
        assert raw.is_closed_by_decode()
    assert tcp_of(rig).bad_frames == 1


@pytest.mark.parametrize("kept", [1, 5, 36, 36 + 3, 44, 44 + PAGE_BYTES])
def test_a_prefill_that_dies_inside_a_frame_lands_nothing_and_can_come_back(rig: Rig, kept: int) -> None:
    rig.arm(1, [8, 9])
    whole = frames.encode_pages_head(frames.PagesHead(2, 1, GrantNo(1), PAGE_BYTES), [PageId(8), PageId(9)])
    assert (frames.pages_head_bytes(2), len(whole)) == (36, 44)
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.sock.sendall((whole + content(3, PAGE_BYTES) + content(4, PAGE_BYTES))[:kept])
        raw.sock.shutdown(socket.SHUT_WR)
        assert raw.is_closed_by_decode()
    assert tcp_of(rig).bad_frames == 1
    assert rig.told.landed == []
    assert tcp_of(rig).table.discarded == {}
    rig.move(2, 1, [(5, 8), (6, 9)])
    assert rig.told.end_of(2) == ""
    assert rig.has(8, src=5)


def test_leaving_between_frames_is_no_bad_frame(rig: Rig) -> None:
    rig.arm(1, [8])
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.head(1, 1, 8)
        raw.sock.sendall(content(3, PAGE_BYTES))
        assert raw.ack() == (1, Verdict.LANDED)
        raw.sock.shutdown(socket.SHUT_WR)
        assert raw.is_closed_by_decode()
    assert tcp_of(rig).bad_frames == 0


@pytest.mark.parametrize(("seq", "count"), [(2, 1), (0, 1), (1, 65)])
def test_a_frame_out_of_order_or_too_long_closes_the_connection(rig: Rig, seq: int, count: int) -> None:
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.head(seq, 1, *range(count))
        assert raw.is_closed_by_decode()
    assert tcp_of(rig).bad_frames == 1


def test_a_revoke_inside_a_frame_sends_the_rest_to_scratch_and_keeps_the_connection(rig: Rig) -> None:
    rig.arm(1, [8, 9])
    rig.arm(2, [10])
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.head(1, 2, 10)
        raw.sock.sendall(content(1, PAGE_BYTES))
        assert raw.ack() == (1, Verdict.LANDED)
        raw.head(2, 1, 8, 9)
        raw.sock.sendall(content(3, PAGE_BYTES))
        if not rig.landing.revoke(GrantNo(1)):
            rig.told.wait(lambda told: told.quiet == [GrantNo(1)])
        rig.target.page(PageId(8))[:] = rig.target.page(PageId(9))[:] = b"\xcd" * PAGE_BYTES
        raw.sock.sendall(content(4, PAGE_BYTES))
        assert raw.ack() == (2, Verdict.REVOKED)
        assert bytes(rig.target.page(PageId(8))) == b"\xcd" * PAGE_BYTES
        assert bytes(rig.target.page(PageId(9))) == b"\xcd" * PAGE_BYTES
        rig.arm(3, [11])
        raw.head(3, 3, 11)
        raw.sock.sendall(content(5, PAGE_BYTES))
        assert raw.ack() == (3, Verdict.LANDED)
    assert rig.has(11, src=5)


def test_a_read_that_fails_in_any_way_does_not_keep_a_revoke_waiting(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def views(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Frame, "page_views", views)
    rig.arm(7, [1])
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.head(1, 7, 1)
        assert raw.is_closed_by_decode()
    assert rig.landing.revoke(GrantNo(7)) is True


def test_strangers_that_say_nothing_do_not_pile_up(rig: Rig) -> None:
    silent = [RawPrefill(rig) for _ in range(MAX_UNBOUND + 1)]
    assert silent[0].is_closed_by_decode()
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8)])
    assert rig.told.end_of(1) == ""
    for raw in silent:
        raw.sock.close()


# --- a decode that takes nothing ---------------------------------------------------------------------------------


class FrozenDecode:
    """Accepts and never reads: what a stopped process looks like from outside."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = DataEndpoint("tcp", host="127.0.0.1", port=self.listener.getsockname()[1], token="t")

    def accept(self) -> socket.socket:
        self.listener.settimeout(PATIENCE_S)
        return self.listener.accept()[0]


@pytest.fixture
def frozen() -> Iterator[FrozenDecode]:
    decode = FrozenDecode()
    yield decode
    decode.listener.close()


def pairs(count: int) -> list[Pair]:
    return paired([(page, page) for page in range(count)])


def post(rig: Rig, number: int, grant: int = 1) -> None:
    rig.mover.move(MoveNo(number), GrantNo(grant), D, pairs(128))


def test_cancel_drops_queued_moves_and_lets_begun_ones_run(frozen: FrozenDecode) -> None:
    rig = Rig(Tcp(), pages=128, page_bytes=1 << 19)
    rig.mover.connect(D, frozen.endpoint, rig.slice)
    post(rig, 1)  # 64 MiB: more than all socket buffers, so that it is never through
    post(rig, 2)
    post(rig, 3, grant=2)
    with frozen.accept() as conn:
        assert conn.recv(frames.BIND_HEAD_BYTES, socket.MSG_WAITALL)[:4] == frames.MAGIC
        conn.recv(len("p-1d-1t") + frames.pages_head_bytes(1), socket.MSG_WAITALL)
        rig.mover.cancel(GrantNo(1), D)
        assert rig.told.end_of(2) == "cancelled"
        assert [number for number, _ in rig.told.wrote] == [2]
        rig.mover.teardown(D.instance)
        assert rig.told.end_of(1) == "torn down"
        assert rig.told.end_of(3) == "torn down"
    rig.close()


def test_closing_the_mover_ends_moves_to_a_frozen_peer(frozen: FrozenDecode) -> None:
    rig = Rig(Tcp(), pages=128, page_bytes=1 << 17)
    rig.mover.connect(D, frozen.endpoint, rig.slice)
    post(rig, 1)
    with frozen.accept():
        rig.close()
    assert rig.told.wrote == [(1, "the mover was closed")]


def test_a_peer_that_dies_ends_its_moves_and_nobody_elses(frozen: FrozenDecode) -> None:
    rig = Rig(Tcp(), pages=128, page_bytes=1 << 17)
    other = seat("d-2")
    rig.mover.connect(other, frozen.endpoint, rig.slice)
    rig.mover.move(MoveNo(1), GrantNo(1), other, pairs(128))
    frozen.accept().close()
    assert rig.told.end_of(1).startswith(f"peer {other} at 127.0.0.1")
    rig.arm(1, range(128))
    post(rig, 2)
    assert rig.told.end_of(2) == ""
    rig.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frames.encode_ack(2, Verdict.LANDED, 1),
        b"pdkv\x01\x03\x63\0" + b"\1" + b"\0" * 7,
    ],
    ids=["http", "ack of an unsent frame", "unknown verdict"],
)
def test_a_decode_that_answers_nonsense_ends_the_connection(frozen: FrozenDecode, rig: Rig, answer: bytes) -> None:
    rig.mover.connect(D, frozen.endpoint, rig.slice)
    rig.move(1, 1, [(0, 0)])
    with frozen.accept() as conn:
        conn.sendall(answer)
        assert rig.told.end_of(1).startswith("peer d-1")


def test_a_new_endpoint_of_the_same_peer_ends_what_went_to_the_old_one(frozen: FrozenDecode, rig: Rig) -> None:
    rig.mover.connect(D, frozen.endpoint, rig.slice)
    rig.move(1, 1, [(0, 0)])
    with frozen.accept():
        rig.connect()
        assert rig.told.end_of(1) == f"peer {D} has another endpoint now"
    rig.arm(1, [0])
    rig.move(2, 1, [(0, 0)])
    assert rig.told.end_of(2) == ""


def test_an_empty_move_completes(rig: Rig) -> None:
    rig.move(1, 1, [])
    assert rig.told.end_of(1) == ""


def test_a_closed_mover_takes_no_moves(rig: Rig) -> None:
    rig.mover.close()
    with pytest.raises(RuntimeError, match="move 1 posted to a closed mover"):
        rig.move(1, 1, [(0, 0)])


def test_a_completion_callback_that_fails_does_not_stop_the_mover(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    told = Told()

    def on_wrote(number: MoveNo, error: str) -> None:
        told.on_wrote(number, error)
        raise RuntimeError("mine")

    mover = TcpMover(seat("p-9"), rig.source, on_wrote)
    mover.connect(D, rig.landing.endpoint, rig.slice)
    for number in (1, 2):
        mover.move(MoveNo(number), GrantNo(9), D, pairs(1))
        assert told.end_of(number) == "discarded: unknown grant"
    mover.close()
    assert "completion callback of move 1" in caplog.text


# --- where it listens --------------------------------------------------------------------------------------------


def listening(rig: Rig, **where: object) -> TcpLanding:
    return TcpLanding(D, rig.target, rig.told.on_landed, rig.told.on_quiet, **where)  # type: ignore[arg-type]


def test_a_taken_port_is_named(rig: Rig) -> None:
    port = rig.landing.endpoint.port
    with pytest.raises(OSError, match=f"data port 127.0.0.1:{port} cannot be bound"):
        listening(rig, port=port)


def test_a_wildcard_needs_an_address_to_dial(rig: Rig) -> None:
    with pytest.raises(ValueError, match="name the address that prefills dial"):
        listening(rig, host="0.0.0.0")
    landing = listening(rig, host="0.0.0.0", advertise_host="127.0.0.1")
    assert landing.endpoint.host == "127.0.0.1"
    landing.close()


def test_an_address_of_another_host_is_named(rig: Rig) -> None:
    with pytest.raises(OSError, match=r"data port 192\.0\.2\.1:0 cannot be bound"):
        listening(rig, host="192.0.2.1")


@pytest.mark.parametrize(("host", "port"), [("a..b", 1), ("127.0.0.1", 99_999), ("127.0.0.1", -1)])
def test_an_impossible_endpoint_ends_the_move(rig: Rig, host: str, port: int) -> None:
    rig.mover.connect(D, DataEndpoint("tcp", host=host, port=port, token="t"), rig.slice)
    rig.move(1, 1, [(0, 0)])
    assert rig.told.end_of(1).startswith(f"peer {D} at {host}:{port} is gone")


# --- versions ----------------------------------------------------------------------------------------------------


def test_a_prefill_of_version_1_is_read(rig: Rig) -> None:
    rig.arm(1, [8])
    with RawPrefill(rig) as raw:
        raw.bind(version=1)
        raw.head(1, 1, 8)
        raw.sock.sendall(content(3, PAGE_BYTES))
        assert raw.ack() == (1, Verdict.LANDED)
        raw.head(2, 1, 7)
        raw.sock.sendall(content(3, PAGE_BYTES))
        assert raw.ack() == (2, Verdict.NOT_GRANTED)
    assert rig.has(8, src=3)
    assert rig.untouched(7)


def test_a_connection_keeps_to_the_version_of_its_bind(rig: Rig) -> None:
    with RawPrefill(rig) as raw:
        raw.bind(version=1)
        raw.version = 2
        raw.head(1, 1, 8)
        assert raw.is_closed_by_decode()
    assert tcp_of(rig).bad_frames == 1


LOWER = Slice(PAGE_BYTES, PAGE_BYTES, (Span(0, 0, 64, 128, 128, PAGE_BYTES // 128),))
"""The first 64 of every 128 bytes."""
UPPER = Slice(PAGE_BYTES, PAGE_BYTES, (Span(64, 64, 64, 128, 128, PAGE_BYTES // 128),))


@pytest.mark.parametrize(
    ("src", "dst", "slice_", "version"),
    [
        (P, D, whole_page(PAGE_BYTES), 1),
        (P, D, LOWER, 2),
        (seat("p-1", 1), D, whole_page(PAGE_BYTES), 2),
        (P, seat("d-1", 1), whole_page(PAGE_BYTES), 2),
    ],
    ids=["whole pages of single ranks", "slices", "a rank of prefill", "a rank of decode"],
)
def test_a_mover_speaks_the_lowest_version_that_says_it(
    frozen: FrozenDecode, rig: Rig, src: Seat, dst: Seat, slice_: Slice, version: int
) -> None:
    mover = TcpMover(src, rig.source, rig.told.on_wrote)
    mover.connect(dst, frozen.endpoint, slice_)
    mover.move(MoveNo(1), GrantNo(1), dst, pairs(1))
    with frozen.accept() as conn:
        head = frames.decode_bind_head(conn.recv(frames.BIND_HEAD_BYTES, socket.MSG_WAITALL))
        bind = frames.decode_bind(head, conn.recv(head.rest, socket.MSG_WAITALL))
        assert bind == frames.Bind(src, dst, "t", PAGE_BYTES, version)
        mover.close()


# --- slices ------------------------------------------------------------------------------------------------------


def test_a_frame_whose_length_is_not_its_slices_is_refused_and_the_connection_goes_on(rig: Rig) -> None:
    rig.landing.arm(GrantNo(1), P, [PageId(8)], LOWER)
    with RawPrefill(rig) as raw:
        raw.bind()
        for seq, size in enumerate((PAGE_BYTES, 1, PAGE_BYTES // 2 - 1), start=1):
            raw.head(seq, 1, 8, page_bytes=size)
            raw.sock.sendall(bytes(size))
            assert raw.ack() == (seq, Verdict.MISFIT)
        raw.head(4, 1, 8, page_bytes=PAGE_BYTES // 2)
        raw.sock.sendall(b"\x01" * (PAGE_BYTES // 2))
        assert raw.ack() == (4, Verdict.LANDED)
    assert tcp_of(rig).table.discarded == {Verdict.MISFIT: 3}
    assert rig.target.page(PageId(8)) == (b"\x01" * 64 + b"\xee" * 64) * (PAGE_BYTES // 128)


@pytest.mark.parametrize("size", [0, PAGE_BYTES + 1, 2**32 - 1])
def test_a_frame_of_pages_that_cannot_be_this_pools_ends_its_connection_alone(rig: Rig, size: int) -> None:
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.head(1, 1, 8, page_bytes=size)
        assert raw.is_closed_by_decode()
    assert tcp_of(rig).bad_frames == 1
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8)])
    assert rig.told.end_of(1) == ""


def test_a_revoke_inside_a_frame_that_is_staged_leaves_the_pages_alone(rig: Rig) -> None:
    rig.landing.arm(GrantNo(1), P, [PageId(8), PageId(9)], LOWER)
    rig.arm(2, [10])
    half = content(3, PAGE_BYTES // 2)
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.head(1, 1, 8, 9, page_bytes=PAGE_BYTES // 2)
        raw.sock.sendall(half)
        assert rig.landing.revoke(GrantNo(1))
        raw.sock.sendall(half)
        assert raw.ack() == (1, Verdict.REVOKED)
        raw.head(2, 2, 10)
        raw.sock.sendall(content(5, PAGE_BYTES))
        assert raw.ack() == (2, Verdict.LANDED)
    assert rig.untouched(8)
    assert rig.untouched(9)
    assert rig.has(10, src=5)


def test_a_prefill_that_dies_inside_a_staged_frame_lands_nothing_and_can_come_back(rig: Rig) -> None:
    rig.landing.arm(GrantNo(1), P, [PageId(8)], LOWER)
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.head(1, 1, 8, page_bytes=PAGE_BYTES // 2)
        raw.sock.sendall(bytes(100))
        raw.sock.shutdown(socket.SHUT_WR)
        assert raw.is_closed_by_decode()
    assert rig.untouched(8)
    rig.mover.connect(D, rig.landing.endpoint, LOWER)
    rig.move(1, 1, [(5, 8)])
    assert rig.told.end_of(1) == ""
    assert rig.target.page(PageId(8))[:64] == content(5, 64)


def test_frames_that_are_staged_are_no_longer_than_the_staging() -> None:
    page = 3 << 20
    rig = Rig(Tcp(), pages=4, page_bytes=page)
    rig.slice = Slice(page, page, (Span(0, 0, 2 << 10, 3 << 10, 3 << 10, 1 << 10),))
    assert 2 * rig.slice.size_bytes == STAGING_BYTES
    rig.connect()
    rig.arm(1, range(4))
    rig.move(1, 1, [(0, 3), (1, 2), (2, 1), (3, 0)])
    assert rig.told.end_of(1) == ""
    assert rig.told.pages_of(1) == [3, 2, 1, 0]
    for src, dst in enumerate((3, 2, 1, 0)):
        here, there = bytes(rig.target.page(PageId(dst))), bytes(rig.source.page(PageId(src)))
        assert all(here[at : at + 2048] == there[at : at + 2048] for at in range(0, page, 3072))
        assert all(here[at + 2048 : at + 3072] == b"\xee" * 1024 for at in range(0, page, 3072))
    rig.close()


def test_another_slice_for_the_same_endpoint_is_another_connection(rig: Rig) -> None:
    rig.landing.arm(GrantNo(1), P, [PageId(8)], LOWER)
    rig.landing.arm(GrantNo(2), P, [PageId(8)], UPPER)
    for number, slice_ in enumerate((LOWER, UPPER), start=1):
        rig.mover.connect(D, rig.landing.endpoint, slice_)
        rig.move(number, number, [(5, 8)])
        assert rig.told.end_of(number) == ""
    assert rig.has(8, src=5)


# --- checksums ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slice_", [whole_page(PAGE_BYTES), LOWER], ids=["whole", "staged"])
def test_what_the_wire_has_changed_is_corrupt_and_not_landed(rig: Rig, slice_: Slice) -> None:
    rig.landing.arm(GrantNo(1), P, [PageId(8), PageId(9)], slice_)
    data = bytearray(content(1, 2 * slice_.size_bytes))
    digest = xxhash.xxh3_64_intdigest(data)
    data[-1] ^= 1
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.head(1, 1, 8, 9, page_bytes=slice_.size_bytes, checksum=digest)
        raw.sock.sendall(data)
        assert raw.ack() == (1, Verdict.CORRUPT)
        assert rig.told.landed == []
        data[-1] ^= 1
        raw.head(2, 1, 8, 9, page_bytes=slice_.size_bytes, checksum=digest)
        raw.sock.sendall(data)
        assert raw.ack() == (2, Verdict.LANDED)
    assert rig.told.pages_of(1) == [8, 9]


def test_a_revoke_matters_more_than_a_checksum(rig: Rig) -> None:
    rig.arm(1, [8])
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.head(1, 1, 8, checksum=1)
        assert rig.landing.revoke(GrantNo(1))
        raw.sock.sendall(bytes(PAGE_BYTES))
        assert raw.ack() == (1, Verdict.REVOKED)


def test_without_the_extra_a_mover_that_should_check_is_refused_with_its_name(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum, "AVAILABLE", False)
    with pytest.raises(NoChecksum, match=r"pdplane\[checksum\]"):
        TcpMover(P, rig.source, rig.told.on_wrote, checksum=True)


def test_without_the_extra_a_landing_lands_nothing_that_it_cannot_check(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checksum, "AVAILABLE", False)
    rig.arm(1, [8])
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.head(1, 1, 8, checksum=1)
        assert raw.is_closed_by_decode()
    assert "pdplane[checksum]" in caplog.text
    assert rig.untouched(8)
