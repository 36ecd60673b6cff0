"""Prefills of their own process, frozen and killed at the worst moment: what decode can prove, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pdplane.core.ids import GrantNo, PageId

from .prefill_process import PrefillProcess
from .rigs import PAGE_BYTES, STRANGER, Rig, Shm, ShmPush, seat

OTHER = seat("p-3")
Start = Callable[..., PrefillProcess]


def rig_of(kind: str) -> Rig:
    return Rig({"shm": Shm, "shm_push": ShmPush}[kind]())


@pytest.fixture
def start() -> Iterator[Start]:
    """start(kind, instance)."""
    started: list[PrefillProcess] = []

    def begin(kind: str, where: str = STRANGER.instance) -> PrefillProcess:
        started.append(PrefillProcess(kind, where))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


@pytest.fixture(params=["shm", "shm_push"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = rig_of(request.param)
    yield rig
    rig.close()


@pytest.fixture
def push() -> Iterator[Rig]:
    rig = rig_of("shm_push")
    yield rig
    rig.close()


def page(rig: Rig, number: int) -> bytes:
    return bytes(rig.target.page(PageId(number)))


def full(byte: int) -> bytes:
    return bytes([byte]) * PAGE_BYTES


def is_served(rig: Rig) -> bool:
    rig.arm(900, [200])
    rig.move(900, 900, [(3, 200)])
    return rig.told.end_of(900) == "" and rig.has(200, src=3)


def test_pages_come_from_another_process(rig: Rig, start: Start) -> None:
    prefill = start(rig.fabric.name)
    rig.arm(1, range(200), STRANGER)
    prefill.connect(rig.landing.endpoint)
    prefill.move(1, 1, [(255 - number, number) for number in range(200)])
    assert prefill.end_of(1) == ""
    assert all(page(rig, number) == full(255 - number) for number in range(200))
    assert sorted(rig.told.pages_of(1)) == list(range(200))


def test_a_prefill_that_is_frozen_between_copies_withholds_nothing(rig: Rig, start: Start) -> None:
    prefill = start(rig.fabric.name)
    rig.arm(1, [8, 9], STRANGER)
    prefill.connect(rig.landing.endpoint)
    prefill.move(1, 1, [(5, 8)])
    assert prefill.end_of(1) == ""
    prefill.stop()
    assert rig.landing.revoke(GrantNo(1))
    rig.target.page(PageId(8))[:] = full(0xAB)
    prefill.resume()
    prefill.move(2, 1, [(6, 9)])
    assert prefill.end_of(2) == "discarded: revoked"
    assert page(rig, 8) == full(0xAB)
    assert rig.untouched(9)


def test_a_prefill_that_is_killed_takes_nobody_with_it(rig: Rig, start: Start) -> None:
    prefill = start(rig.fabric.name)
    rig.arm(1, [8, 9], STRANGER)
    prefill.connect(rig.landing.endpoint)
    prefill.move(1, 1, [(5, 8)])
    assert prefill.end_of(1) == ""
    prefill.kill()
    assert rig.landing.revoke(GrantNo(1))
    assert page(rig, 8) == full(5)
    assert is_served(rig)


def test_a_frozen_prefill_holds_up_nobody_else(rig: Rig, start: Start) -> None:
    prefill = start(rig.fabric.name)
    rig.arm(1, [8], STRANGER)
    prefill.connect(rig.landing.endpoint)
    prefill.move(1, 1, [(5, 8)])
    assert prefill.end_of(1) == ""
    prefill.stop()
    assert is_served(rig)


# --- frozen and killed inside a write: shm_push alone, as it alone writes ------------------------------------------


@pytest.fixture
def writing(push: Rig, start: Start) -> PrefillProcess:
    """Stopped in the middle of a write to pages 8 and 9, under grant 1."""
    prefill = start("shm_push")
    push.arm(1, [8, 9], STRANGER)
    prefill.connect(push.landing.endpoint)
    prefill.stop_inside_copy()
    prefill.move(1, 1, [(5, 8), (6, 9)])
    prefill.wait_stopped()
    assert push.target.memory[8 * PAGE_BYTES] == 0x77
    return prefill


def test_a_writer_frozen_inside_a_write_is_quiet_only_when_it_has_gone_on(push: Rig, writing: PrefillProcess) -> None:
    assert not push.landing.revoke(GrantNo(1))
    assert is_served(push)
    assert not push.landing.revoke(GrantNo(1))
    assert push.told.quiet == []
    writing.resume()
    push.told.wait(lambda told: told.quiet == [GrantNo(1)])
    mine = full(0xAB)
    push.target.page(PageId(8))[:] = push.target.page(PageId(9))[:] = mine
    assert writing.end_of(1) == "discarded: revoked"
    assert page(push, 8) == page(push, 9) == mine
    assert push.told.pages_of(1) == []


def test_a_writer_killed_inside_a_write_is_quiet_by_the_kernel(push: Rig, writing: PrefillProcess) -> None:
    assert not push.landing.revoke(GrantNo(1))
    writing.kill()
    push.told.wait(lambda told: told.quiet == [GrantNo(1)])
    assert push.landing.revoke(GrantNo(1))
    assert page(push, 9) == b"\xee" * PAGE_BYTES


def test_a_frozen_writers_grant_can_be_forgotten_and_its_slot_is_not_reused(push: Rig, writing: PrefillProcess) -> None:
    """The operator's verb: pages go back unproven, and nothing is reported later."""
    assert not push.landing.revoke(GrantNo(1))
    push.landing.disarm(GrantNo(1))
    for grant in range(2, 600):
        push.arm(grant, [8], STRANGER)
        push.landing.disarm(GrantNo(grant))
    push.arm(600, [10], STRANGER)
    writing.resume()
    assert writing.end_of(1) == "discarded: unknown grant"
    writing.move(2, 600, [(7, 10)])
    writing.wait_stopped()
    writing.resume()
    assert writing.end_of(2) == ""
    assert page(push, 10) == full(7)
    assert push.told.quiet == []


