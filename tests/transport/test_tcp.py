"""TCP's own: bytes of the frames, garbage and half frames on the port, and peers that stop in the middle."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pdplane.core.ids import GrantNo, Instance, MoveNo, PageId
from pdplane.transport import tcp_frames as frames
from pdplane.transport.contract import Endpoint, Pair
from pdplane.transport.landing_table import Verdict
from pdplane.transport.tcp_landing import MAX_UNBOUND, TcpLanding, _Frame
from pdplane.transport.tcp_mover import TcpMover

from .rigs import PAGE_BYTES, PATIENCE_S, D, P, Rig, Told, content


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig("tcp")
    yield rig
    rig.close()


class RawPrefill:
    """A socket at the data port that says what it likes."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.sock = socket.create_connection(address_of(rig), PATIENCE_S)

    def __enter__(self) -> RawPrefill:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def bind(self, src: str = P, dst: str = D, token: str | None = None, page_bytes: int = PAGE_BYTES) -> None:
        token = self.rig.landing.token if token is None else token
        self.sock.sendall(frames.encode_bind(frames.Bind(Instance(src), Instance(dst), token, page_bytes)))

    def head(self, seq: int, grant: int, *pages: int) -> None:
        head = frames.PagesHead(len(pages), seq, GrantNo(grant))
        self.sock.sendall(frames.encode_pages_head(head, PAGE_BYTES, [PageId(page) for page in pages]))

    def ack(self) -> tuple[int, Verdict]:
        return frames.decode_ack(self.sock.recv(frames.ACK_BYTES, socket.MSG_WAITALL))

    def is_closed_by_decode(self) -> bool:
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True


def address_of(rig: Rig) -> tuple[str, int]:
    return rig.landing.endpoint.host, rig.landing.endpoint.port


# --- bytes -------------------------------------------------------------------------------------------------------


def test_bind_has_these_bytes() -> None:
    golden = "70646b76010102000200030000100000" + b"p1d1tok".hex()
    bind = frames.Bind(Instance("p1"), Instance("d1"), "tok", 4096)
    assert frames.encode_bind(bind).hex() == golden
    raw = bytes.fromhex(golden)
    lengths = frames.bind_lengths(raw[: frames.BIND_HEAD_BYTES])
    assert frames.decode_bind(lengths, raw[frames.BIND_HEAD_BYTES :]) == bind


def test_pages_head_has_these_bytes() -> None:
    golden = "70646b76010202000010000005000000000000000900000000000000030000002c010000"
    head = frames.PagesHead(2, 5, GrantNo(9))
    assert frames.encode_pages_head(head, 4096, [PageId(3), PageId(300)]).hex() == golden
    raw = bytes.fromhex(golden)
    assert frames.decode_pages_head(raw[: frames.PAGES_HEAD_BYTES], 4096) == head
    assert frames.decode_page_ids(raw[frames.PAGES_HEAD_BYTES :]) == [3, 300]


@pytest.mark.parametrize("verdict", list(Verdict))
def test_ack_has_these_bytes(verdict: Verdict) -> None:
    golden = f"70646b7601030{verdict.value}000700000000000000"
    assert frames.encode_ack(7, verdict).hex() == golden
    assert frames.decode_ack(bytes.fromhex(golden)) == (7, verdict)


# --- garbage and half frames -------------------------------------------------------------------------------------


