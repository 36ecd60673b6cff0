"""Kind shm_push's own: who may write where, what a report counts, and ends that misbehave."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from pdplane.core.ids import GrantNo, PageId, Seat
from pdplane.core.slices import whole_page
from pdplane.transport import memfd, page_lock, slicing
from pdplane.transport import shm_frames as frames
from pdplane.transport.landing_table import Verdict
from pdplane.transport.page_lock import WriteGate
from pdplane.transport.shm_push_landing import SPARE_SLOTS, ShmPushLanding
from pdplane.transport.shm_push_mover import ShmPushMover

from .local_peers import POOL_BYTES, FakeDecode, RawPrefill, a_memfd, acked, open_files, page_list, placed
from .rigs import PAGE_BYTES, STRANGER, D, P, Rig, ShmPush

SLOTS = 256 + SPARE_SLOTS


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(ShmPush())
    yield rig
    rig.close()


def landing_of(rig: Rig) -> ShmPushLanding:
    assert isinstance(rig.landing, ShmPushLanding)
    return rig.landing


def bound(raw: RawPrefill) -> tuple[frames.ToMover, list[int]]:
    """Binds as P; what the landing answers, and the descriptors that come along."""
    raw.bind([])
    packet, fds, _flags, _address = socket.recv_fds(raw.sock, frames.MAX_FRAME_BYTES, 4)
    return frames.decode_to_mover(packet), fds


# --- who may write -----------------------------------------------------------------------------------------------


def test_a_peer_sees_only_what_it_was_granted(rig: Rig) -> None:
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8)], rig.stranger())
    assert rig.told.end_of(1) == "discarded: wrong peer"
    assert rig.untouched(8)
    rig.move(2, 1, [(1, 8)])
    assert rig.told.end_of(2) == ""


def test_every_peer_of_a_grant_writes_its_own(rig: Rig) -> None:
    stranger = rig.stranger()
    rig.arm(1, [8, 9])
    rig.arm(1, [8], STRANGER)
    rig.move(1, 1, [(0, 8), (1, 9)])
    assert rig.told.end_of(1) == ""
    rig.move(2, 1, [(2, 8)], stranger)
    assert rig.told.end_of(2) == ""
    assert rig.told.landed_from == [(1, P, 8), (1, P, 9), (1, STRANGER, 8)]


def test_nothing_is_written_under_a_revoked_grant(rig: Rig) -> None:
    rig.arm(1, [8])
    assert rig.landing.revoke(GrantNo(1))
    assert rig.landing.revoke(GrantNo(1))
    rig.move(1, 1, [(0, 8)])
    assert rig.told.end_of(1) == "discarded: revoked"
    assert rig.untouched(8)
    assert rig.told.quiet == []


def test_nothing_is_written_under_a_forgotten_grant(rig: Rig) -> None:
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8)])
    assert rig.told.end_of(1) == ""
    rig.landing.disarm(GrantNo(1))
    rig.move(2, 1, [(1, 8)])
    assert rig.told.end_of(2) == "discarded: unknown grant"
    assert rig.has(8, src=0)


@pytest.mark.parametrize(
    ("pairs", "error"),
    [
        ([(0, 8), (1, 8)], "discarded: repeated"),
        ([(0, 256)], "discarded: not granted"),
        ([(0, 8), (1, 2**32 - 1)], "discarded: not granted"),
        ([(0, -1)], "discarded: not granted"),
    ],
    ids=["twice", "outside", "far outside", "negative"],
)
def test_a_batch_that_no_grant_can_mean_is_not_written(rig: Rig, pairs: list[tuple[int, int]], error: str) -> None:
    rig.arm(1, [8])
    rig.move(1, 1, pairs)
    assert rig.told.end_of(1) == error
    assert all(rig.untouched(page) for page in range(256))


def test_a_grant_of_no_pages_opens_nothing(rig: Rig) -> None:
    rig.arm(1, [])
    rig.move(1, 1, [(0, 8)])
    assert rig.told.end_of(1) == "discarded: not granted"
    assert rig.untouched(8)
    assert rig.landing.revoke(GrantNo(1))


def test_grants_beyond_the_slots_come_and_go(rig: Rig) -> None:
    for grant in range(1, 2 * SLOTS):
        rig.arm(grant, [grant % 256])
        rig.move(grant, grant, [(0, grant % 256)])
        assert rig.told.end_of(grant) == ""
        if grant % 2:
            rig.landing.revoke(GrantNo(grant))
        rig.landing.disarm(GrantNo(grant))


def test_once_quiet_the_pages_can_be_reused_while_the_peer_still_writes() -> None:
    """Revoke at a different point of the stream in every round; a new owner writes at once, nothing may disturb it."""
    rig = Rig(ShmPush(), pages=128, page_bytes=65536)
    mine = b"\xab" * 65536
    for grant in range(1, 25):
        rig.arm(grant, range(128))
        for number in range(100):
            rig.move(1000 * grant + number, grant, [(page, page) for page in range(number % 8, 128, 8)])
        rig.told.wait(lambda told, grant=grant: len(told.pages_of(grant)) >= 16 * (grant % 4))
        if not rig.landing.revoke(GrantNo(grant)):
            rig.told.wait(lambda told, grant=grant: grant in told.quiet)
        for page in range(128):
            rig.target.page(PageId(page))[:] = mine
        rig.told.end_of(1000 * grant + 99)
        assert all(bytes(rig.target.page(PageId(page))) == mine for page in range(128))
        rig.landing.disarm(GrantNo(grant))
    rig.close()


def test_a_revoke_meets_a_write_and_the_proof_follows_its_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    copy = slicing.copy

    def slow(*arguments: object) -> None:
        begun.set()
        assert go_on.wait(30)
        copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(slicing, "copy", slow)
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8)])
    assert begun.wait(30)
    assert not rig.landing.revoke(GrantNo(1))
    assert not rig.landing.revoke(GrantNo(1))
    assert rig.told.quiet == []
    go_on.set()
    rig.told.wait(lambda told: told.quiet == [GrantNo(1)])
    assert rig.told.end_of(1) == "discarded: revoked"
    assert rig.landing.revoke(GrantNo(1))
    assert rig.told.quiet == [GrantNo(1)]


def test_a_write_that_fails_in_any_way_holds_no_lock(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(slicing, "copy", fail)
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8)])
    assert rig.told.end_of(1).startswith(f"peer {D} at ")
    assert rig.landing.revoke(GrantNo(1))


def test_a_writer_that_comes_while_its_slot_is_examined_tries_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, refusals = page_lock._lock, [True, True]

    def examined(fd: int, kind: int, slot: int) -> bool:
        return False if kind == fcntl.F_RDLCK and refusals and refusals.pop() else lock(fd, kind, slot)

    monkeypatch.setattr(page_lock, "_lock", examined)
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8)])
    assert rig.told.end_of(1) == ""
    assert rig.has(8, src=0)
    assert refusals == []


def test_a_teardown_proves_where_no_grant_was_held(rig: Rig) -> None:
    assert rig.landing.teardown(P.instance)
    rig.arm(1, [8])
    assert not rig.landing.teardown(P.instance)
    assert rig.landing.teardown(STRANGER.instance)
    assert rig.landing.revoke(GrantNo(1))
    assert rig.landing.teardown(P.instance)


# --- a prefill that misbehaves -----------------------------------------------------------------------------------


def test_a_peer_is_handed_the_pool_and_words_that_it_can_only_read(rig: Rig) -> None:
    with RawPrefill(rig) as raw:
        answer, fds = bound(raw)
        pool, words = fds
        assert answer == frames.Bound(256, PAGE_BYTES, SLOTS)
        assert os.fstat(pool).st_size == POOL_BYTES
        assert os.fstat(words).st_size == 8 * SLOTS
        assert memfd.is_sealed(pool)
        assert memfd.is_sealed(words)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(words, b"\1")
        for fd in fds:
            os.close(fd)


def test_a_report_counts_once_and_only_what_was_granted(rig: Rig) -> None:
    rig.arm(1, [8, 9])
    with RawPrefill(rig) as raw:
        _answer, fds = bound(raw)
        reports = [
            (placed(1, 1, [8]), Verdict.LANDED),
            (placed(2, 1, [8]), Verdict.REPEATED),
            (placed(3, 1, [10]), Verdict.NOT_GRANTED),
            (placed(4, 2, [9]), Verdict.UNKNOWN_GRANT),
            (placed(5, 1, [9], written=False), Verdict.UNKNOWN_GRANT),
            (placed(6, 1, [9]), Verdict.LANDED),
        ]
        for report, verdict in reports:
            raw.send(report)
            assert raw.ack() == acked(report.seq, verdict)
        for fd in fds:
            os.close(fd)
    assert rig.told.pages_of(1) == [8, 9]


@pytest.mark.parametrize(
    "frame",
    [placed(2, 1, [8]), placed(1, 1, []), placed(1, 1, range(65)), page_list(1, 1, [0], [8])],
    ids=["seq ahead", "empty", "too long", "another kind's"],
)
def test_a_report_that_is_not_right_ends_its_connection(rig: Rig, frame: msgspec.Struct) -> None:
    rig.arm(1, [8])
    with RawPrefill(rig) as raw:
        for fd in bound(raw)[1]:
            os.close(fd)
        raw.send(frame)
        assert raw.is_closed_by_decode()
    assert landing_of(rig).bad_frames == 1
    assert rig.told.landed == []


def test_descriptors_in_a_bind_are_refused(rig: Rig) -> None:
    with RawPrefill(rig) as raw:
        raw.bind([rig.source.fd])
        assert raw.is_closed_by_decode()
    assert landing_of(rig).bad_frames == 1


# --- a decode that misbehaves ------------------------------------------------------------------------------------


def answered(rig: Rig, frame: frames.Bound, fds: Sequence[int]) -> str:
    """How a move ends whose decode answers the bind with this; the descriptors are closed."""
    with FakeDecode("shm_push") as decode:
        rig.mover.connect(D, decode.endpoint, rig.slice)
        rig.move(1, 1, [(0, 0)])
        with decode.accept() as conn:
            assert isinstance(frames.decode_to_landing(conn.recv(frames.MAX_FRAME_BYTES)), frames.Bind)
            socket.send_fds(conn, [frames.encode(frame)], list(fds))
            error = rig.told.end_of(1)
    for fd in fds:
        os.close(fd)
    return error


RIGHT = frames.Bound(256, PAGE_BYTES, 4)


@pytest.mark.parametrize(
    ("frame", "sizes", "says"),
    [
        (RIGHT, (), "does not bring 2 descriptors"),
        (RIGHT, (POOL_BYTES,), "does not bring 2 descriptors"),
        (RIGHT, (POOL_BYTES - 1, 32), f"{POOL_BYTES - 1} bytes, {POOL_BYTES} were announced"),
        (RIGHT, (POOL_BYTES, 31), "31 bytes, 32 were announced"),
        (frames.Bound(128, 2 * PAGE_BYTES, 4), (POOL_BYTES, 32), "its pages have 8192 bytes, 4096 were agreed"),
        (frames.Bound(2**62, PAGE_BYTES, 4), (POOL_BYTES, 32), "were announced"),
    ],
    ids=["nothing", "no words", "short pool", "short words", "other pages", "far too many"],
)
def test_a_pool_that_is_not_as_announced_ends_the_connection(
    rig: Rig, frame: frames.Bound, sizes: tuple[int, ...], says: str
) -> None:
    before = open_files()
    assert says in answered(rig, frame, [a_memfd(size) for size in sizes])
    assert open_files() == before


def test_an_unsealed_pool_ends_the_connection(rig: Rig) -> None:
    assert "must be sealed" in answered(rig, RIGHT, [a_memfd(POOL_BYTES, sealed=False), a_memfd(32)])


def test_a_pool_that_cannot_be_written_ends_the_connection(rig: Rig) -> None:
    fd = a_memfd(POOL_BYTES)
    reader = memfd.reopened(fd, os.O_RDONLY)
    os.close(fd)
    assert "cannot be mapped" in answered(rig, RIGHT, [reader, a_memfd(32)])


def test_a_decode_that_does_not_answer_the_bind_is_given_up(rig: Rig) -> None:
    mover = ShmPushMover(STRANGER, rig.source, rig.told.on_wrote, connect_timeout_s=0.01)
    with FakeDecode("shm_push") as decode:
        mover.connect(D, decode.endpoint, rig.slice)
        rig.move(1, 1, [(0, 0)], mover)
        assert rig.told.end_of(1).endswith("is gone: no answer within 0.01 s")
    mover.close()


def test_an_ack_before_the_pool_ends_the_connection(rig: Rig) -> None:
    with FakeDecode("shm_push") as decode:
        rig.mover.connect(D, decode.endpoint, rig.slice)
        rig.move(1, 1, [(0, 0)])
        with decode.accept() as conn:
            socket.send_fds(conn, [frames.encode(acked(1))], [rig.target.fd, rig.target.fd])
            assert rig.told.end_of(1).startswith(f"peer {D} at ")


def test_no_descriptor_mapping_or_thread_is_left_behind() -> None:
    files, threads = open_files(), set(threading.enumerate())
    rig = Rig(ShmPush())
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8)])
    assert rig.told.end_of(1) == ""
    rig.close()
    assert open_files() == files
    assert set(threading.enumerate()) == threads


def test_ends_come_and_go_without_leaving_descriptors(rig: Rig) -> None:
    def come_and_go(grant: int) -> None:
        rig.arm(grant, [8], STRANGER)
        mover = rig.fabric.mover(STRANGER, rig.source, rig.told.on_wrote, False)
        rig.connect(mover)
        rig.move(grant, grant, [(0, 8)], mover)
        assert rig.told.end_of(grant) == ""
        mover.close()
        rig.landing.disarm(GrantNo(grant))
        assert rig.landing.teardown(STRANGER.instance)

    come_and_go(1)
    landing_of(rig).close()
    rig.landing = rig.fabric.landing(D, rig.target, rig.told.on_landed, rig.told.on_quiet, None)
    before = open_files()
    for grant in range(2, 12):
        come_and_go(grant)
    rig.landing.close()
    assert open_files() < before


# --- a peer that is cut off while it writes --------------------------------------------------------------------------


def writer_inside(landing: ShmPushLanding, grant: int, peer: Seat, page: int) -> tuple[WriteGate, int]:
    """A grant to `peer`, whose writer holds the lock that a batch takes."""
    landing.arm(GrantNo(grant), peer, [PageId(page)], whole_page(PAGE_BYTES))
    words = landing._words[peer]
    gate = WriteGate(words.new_reader(), words.slots)
    slot = gate.enter(GrantNo(grant))
    assert slot is not None
    return gate, slot


def test_a_peer_torn_down_just_after_its_last_batch_is_asked_nothing_more(rig: Rig) -> None:
    landing = landing_of(rig)
    gate, slot = writer_inside(landing, 1, P, 0)
    assert not landing.revoke(GrantNo(1))
    gate.leave(slot)
    assert landing.teardown(P.instance)
    rig.told.wait(lambda told: told.quiet == [GrantNo(1)])
    landing.disarm(GrantNo(1))
    gate.close()


def test_the_words_of_a_peer_that_was_cut_off_inside_a_write_are_closed_when_it_is_out(rig: Rig) -> None:
    landing = landing_of(rig)
    gate, _slot = writer_inside(landing, 1, P, 0)
    assert not landing.revoke(GrantNo(1))
    assert not landing.teardown(P.instance)
    assert P in landing._words
    gate.close()  # the kernel drops a dead writer's lock
    rig.told.wait(lambda told: told.quiet == [GrantNo(1)])
    landing.disarm(GrantNo(1))
    assert P not in landing._words
