"""Kind shm's own, prefill's end: a decode that misbehaves, and what the ends leave behind."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from pdplane.core.ids import GrantNo, MoveNo
from pdplane.transport import shm_frames as frames
from pdplane.transport.host_identity import host_identity
from pdplane.transport.shm_landing import ShmLanding
from pdplane.transport.shm_link import WINDOW
from pdplane.transport.shm_mover import ShmMover

from .local_peers import POOL_BYTES, FakeDecode, acked, is_served, open_files, page_list
from .rigs import D, P, Rig, Shm, paired, seat


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(Shm())
    yield rig
    rig.close()


# --- a decode that misbehaves ------------------------------------------------------------------------------------


def test_cancel_drops_queued_moves_and_lets_begun_ones_run(rig: Rig) -> None:
    with FakeDecode("shm") as decode:
        rig.mover.connect(D, decode.endpoint, rig.slice)
        for number in range(1, WINDOW + 3):
            rig.move(number, 1 if number < WINDOW + 2 else 2, [(0, 0)])
        with decode.accept() as conn:
            for _ in range(WINDOW + 1):
                assert conn.recv(frames.MAX_FRAME_BYTES)
            rig.mover.cancel(GrantNo(1), D)
            assert rig.told.end_of(WINDOW + 1) == "cancelled"
            assert [number for number, _ in rig.told.wrote] == [WINDOW + 1]
            conn.send(frames.encode(acked(1)))
            assert rig.told.end_of(1) == ""
            rig.mover.teardown(D.instance)
            assert {rig.told.end_of(number) for number in range(2, WINDOW + 3) if number != WINDOW + 1} == {"torn down"}


def test_a_cancelled_move_that_has_begun_is_sent_to_its_end(rig: Rig) -> None:
    with FakeDecode("shm") as decode:
        rig.mover.connect(D, decode.endpoint, rig.slice)
        rig.move(1, 1, [(0, dst) for dst in range(64 * (WINDOW + 2))])
        with decode.accept() as conn:
            seen = [conn.recv(frames.MAX_FRAME_BYTES) for _ in range(WINDOW + 1)]
            rig.mover.cancel(GrantNo(1), D)
            rig.mover.move(MoveNo(2), GrantNo(1), seat("nobody"), paired([(0, 0)]))
            assert rig.told.end_of(2) == "peer nobody/dp0cp0tp0pp0 is not connected"  # so the cancel is through
            for seq in range(1, WINDOW + 1):
                conn.send(frames.encode(acked(seq)))
            seen += [conn.recv(frames.MAX_FRAME_BYTES) for _ in range(2)]
            for seq in (WINDOW + 1, WINDOW + 2):
                conn.send(frames.encode(acked(seq)))
            assert rig.told.end_of(1) == ""
            last = page_list(WINDOW + 2, 1, [0] * 64, range(64 * (WINDOW + 1), 64 * (WINDOW + 2)))
            assert frames.decode_to_landing(seen[-1]) == last


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frames.encode(acked(2)),
        b"\x93\xa3ack\x01\x91\x63",
        frames.encode(frames.Bound(1, 1, 1)),
    ],
    ids=["http", "ack of an unsent frame", "unknown verdict", "another kind"],
)
def test_a_decode_that_answers_nonsense_ends_the_connection(rig: Rig, answer: bytes) -> None:
    with FakeDecode("shm") as decode:
        rig.mover.connect(D, decode.endpoint, rig.slice)
        rig.move(1, 1, [(0, 0)])
        with decode.accept() as conn:
            conn.send(answer)
            assert rig.told.end_of(1).startswith(f"peer {D} at {decode.name} is gone")


def test_descriptors_that_come_with_an_ack_are_closed(rig: Rig) -> None:
    before = open_files()
    with FakeDecode("shm") as decode:
        rig.mover.connect(D, decode.endpoint, rig.slice)
        rig.move(1, 1, [(0, 0)])
        with decode.accept() as conn:
            socket.send_fds(conn, [frames.encode(acked(1))], [rig.target.fd])
            assert rig.told.end_of(1).startswith(f"peer {D}")
    assert open_files() == before


def test_a_decode_that_dies_ends_its_moves_and_nobody_elses(rig: Rig) -> None:
    other = seat("d-2")
    with FakeDecode("shm") as decode:
        rig.mover.connect(other, decode.endpoint, rig.slice)
        rig.mover.move(MoveNo(1), GrantNo(1), other, paired([(0, 0)]))
        decode.accept().close()
        assert rig.told.end_of(1).startswith("peer d-2")
    assert is_served(rig)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"host": "pdplane-nobody"}, "Connection refused"),
        ({"host": ""}, "names no local socket"),
        ({"host": "x" * 200}, "too long"),
        ({"host": "\udcff"}, "Connection refused"),
        ({"where": "another"}, "it shares memory on another, this process on"),
        ({"where": ""}, "it shares memory on no host"),
    ],
    ids=["nobody", "no name", "long", "no text", "another host", "no host"],
)
def test_an_impossible_endpoint_ends_the_move(rig: Rig, change: dict[str, str], says: str) -> None:
    rig.mover.connect(D, msgspec.structs.replace(rig.landing.endpoint, **change), rig.slice)
    rig.move(1, 1, [(0, 0)])
    error = rig.told.end_of(1)
    assert error.startswith(f"peer {D} at {change.get('host', rig.landing.endpoint.host)} is gone: ")
    assert says in error


def test_a_new_endpoint_of_the_same_peer_ends_what_went_to_the_old_one(rig: Rig) -> None:
    with FakeDecode("shm") as decode:
        rig.mover.connect(D, decode.endpoint, rig.slice)
        rig.move(1, 1, [(0, 0)])
        with decode.accept():
            rig.connect()
            assert rig.told.end_of(1) == f"peer {D} has another endpoint now"
    rig.arm(1, [0])
    rig.move(2, 1, [(0, 0)])
    assert rig.told.end_of(2) == ""


def test_an_empty_move_completes_and_a_closed_mover_takes_none(rig: Rig) -> None:
    rig.move(1, 1, [])
    assert rig.told.end_of(1) == ""
    rig.mover.close()
    with pytest.raises(RuntimeError, match="move 2 posted to a closed mover"):
        rig.move(2, 1, [(0, 0)])


def test_a_completion_callback_that_fails_does_not_stop_the_mover(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def on_wrote(number: object, error: str) -> None:
        rig.told.on_wrote(number, error)  # type: ignore[arg-type]
        raise RuntimeError("mine")

    mover = ShmMover(seat("p-9"), rig.source, on_wrote)
    rig.connect(mover)
    for number in (1, 2):
        rig.move(number, 9, [(0, 0)], mover)
        assert rig.told.end_of(number) == "discarded: unknown grant"
    mover.close()
    assert "completion callback of move 1" in caplog.text


# --- what it leaves behind ---------------------------------------------------------------------------------------


def test_no_descriptor_mapping_or_thread_is_left_behind() -> None:
    files, threads = open_files(), set(threading.enumerate())
    rig = Rig(Shm())
    assert is_served(rig)
    names = {thread.name for thread in set(threading.enumerate()) - threads}
    assert names == {f"pdplane-shm-mover-{P}", f"pdplane-shm-landing-{D}"}
    rig.close()
    assert open_files() == files
    assert set(threading.enumerate()) == threads


def test_a_pool_cannot_change_its_size(rig: Rig) -> None:
    for size in (0, POOL_BYTES - 1, POOL_BYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(rig.source.fd, size)


def test_where_pools_cannot_be_shared_both_ends_say_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdplane.transport.host_identity.host_identity", lambda: "")
    with pytest.raises(OSError, match="transport shm needs Linux with memfd"):
        ShmLanding(D, rig.target, rig.told.on_landed, rig.told.on_quiet)
    with pytest.raises(OSError, match="transport shm needs Linux with memfd"):
        ShmMover(P, rig.source, rig.told.on_wrote)


def test_the_landing_says_where_it_is(rig: Rig) -> None:
    endpoint = rig.landing.endpoint
    assert endpoint.kind == "shm"
    assert endpoint.where == host_identity() != ""
    assert endpoint.token
    assert isinstance(rig.mover, ShmMover)
    assert (rig.mover.offer.kind, rig.mover.offer.where) == ("shm", endpoint.where)