def test_a_teardown_proves_nothing_of_a_frozen_writer_and_all_of_a_dead_one(push: Rig, writing: PrefillProcess) -> None:
    assert not push.landing.teardown(STRANGER.instance)
    assert not push.landing.revoke(GrantNo(1))
    assert not push.landing.teardown(STRANGER.instance)
    writing.kill()
    push.told.wait(lambda told: told.quiet == [GrantNo(1)])
    assert push.landing.teardown(STRANGER.instance)


def test_every_peer_of_a_grant_withholds_the_proof(push: Rig, start: Start, writing: PrefillProcess) -> None:
    other = start("shm_push", OTHER.instance)
    push.arm(1, [8, 9], OTHER)
    other.connect(push.landing.endpoint)
    other.stop_inside_copy()
    other.move(1, 1, [(7, 9)])
    other.wait_stopped()
    assert not push.landing.revoke(GrantNo(1))
    writing.kill()
    assert not push.landing.revoke(GrantNo(1))
    assert push.told.quiet == []
    other.resume()
    push.told.wait(lambda told: told.quiet == [GrantNo(1)])


def test_a_writer_frozen_at_the_lock_finds_its_grant_withdrawn(push: Rig, start: Start) -> None:
    """It has seen that the grant stands: the check inside the lock is the one that counts."""
    prefill = start("shm_push")
    push.arm(1, [8], STRANGER)
    prefill.connect(push.landing.endpoint)
    prefill.stop_at_lock()
    prefill.move(1, 1, [(5, 8)])
    prefill.wait_stopped()
    assert push.landing.revoke(GrantNo(1))
    push.target.page(PageId(8))[:] = full(0xAB)
    prefill.resume()
    prefill.wait_stopped()
    prefill.resume()
    assert prefill.end_of(1) == "discarded: revoked"
    assert page(push, 8) == full(0xAB)
