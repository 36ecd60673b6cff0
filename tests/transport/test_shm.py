"""Kind shm's own, decode's end: what is said on its socket, descriptors that are not what they should be, and a
prefill that misbehaves."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import msgspec
import pytest

from pdplane.core.ids import GrantNo
from pdplane.core.slices import whole_page
from pdplane.transport import shm_frames as frames
from pdplane.transport import shm_sockets, slicing
from pdplane.transport.batches import pages_per_frame
from pdplane.transport.landing import MAX_UNBOUND
from pdplane.transport.landing_table import Verdict
from pdplane.transport.shm_landing import ShmLanding
from pdplane.transport.shm_link import FRAME_BYTES

from .local_peers import POOL_BYTES, RawPrefill, a_memfd, acked, is_served, open_files, page_list, placed
from .rigs import PAGE_BYTES, STRANGER, D, P, Rig, Shm, seat


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(Shm())
    yield rig
    rig.close()


def landing_of(rig: Rig) -> ShmLanding:
    assert isinstance(rig.landing, ShmLanding)
    return rig.landing


# --- bytes -------------------------------------------------------------------------------------------------------


def test_frames_have_these_bytes() -> None:
    bind = frames.Bind(1, seat("p"), seat("d", 1), "tok", 256, 4096)
    golden = (
        "97a462696e640182a8696e7374616e6365a170a472616e6b940000000082a8696e7374616e6365a164a472616e6b9400000100"
        "a3746f6bcd0100cd1000"
    )
    for frame, packet in {
        bind: golden,
        page_list(5, 9, [3, 300], [1, 2]): "96a5706167657305099203cd012c920102c0",
        placed(1, 9, [7]): "96a6706c6163656401099107c3c0",
    }.items():
        assert frames.encode(frame).hex() == packet
        assert frames.decode_to_landing(bytes.fromhex(packet)) == frame
    for frame, packet in {
        frames.Bound(256, 4096, 320): "94a5626f756e64cd0100cd1000cd0140",
        frames.Ack(7, (Verdict.LANDED, Verdict.REVOKED)): "93a361636b07920001",
    }.items():
        assert frames.encode(frame).hex() == packet
        assert frames.decode_to_mover(bytes.fromhex(packet)) == frame


def test_a_full_frame_fits_a_packet() -> None:
    most = [2**32 - 1] * 64
    full = msgspec.structs.replace(page_list(2**63, 2**63, most, most), checksum=2**64 - 1)
    assert len(frames.encode(full)) < frames.MAX_FRAME_BYTES


def test_a_frame_is_small_enough_to_be_waited_for() -> None:
    assert pages_per_frame(whole_page(4096), FRAME_BYTES) == 64
    assert pages_per_frame(whole_page(FRAME_BYTES // 3), FRAME_BYTES) == 3
    assert pages_per_frame(whole_page(2 * FRAME_BYTES), FRAME_BYTES) == 1


# --- a prefill that misbehaves -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "packet",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"\xff", frames.encode(acked(1)), b"\x91\xa4bind", b"\x97\xa4bind\xc0"],
    ids=["http", "zeros", "no msgpack", "an ack", "a short bind", "a bind of nothing"],
)
def test_garbage_is_counted_and_closes_that_connection_alone(rig: Rig, packet: bytes) -> None:
    with RawPrefill(rig) as raw:
        raw.send(packet, [rig.source.fd])
        assert raw.is_closed_by_decode()
    assert landing_of(rig).bad_frames == 1
    assert is_served(rig)


@pytest.mark.parametrize(
    "change",
    [
        {"token": "guess"},
        {"token": ""},
        {"dst": seat("d-0")},
        {"dst": seat("d-1", 1)},
        {"version": 9},
        {"pages": 0},
        {"page_bytes": -1},
        {"pages": 255},
        {"pages": 2**62, "page_bytes": 2**62},
    ],
    ids=["token", "no token", "instance", "rank", "version", "no pages", "negative", "fewer pages", "far too many"],
)
def test_a_bind_that_is_not_right_is_refused(rig: Rig, change: dict[str, object]) -> None:
    with RawPrefill(rig) as raw:
        raw.bind(**change)
        assert raw.is_closed_by_decode()
    assert landing_of(rig).bad_frames == 1
    assert is_served(rig)


def unsealed() -> list[int]:
    return [a_memfd(POOL_BYTES, sealed=False)]


def short() -> list[int]:
    return [a_memfd(POOL_BYTES - 1)]


def long() -> list[int]:
    return [a_memfd(POOL_BYTES + 4096)]


def a_pipe() -> list[int]:
    reader, writer = os.pipe()
    os.close(writer)
    return [reader]


def a_file() -> list[int]:
    return [os.open("/proc/self/exe", os.O_RDONLY)]


def write_only() -> list[int]:
    fd = a_memfd(POOL_BYTES)
    only = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    os.close(fd)
    return [only]


def none() -> list[int]:
    return []


def two() -> list[int]:
    return [a_memfd(POOL_BYTES), a_memfd(POOL_BYTES)]


def many() -> list[int]:
    return [a_memfd(POOL_BYTES) for _ in range(20)]


@pytest.mark.parametrize("make", [unsealed, short, long, a_pipe, a_file, write_only, none, two, many])
def test_a_descriptor_that_is_no_sealed_pool_of_that_size_is_refused_and_closed(rig: Rig, make: object) -> None:
    assert callable(make)
    assert is_served(rig)
    before = open_files()
    fds = make()
    with RawPrefill(rig) as raw:
        raw.bind(fds)
        assert raw.is_closed_by_decode()
    for fd in fds:
        os.close(fd)
    assert landing_of(rig).bad_frames == 1
    assert is_served(rig, 201)
    assert open_files() == before


@pytest.mark.parametrize(
    "frame",
    [
        page_list(1, 1, [256], [8]),
        page_list(1, 1, [-1], [8]),
        page_list(1, 1, [0, 1], [8]),
        page_list(1, 1, [], []),
        page_list(1, 1, range(65), range(65)),
        page_list(2, 1, [0], [8]),
        page_list(0, 1, [0], [8]),
        placed(1, 1, [8]),
    ],
    ids=["outside", "negative", "unequal", "empty", "too long", "seq ahead", "seq behind", "another kind's"],
)
def test_a_frame_that_is_not_right_ends_its_connection_and_lands_nothing(rig: Rig, frame: msgspec.Struct) -> None:
    rig.arm(1, [8])
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.send(frame)
        assert raw.is_closed_by_decode()
    assert landing_of(rig).bad_frames == 1
    assert rig.untouched(8)
    assert is_served(rig)


def test_pages_before_a_bind_end_the_connection(rig: Rig) -> None:
    with RawPrefill(rig) as raw:
        raw.send(page_list(1, 1, [0], [8]), [rig.source.fd])
        assert raw.is_closed_by_decode()
    assert landing_of(rig).bad_frames == 1


def test_a_second_bind_ends_the_connection(rig: Rig) -> None:
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.bind([])
        assert raw.is_closed_by_decode()
    assert landing_of(rig).bad_frames == 1


def test_descriptors_that_come_with_pages_end_the_connection(rig: Rig) -> None:
    rig.arm(1, [8])
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.send(page_list(1, 1, [0], [8]), [rig.source.fd])
        assert raw.is_closed_by_decode()
    assert rig.untouched(8)


def test_every_frame_is_answered_in_order_with_what_became_of_it(rig: Rig) -> None:
    rig.arm(1, [8, 9])
    with RawPrefill(rig) as raw:
        raw.bind()
        raw.send(page_list(1, 1, [5], [8]))
        raw.send(page_list(2, 1, [5], [8]))
        raw.send(page_list(3, 1, [5], [10]))
        raw.send(page_list(4, 2, [5], [8]))
        raw.send(page_list(5, 1, [6], [9]))
        verdicts = [Verdict.LANDED, Verdict.REPEATED, Verdict.NOT_GRANTED, Verdict.UNKNOWN_GRANT, Verdict.LANDED]
        assert [raw.ack() for _ in verdicts] == [acked(seq, verdict) for seq, verdict in enumerate(verdicts, 1)]
    assert rig.has(8, src=5)
    assert rig.has(9, src=6)


def test_a_pool_of_other_pages_than_the_slice_says_is_a_misfit(rig: Rig) -> None:
    rig.arm(1, [8])
    with RawPrefill(rig) as raw:
        raw.bind(pages=512, page_bytes=PAGE_BYTES // 2)
        raw.send(page_list(1, 1, [5], [8]))
        assert raw.ack() == acked(1, Verdict.MISFIT)
    assert rig.untouched(8)
    assert rig.landing.revoke(GrantNo(1))


def test_decode_cannot_write_into_prefills_pool(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[memoryview] = []
    monkeypatch.setattr(slicing, "copy", lambda source, *_: sources.append(source))
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8)])
    assert rig.told.end_of(1) == ""
    assert [source.readonly for source in sources] == [True]


def test_a_copy_that_fails_in_any_way_does_not_keep_a_revoke_waiting(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(slicing, "copy", fail)
    rig.arm(7, [1])
    rig.move(1, 7, [(0, 1)])
    assert rig.told.end_of(1).startswith(f"peer {D} at ")
    assert rig.landing.revoke(GrantNo(7))
    assert rig.told.landed == []


def test_a_revoke_waits_for_the_copy_under_way_and_the_next_frame_is_turned_away(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    copy = slicing.copy

    def slow(*arguments: object) -> None:
        begun.set()
        assert go_on.wait(30)
        copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(slicing, "copy", slow)
    rig.arm(1, range(128))
    rig.move(1, 1, [(page, page) for page in range(128)])
    assert begun.wait(30)
    assert not rig.landing.revoke(GrantNo(1))
    assert rig.told.quiet == []
    go_on.set()
    rig.told.wait(lambda told: told.quiet == [GrantNo(1)])
    assert rig.told.end_of(1) == "discarded: revoked"
    assert rig.untouched(64)
    assert rig.told.landed == []


def test_a_revoke_between_claim_and_copy_is_quiet_and_nothing_lands(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    table, quiet = landing_of(rig).table, []
    claim = table.claim

    def and_revoke(*arguments: object) -> object:
        claimed = claim(*arguments)  # type: ignore[arg-type]
        quiet.append(rig.landing.revoke(GrantNo(1)))
        return claimed

    monkeypatch.setattr(table, "claim", and_revoke)
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8)])
    assert rig.told.end_of(1) == "discarded: revoked"
    assert quiet == [True]
    assert rig.untouched(8)
    assert rig.told.quiet == []


def test_a_teardown_ends_the_connections_of_that_instance(rig: Rig) -> None:
    with RawPrefill(rig) as raw, RawPrefill(rig) as other:
        for sock, src in ((raw, P), (other, STRANGER)):
            sock.bind(src=src)
            sock.send(page_list(1, 1, [0], [8]))
            assert sock.ack() == acked(1, Verdict.UNKNOWN_GRANT)
        assert rig.landing.teardown(P.instance)
        assert raw.is_closed_by_decode()
        other.send(page_list(2, 1, [0], [8]))
        assert other.ack() == acked(2, Verdict.UNKNOWN_GRANT)


def test_a_teardown_that_finds_a_copy_under_way_proves_nothing_until_it_ended(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        begun.set()
        assert go_on.wait(30)

    monkeypatch.setattr(slicing, "copy", slow)
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8)])
    assert begun.wait(30)
    assert not rig.landing.teardown(P.instance)
    go_on.set()
    assert rig.told.end_of(1)
    assert rig.landing.teardown(P.instance)


def test_strangers_that_say_nothing_do_not_pile_up(rig: Rig) -> None:
    silent = [RawPrefill(rig) for _ in range(MAX_UNBOUND + 1)]
    assert silent[0].is_closed_by_decode()
    assert is_served(rig)
    for raw in silent:
        raw.sock.close()


def test_another_user_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with RawPrefill(rig) as raw:
        raw.bind()
        assert raw.is_closed_by_decode()
    with pytest.raises(PermissionError, match="this process as uid 4711"):
        shm_sockets.dial_local(rig.landing.endpoint.host)
