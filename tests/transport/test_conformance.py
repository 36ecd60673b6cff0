"""What every transport must do, whichever it is."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from pdplane.core.ids import GrantNo, Instance, MoveNo, PageId
from pdplane.transport.contract import Endpoint, Pair

from .rigs import STRANGER, D, P, Rig


@pytest.fixture(params=["memory", "tcp"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.close()


def test_pages_arrive_where_the_grant_says_scattered_and_whole(rig: Rig) -> None:
    rig.arm(1, [9, 200, 3])
    rig.move(1, 1, [(0, 200), (7, 9), (255, 3)])
    assert rig.told.end_of(1) == ""
    assert rig.has(200, src=0)
    assert rig.has(9, src=7)
    assert rig.has(3, src=255)
    assert all(rig.untouched(page) for page in range(256) if page not in (3, 9, 200))


def test_completion_means_that_decode_already_knows(rig: Rig) -> None:
    rig.arm(1, [4, 5])
    rig.move(1, 1, [(0, 4), (1, 5)])
    assert rig.told.end_of(1) == ""
    assert rig.told.pages_of(1) == [4, 5]


def test_moves_complete_in_order(rig: Rig) -> None:
    rig.arm(1, range(100))
    for number in range(100):
        rig.move(number, 1, [(number, number)])
    assert rig.told.end_of(99) == ""
    assert rig.told.wrote == [(number, "") for number in range(100)]
    assert rig.told.pages_of(1) == list(range(100))


def test_a_batch_of_many_frames_completes_once(rig: Rig) -> None:
    targets = random.Random(1).sample(range(256), 250)
    rig.arm(1, targets)
    rig.move(1, 1, list(enumerate(targets)))
    assert rig.told.end_of(1) == ""
    assert all(rig.has(dst, src) for src, dst in enumerate(targets))
    assert sorted(rig.told.pages_of(1)) == sorted(targets)


def test_many_grants_at_once_keep_apart(rig: Rig) -> None:
    for grant in range(1, 65):
        rig.arm(grant, [4 * grant - 4 + page for page in range(4)])
    for page in range(4):
        for grant in range(1, 65):
            rig.move(100 * grant + page, grant, [(255 - grant, 4 * grant - 4 + page)])
    assert rig.told.end_of(6403) == ""
    assert all(error == "" for _, error in rig.told.wrote)
    assert len(rig.told.wrote) == 256
    assert all(rig.has(dst, src=255 - (dst // 4 + 1)) for dst in range(256))


def test_an_empty_grant_can_be_armed_and_is_quiet(rig: Rig) -> None:
    rig.arm(1, [])
    assert rig.landing.revoke(GrantNo(1))


# --- once, and only what was granted -----------------------------------------------------------------------------


def test_a_page_lands_once(rig: Rig) -> None:
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8)])
    rig.move(2, 1, [(1, 8)])
    assert rig.told.end_of(1) == ""
    assert rig.told.end_of(2) == "discarded: repeated"
    assert rig.has(8, src=0)
    assert rig.told.pages_of(1) == [8]


def test_a_page_twice_in_one_batch_lands_not_at_all(rig: Rig) -> None:
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8), (1, 8)])
    assert rig.told.end_of(1) == "discarded: repeated"
    assert rig.untouched(8)


def test_an_unknown_grant_lands_nowhere(rig: Rig) -> None:
    rig.arm(1, [8])
    rig.move(1, 2, [(0, 8)])
    assert rig.told.end_of(1) == "discarded: unknown grant"
    assert rig.untouched(8)


def test_a_page_that_was_not_granted_takes_the_batch_with_it(rig: Rig) -> None:
    rig.arm(1, [8])
    rig.arm(2, [9])
    rig.move(1, 1, [(0, 8), (1, 9)])
    for number, page in enumerate([2**31, 2**40, -1], start=2):
        rig.move(number, 1, [(0, page)])
    assert all(rig.told.end_of(number) == "discarded: not granted" for number in range(1, 5))
    assert rig.untouched(8)
    assert rig.untouched(9)


def test_another_instance_cannot_use_a_grant(rig: Rig) -> None:
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8)], rig.stranger())
    assert rig.told.end_of(1) == "discarded: wrong peer"
    assert rig.untouched(8)
    rig.move(2, 1, [(1, 8)])
    assert rig.told.end_of(2) == ""


def test_a_wrong_token_moves_nothing(rig: Rig) -> None:
    rig.arm(1, [8])
    rig.mover.connect(D, rig.landing.endpoint, "guess")
    rig.move(1, 1, [(0, 8)])
    assert rig.told.end_of(1)
    assert rig.untouched(8)
    rig.mover.connect(D, rig.landing.endpoint, rig.landing.token)
    rig.move(2, 1, [(0, 8)])
    assert rig.told.end_of(2) == ""


def test_arming_a_page_outside_the_pool_is_refused(rig: Rig) -> None:
    with pytest.raises(IndexError, match="page 256 is outside the pool of 256"):
        rig.arm(1, [256])


def test_arming_a_number_twice_is_refused(rig: Rig) -> None:
    rig.arm(1, [1])
    with pytest.raises(ValueError, match="grant 1 is armed already"):
        rig.arm(1, [2])


def test_a_source_page_outside_the_pool_is_refused_before_anything_is_posted(rig: Rig) -> None:
    rig.arm(1, [1])
    with pytest.raises(IndexError, match="page 256"):
        rig.move(1, 1, [(256, 1)])
    rig.move(2, 1, [(0, 1)])
    assert rig.told.end_of(2) == ""
    assert [number for number, _ in rig.told.wrote] == [2]


# --- revoke ------------------------------------------------------------------------------------------------------


def test_after_a_revoke_nothing_lands(rig: Rig) -> None:
    rig.arm(1, [8])
    assert rig.landing.revoke(GrantNo(1))
    rig.move(1, 1, [(0, 8)])
    assert rig.told.end_of(1) == "discarded: revoked"
    assert rig.untouched(8)
    assert rig.told.landed == []


def test_a_revoke_after_the_last_page_is_quiet_at_once_and_takes_nothing_back(rig: Rig) -> None:
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8)])
    assert rig.told.end_of(1) == ""
    assert rig.landing.revoke(GrantNo(1))
    assert rig.landing.revoke(GrantNo(1))
    assert rig.has(8, src=0)
    assert rig.told.quiet == []


def test_revoking_an_unknown_grant_is_quiet(rig: Rig) -> None:
    assert rig.landing.revoke(GrantNo(77))


def test_a_revoke_of_one_grant_leaves_the_others_on_the_same_connection_alone(rig: Rig) -> None:
    rig.arm(1, range(128))
    rig.arm(2, range(128, 256))
    rig.move(1, 1, [(page, page) for page in range(128)])
    rig.landing.revoke(GrantNo(1))
    rig.move(2, 2, [(page, page) for page in range(128, 256)])
    assert rig.told.end_of(2) == ""
    assert all(rig.has(page, src=page) for page in range(128, 256))


def test_a_disarmed_grant_is_unknown(rig: Rig) -> None:
    rig.arm(1, [8])
    rig.move(1, 1, [(0, 8)])
    assert rig.told.end_of(1) == ""
    rig.landing.disarm(GrantNo(1))
    rig.move(2, 1, [(1, 8)])
    assert rig.told.end_of(2) == "discarded: unknown grant"
    assert rig.has(8, src=0)


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_once_quiet_the_pages_can_be_reused_while_the_peer_still_sends(kind: str) -> None:
    """Revoke at a different point of the stream in every round; a new owner writes at once, nothing may disturb it."""
    rig = Rig(kind, pages=128, page_bytes=65536)
    mine = b"\xab" * 65536
    for grant in range(1, 25):
        rig.arm(grant, range(128))
        rig.move(grant, grant, [(page, page) for page in range(128)])
        for number in range(200):
            rig.move(1000 * grant + number, grant, [(0, 0)])
        wanted = 64 if grant % 2 else 0
        rig.told.wait(lambda told, grant=grant, wanted=wanted: len(told.pages_of(grant)) >= wanted)
        if not rig.landing.revoke(GrantNo(grant)):
            rig.told.wait(lambda told, grant=grant: grant in told.quiet)
        for page in range(128):
            rig.target.page(PageId(page))[:] = mine
        rig.told.end_of(1000 * grant + 199)
        assert all(bytes(rig.target.page(PageId(page))) == mine for page in range(128))
        rig.landing.disarm(GrantNo(grant))
    rig.close()


# --- ends of the mover -------------------------------------------------------------------------------------------


def test_a_move_to_an_unknown_peer_completes_with_an_error(rig: Rig) -> None:
    rig.mover.move(MoveNo(1), GrantNo(1), Instance("nobody"), [Pair(PageId(0), PageId(0))])
    assert rig.told.end_of(1) == "peer nobody is not connected"


def test_teardown_by_the_mover_ends_everything_and_a_new_connect_begins_anew(rig: Rig) -> None:
    rig.arm(1, range(8))
    rig.mover.teardown(D)
    rig.move(1, 1, [(0, 0)])
    assert rig.told.end_of(1) == "peer d-1 is not connected"
    rig.mover.connect(D, rig.landing.endpoint, rig.landing.token)
    rig.move(2, 1, [(0, 0)])
    assert rig.told.end_of(2) == ""


def test_teardown_by_the_landing_ends_the_peers_grants_but_not_its_next_ones(rig: Rig) -> None:
    rig.arm(1, [1, 2])
    rig.move(1, 1, [(1, 1)])
    assert rig.told.end_of(1) == ""
    rig.landing.teardown(P)
    rig.move(2, 1, [(2, 2)])
    assert rig.told.end_of(2)
    assert rig.untouched(2)
    assert rig.landing.revoke(GrantNo(1))
    rig.arm(2, [2, 3])
    errors = []
    for number in range(3, 40):  # the close of the old connection may still take the first one with it
        rig.move(number, 2, [(2, 2)])
        errors.append(rig.told.end_of(number))
        if not errors[-1]:
            break
    assert errors[-1] == ""
    assert rig.has(2, src=2)


def test_teardown_of_one_instance_leaves_another_alone(rig: Rig) -> None:
    stranger = rig.stranger()
    rig.landing.arm(GrantNo(1), STRANGER, [PageId(5)])
    rig.landing.teardown(P)
    rig.move(1, 1, [(0, 5)], stranger)
    assert rig.told.end_of(1) == ""


def test_cancelling_a_grant_without_moves_is_nothing(rig: Rig) -> None:
    rig.mover.cancel(GrantNo(5), D)
    rig.mover.cancel(GrantNo(5), Instance("nobody"))
    rig.arm(1, [1])
    rig.move(1, 1, [(0, 1)])
    assert rig.told.end_of(1) == ""


def test_a_landing_that_has_gone_is_an_error_and_not_a_hang(rig: Rig) -> None:
    rig.arm(1, [1, 2])
    rig.move(1, 1, [(1, 1)])
    assert rig.told.end_of(1) == ""
    rig.landing.close()
    rig.move(2, 1, [(2, 2)])
    assert rig.told.end_of(2).startswith("peer d-1")


def test_closing_twice_is_harmless(rig: Rig) -> None:
    rig.mover.close()
    rig.landing.close()


def test_capabilities_say_that_decode_can_fence(rig: Rig) -> None:
    assert rig.mover.capabilities == rig.landing.capabilities
    assert rig.landing.capabilities.fence
    assert not rig.landing.capabilities.one_sided


def test_no_thread_is_left_behind() -> None:
    before = set(threading.enumerate())
    rig = Rig("tcp")
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert names == {"pdplane-mover-p-1", "pdplane-landing-d-1"}
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    rig.close()
    assert set(threading.enumerate()) == before


def test_an_endpoint_nobody_listens_on_is_an_error() -> None:
    rig = Rig("tcp")
    gone = Rig("tcp")
    endpoint, token = gone.landing.endpoint, gone.landing.token
    gone.close()
    rig.mover.connect(D, Endpoint(endpoint.host, endpoint.port), token)
    rig.move(1, 1, [(0, 0)])
    assert f"at 127.0.0.1:{endpoint.port} is gone" in rig.told.end_of(1)
    rig.close()