def bad_bind(**change: object) -> bytes:
    fields: dict[str, object] = {"src": P, "dst": D, "token": "guess", "page_bytes": PAGE_BYTES, **change}
    return frames.encode_bind(frames.Bind(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 64,
        b"pdkv\x02" + b"\0" * 32,
        b"pdkv\x01\x02" + b"\0" * 64,
        b"pdkv\x01\x01" + b"\xff" * 10,
        b"pdkv\x01\x01" + b"\0" * 10,
        bad_bind(),
        bad_bind(token=""),
        frames.encode_bind(frames.Bind(P, D, "t", 1))[:-3] + b"\xff\xfe\xfd",
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
    assert rig.tcp.bad_frames == 1
    rig.move(2, 1, [(6, 1)])
    assert rig.told.end_of(2) == ""


@pytest.mark.parametrize(
    ("change", "value"), [("dst", "d-0"), ("page_bytes", 64)], ids=["an earlier instance", "another layout"]
)
def test_a_bind_to_what_this_is_not_is_refused(rig: Rig, change: str, value: object) -> None:
    with RawPrefill(rig) as raw:
        raw.bind(**{change: value})  # type: ignore[arg-type]
        assert raw.is_closed_by_decode()
    assert rig.tcp.bad_frames == 1


@pytest.mark.parametrize("kept", [1, 5, frames.PAGES_HEAD_BYTES, frames.PAGES_HEAD_BYTES + 3, 36, 36 + PAGE_BYTES])
def test_a_prefill_that_dies_inside_a_frame_lands_nothing_and_can_come_back(rig: Rig, kept: int) -> None:
    rig.arm(1, [8, 9])
    whole = frames.encode_pages_head(frames.PagesHead(2, 1, GrantNo(1)), PAGE_BYTES, [PageId(8), PageId(9)])
    assert len(whole) == 36
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.sock.sendall((whole + content(3, PAGE_BYTES) + content(4, PAGE_BYTES))[:kept])
        raw.sock.shutdown(socket.SHUT_WR)
        assert raw.is_closed_by_decode()
    assert rig.tcp.bad_frames == 1
    assert rig.told.landed == []
    assert rig.landing.table.discarded == {}  # type: ignore[attr-defined]
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
    assert rig.tcp.bad_frames == 0


@pytest.mark.parametrize(("seq", "count"), [(2, 1), (0, 1), (1, 65)])
def test_a_frame_out_of_order_or_too_long_closes_the_connection(rig: Rig, seq: int, count: int) -> None:
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.head(seq, 1, *range(count))
        assert raw.is_closed_by_decode()
    assert rig.tcp.bad_frames == 1


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

    monkeypatch.setattr(_Frame, "page_views", views)
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
        self.endpoint = Endpoint("127.0.0.1", self.listener.getsockname()[1])

    def accept(self) -> socket.socket:
        self.listener.settimeout(PATIENCE_S)
        return self.listener.accept()[0]


@pytest.fixture
def frozen() -> Iterator[FrozenDecode]:
    decode = FrozenDecode()
    yield decode
    decode.listener.close()


def pairs(count: int) -> list[Pair]:
    return [Pair(PageId(page), PageId(page)) for page in range(count)]


def post(rig: Rig, number: int, grant: int = 1) -> None:
    rig.mover.move(MoveNo(number), GrantNo(grant), D, pairs(128))


def test_cancel_drops_queued_moves_and_lets_begun_ones_run(frozen: FrozenDecode) -> None:
    rig = Rig("tcp", pages=128, page_bytes=1 << 19)
    rig.mover.connect(D, frozen.endpoint, "t")
    post(rig, 1)  # 64 MiB: more than all socket buffers, so that it is never through
    post(rig, 2)
    post(rig, 3, grant=2)
    with frozen.accept() as conn:
        assert conn.recv(frames.BIND_HEAD_BYTES, socket.MSG_WAITALL)[:4] == frames.MAGIC
        conn.recv(len(P) + len(D) + 1 + frames.PAGES_HEAD_BYTES, socket.MSG_WAITALL)
        rig.mover.cancel(GrantNo(1), D)
        assert rig.told.end_of(2) == "cancelled"
        assert [number for number, _ in rig.told.wrote] == [2]
        rig.mover.teardown(D)
        assert rig.told.end_of(1) == "torn down"
        assert rig.told.end_of(3) == "torn down"
    rig.close()


def test_closing_the_mover_ends_moves_to_a_frozen_peer(frozen: FrozenDecode) -> None:
    rig = Rig("tcp", pages=128, page_bytes=1 << 17)
    rig.mover.connect(D, frozen.endpoint, "t")
    post(rig, 1)
    with frozen.accept():
        rig.close()
    assert rig.told.wrote == [(1, "the mover was closed")]


def test_a_peer_that_dies_ends_its_moves_and_nobody_elses(frozen: FrozenDecode) -> None:
    rig = Rig("tcp", pages=128, page_bytes=1 << 17)
    other = Instance("d-2")
    rig.mover.connect(other, frozen.endpoint, "t")
    rig.mover.move(MoveNo(1), GrantNo(1), other, pairs(128))
    frozen.accept().close()
    assert rig.told.end_of(1).startswith("peer d-2 at 127.0.0.1")
    rig.arm(1, range(128))
    post(rig, 2)
    assert rig.told.end_of(2) == ""
    rig.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frames.encode_ack(2, Verdict.LANDED),
        b"pdkv\x01\x03\x63\0" + b"\1" + b"\0" * 7,
    ],
    ids=["http", "ack of an unsent frame", "unknown verdict"],
)
def test_a_decode_that_answers_nonsense_ends_the_connection(frozen: FrozenDecode, rig: Rig, answer: bytes) -> None:
    rig.mover.connect(D, frozen.endpoint, "t")
    rig.move(1, 1, [(0, 0)])
    with frozen.accept() as conn:
        conn.sendall(answer)
        assert rig.told.end_of(1).startswith("peer d-1")


def test_a_new_endpoint_of_the_same_peer_ends_what_went_to_the_old_one(frozen: FrozenDecode, rig: Rig) -> None:
    rig.mover.connect(D, frozen.endpoint, "t")
    rig.move(1, 1, [(0, 0)])
    with frozen.accept():
        rig.mover.connect(D, rig.landing.endpoint, rig.landing.token)
        assert rig.told.end_of(1) == "peer d-1 has another endpoint now"
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

    mover = TcpMover(Instance("p-9"), rig.source, on_wrote)
    mover.connect(D, rig.landing.endpoint, rig.landing.token)
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


@pytest.mark.parametrize("endpoint", [Endpoint("a..b", 1), Endpoint("127.0.0.1", 99_999), Endpoint("127.0.0.1", -1)])
def test_an_impossible_endpoint_ends_the_move(rig: Rig, endpoint: Endpoint) -> None:
    rig.mover.connect(D, endpoint, "t")
    rig.move(1, 1, [(0, 0)])
    assert rig.told.end_of(1).startswith(f"peer d-1 at {endpoint.host}:{endpoint.port} is gone")
