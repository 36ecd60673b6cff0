"""What every transport must do, whichever it is. Where only a fence can promise it, the fenced ones do."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import msgspec
import pytest

from pdplane.core.ids import GrantNo, MoveNo, PageId
from pdplane.core.layout import LayoutGroup
from pdplane.transport.contract import PAGES_PER_FRAME, Pairs
from pdplane.transport.faulty import LandingFaults, Picks

from .rigs import (
    FABRICS,
    FENCED,
    HEADS,
    INDEX,
    LATENT,
    PAGE_BYTES,
    STRANGER,
    D,
    Fabric,
    Faulty,
    P,
    Rig,
    SplitRig,
    Tcp,
    content,
    paired,
    seat,
    shard_of,
)


def named(kind: type[Fabric]) -> str:
    return kind.name


@pytest.fixture(params=FABRICS, ids=named)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param())
    yield rig
    rig.close()


@pytest.fixture(params=FENCED, ids=named)
def fenced(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param())
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


def test_an_empty_grant_can_be_armed_and_is_quiet(fenced: Rig) -> None:
    fenced.arm(1, [])
    assert fenced.landing.revoke(GrantNo(1))


# --- once, and only what was granted -----------------------------------------------------------------------------


def test_a_page_lands_once(fenced: Rig) -> None:
    fenced.arm(1, [8])
    fenced.move(1, 1, [(0, 8)])
    fenced.move(2, 1, [(1, 8)])
    assert fenced.told.end_of(1) == ""
    assert fenced.told.end_of(2) == "discarded: repeated"
    assert fenced.has(8, src=0)
    assert fenced.told.pages_of(1) == [8]


def test_a_page_twice_in_one_batch_lands_not_at_all(fenced: Rig) -> None:
    fenced.arm(1, [8])
    fenced.move(1, 1, [(0, 8), (1, 8)])
    assert fenced.told.end_of(1) == "discarded: repeated"
    assert fenced.untouched(8)


def test_an_unknown_grant_lands_nowhere(fenced: Rig) -> None:
    fenced.arm(1, [8])
    fenced.move(1, 2, [(0, 8)])
    assert fenced.told.end_of(1) == "discarded: unknown grant"
    assert fenced.untouched(8)


def test_a_page_that_was_not_granted_takes_the_batch_with_it(fenced: Rig) -> None:
    fenced.arm(1, [8])
    fenced.arm(2, [9])
    fenced.move(1, 1, [(0, 8), (1, 9)])
    for number, page in enumerate([2**31, 2**40, -1], start=2):
        fenced.move(number, 1, [(0, page)])
    assert all(fenced.told.end_of(number) == "discarded: not granted" for number in range(1, 5))
    assert fenced.untouched(8)
    assert fenced.untouched(9)


def test_another_instance_cannot_use_a_grant(fenced: Rig) -> None:
    fenced.arm(1, [8])
    fenced.move(1, 1, [(0, 8)], fenced.stranger())
    assert fenced.told.end_of(1) == "discarded: wrong peer"
    assert fenced.untouched(8)
    fenced.move(2, 1, [(1, 8)])
    assert fenced.told.end_of(2) == ""


def test_a_wrong_token_moves_nothing(rig: Rig) -> None:
    rig.arm(1, [8])
    rig.mover.connect(D, msgspec.structs.replace(rig.landing.endpoint, token="guess"), rig.slice)
    rig.move(1, 1, [(0, 8)])
    assert rig.told.end_of(1)
    assert rig.untouched(8)
    rig.connect()
    rig.move(2, 1, [(0, 8)])
    assert rig.told.end_of(2) == ""


def test_a_batch_may_be_given_as_two_lists_of_pages(rig: Rig) -> None:
    count = 2 * PAGES_PER_FRAME + 3
    rig.arm(1, range(count))
    src, dst = [PageId(count - page) for page in range(count)], [PageId(page) for page in range(count)]
    rig.mover.move(MoveNo(1), GrantNo(1), D, Pairs(src, dst))
    assert rig.told.end_of(1) == ""
    assert all(rig.has(page, src=count - page) for page in range(count))


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


def test_after_a_revoke_nothing_lands(fenced: Rig) -> None:
    fenced.arm(1, [8])
    assert fenced.landing.revoke(GrantNo(1))
    fenced.move(1, 1, [(0, 8)])
    assert fenced.told.end_of(1) == "discarded: revoked"
    assert fenced.untouched(8)
    assert fenced.told.landed == []


def test_a_revoke_after_the_last_page_is_quiet_at_once_and_takes_nothing_back(fenced: Rig) -> None:
    fenced.arm(1, [8])
    fenced.move(1, 1, [(0, 8)])
    assert fenced.told.end_of(1) == ""
    assert fenced.landing.revoke(GrantNo(1))
    assert fenced.landing.revoke(GrantNo(1))
    assert fenced.has(8, src=0)
    assert fenced.told.quiet == []


def test_revoking_an_unknown_grant_is_quiet(rig: Rig) -> None:
    assert rig.landing.revoke(GrantNo(77))


def test_a_revoke_of_one_grant_leaves_the_others_on_the_same_connection_alone(fenced: Rig) -> None:
    fenced.arm(1, range(128))
    fenced.arm(2, range(128, 256))
    fenced.move(1, 1, [(page, page) for page in range(128)])
    fenced.landing.revoke(GrantNo(1))
    fenced.move(2, 2, [(page, page) for page in range(128, 256)])
    assert fenced.told.end_of(2) == ""
    assert all(fenced.has(page, src=page) for page in range(128, 256))


def test_a_disarmed_grant_is_unknown(fenced: Rig) -> None:
    fenced.arm(1, [8])
    fenced.move(1, 1, [(0, 8)])
    assert fenced.told.end_of(1) == ""
    fenced.landing.disarm(GrantNo(1))
    fenced.move(2, 1, [(1, 8)])
    assert fenced.told.end_of(2) == "discarded: unknown grant"
    assert fenced.has(8, src=0)


@pytest.mark.parametrize("kind", FENCED, ids=named)
def test_once_quiet_the_pages_can_be_reused_while_the_peer_still_sends(kind: type[Fabric]) -> None:
    """Revoke at a different point of the stream in every round; a new owner writes at once, nothing may disturb it."""
    rig = Rig(kind(), pages=128, page_bytes=65536)
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
    rig.mover.move(MoveNo(1), GrantNo(1), seat("nobody"), paired([(0, 0)]))
    assert rig.told.end_of(1) == "peer nobody/dp0cp0tp0pp0 is not connected"


def test_teardown_by_the_mover_ends_everything_and_a_new_connect_begins_anew(rig: Rig) -> None:
    rig.arm(1, range(8))
    rig.mover.teardown(D.instance)
    rig.move(1, 1, [(0, 0)])
    assert rig.told.end_of(1) == f"peer {D} is not connected"
    rig.connect()
    rig.move(2, 1, [(0, 0)])
    assert rig.told.end_of(2) == ""


def test_teardown_by_the_landing_ends_the_peers_grants_but_not_its_next_ones(fenced: Rig) -> None:
    fenced.arm(1, [1, 2])
    fenced.move(1, 1, [(1, 1)])
    assert fenced.told.end_of(1) == ""
    assert fenced.landing.teardown(P.instance)
    fenced.move(2, 1, [(2, 2)])
    assert fenced.told.end_of(2)
    assert fenced.untouched(2)
    assert fenced.landing.revoke(GrantNo(1))
    fenced.arm(2, [2, 3])
    errors = []
    for number in range(3, 40):  # the close of the old connection may still take the first one with it
        fenced.move(number, 2, [(2, 2)])
        errors.append(fenced.told.end_of(number))
        if not errors[-1]:
            break
    assert errors[-1] == ""
    assert fenced.has(2, src=2)


def test_teardown_of_one_instance_leaves_another_alone(rig: Rig) -> None:
    stranger = rig.stranger()
    rig.arm(1, [5], STRANGER)
    rig.landing.teardown(P.instance)
    rig.move(1, 1, [(0, 5)], stranger)
    assert rig.told.end_of(1) == ""


def test_cancelling_a_grant_without_moves_is_nothing(rig: Rig) -> None:
    rig.mover.cancel(GrantNo(5), D)
    rig.mover.cancel(GrantNo(5), seat("nobody"))
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


def test_capabilities_say_that_decode_can_fence(fenced: Rig) -> None:
    assert fenced.mover.capabilities == fenced.landing.capabilities
    assert fenced.landing.capabilities.fence
    assert not fenced.landing.capabilities.one_sided


def test_no_thread_is_left_behind() -> None:
    before = set(threading.enumerate())
    rig = Rig(Tcp())
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert names == {f"pdplane-tcp-mover-{P}", f"pdplane-tcp-landing-{D}"}
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    rig.close()
    assert set(threading.enumerate()) == before


def test_an_endpoint_nobody_listens_on_is_an_error() -> None:
    rig = Rig(Tcp())
    gone = Rig(Tcp())
    endpoint = gone.landing.endpoint
    gone.close()
    rig.mover.connect(D, endpoint, rig.slice)
    rig.move(1, 1, [(0, 0)])
    assert f"at 127.0.0.1:{endpoint.port} is gone" in rig.told.end_of(1)
    rig.close()


def test_what_a_teardown_proves_is_what_the_capabilities_say(rig: Rig) -> None:
    rig.arm(1, [8])
    assert rig.landing.teardown(P.instance) is rig.landing.capabilities.teardown_proves


# --- several peers of one grant ----------------------------------------------------------------------------------


def test_arming_a_grant_for_another_peer_is_not_twice(rig: Rig) -> None:
    rig.arm(1, [8])
    rig.arm(1, [8], STRANGER)
    with pytest.raises(ValueError, match="grant 1 is armed already for p-2"):
        rig.arm(1, [8], STRANGER)


def test_every_peer_of_a_grant_places_its_own_and_is_told_of_apart(fenced: Rig) -> None:
    stranger = fenced.stranger()
    fenced.arm(1, [8, 9])
    fenced.arm(1, [8], STRANGER)
    fenced.move(1, 1, [(0, 8), (1, 9)])
    assert fenced.told.end_of(1) == ""
    fenced.move(2, 1, [(2, 8)], stranger)
    fenced.move(3, 1, [(2, 9)], stranger)
    assert fenced.told.end_of(2) == ""
    assert fenced.told.end_of(3) == "discarded: not granted"
    assert fenced.told.landed_from == [(1, P, 8), (1, P, 9), (1, STRANGER, 8)]
    assert fenced.has(8, src=2)
    assert fenced.has(9, src=1)


def test_a_revoke_ends_a_grant_for_all_of_its_peers(fenced: Rig) -> None:
    stranger = fenced.stranger()
    fenced.arm(1, [8])
    fenced.arm(1, [8], STRANGER)
    assert fenced.landing.revoke(GrantNo(1))
    fenced.move(1, 1, [(0, 8)])
    fenced.move(2, 1, [(0, 8)], stranger)
    assert fenced.told.end_of(1) == fenced.told.end_of(2) == "discarded: revoked"
    assert fenced.untouched(8)


def test_a_torn_down_peer_of_a_grant_takes_no_other_with_it(fenced: Rig) -> None:
    stranger = fenced.stranger()
    fenced.arm(1, [8])
    fenced.arm(1, [8], STRANGER)
    assert fenced.landing.teardown(P.instance)
    fenced.move(1, 1, [(0, 8)])
    assert fenced.told.end_of(1)
    assert fenced.untouched(8)
    fenced.move(2, 1, [(1, 8)], stranger)
    assert fenced.told.end_of(2) == ""
    assert fenced.has(8, src=1)


# --- slices: tensor parallel ranks on both sides -----------------------------------------------------------------

TARGETS = random.Random(3).sample(range(160), 100)  # of the source pages 0 to 99: two frames and more
PAIRS = list(enumerate(TARGETS))


@pytest.mark.parametrize("checksum", [False, True], ids=["plain", "checksums"])
@pytest.mark.parametrize("groups", [(HEADS,), (HEADS, LATENT, INDEX)], ids=["heads", "heads and latent rows"])
@pytest.mark.parametrize("tp", [(1, 1), (2, 2), (1, 2), (2, 1), (2, 4), (4, 1), (4, 2)])
@pytest.mark.parametrize("kind", FABRICS, ids=named)
def test_every_rank_gets_its_part_of_every_page(
    kind: type[Fabric], tp: tuple[int, int], groups: tuple[LayoutGroup, ...], checksum: bool
) -> None:
    if checksum and not kind.checksums:
        pytest.skip("no checksums on this transport")
    rig = SplitRig(kind(), *tp, groups, checksum=checksum)
    rig.arm(1, TARGETS)
    rig.move(1, 1, PAIRS)
    assert set(rig.ends(1)) == {""}
    for where in rig.targets:
        for src, dst in PAIRS:
            assert rig.page(where, dst) == rig.shard(src, where.rank.tp, tp[1])
        blank = b"\xee" * rig.targets[where].page_bytes
        assert all(rig.page(where, dst) == blank for dst in range(160) if dst not in TARGETS)
    for src, dst in rig.links:
        assert [page for _, peer, page in rig.told[dst].landed_from if peer == src] == TARGETS
    rig.close()


@pytest.mark.parametrize("kind", FABRICS, ids=named)
def test_a_rank_without_heads_takes_no_part(kind: type[Fabric]) -> None:
    rig = SplitRig(kind(), 1, 4)
    assert sorted(where.rank.tp for where in rig.landings) == [1, 2, 3]
    rig.close()


@pytest.mark.parametrize("kind", FENCED, ids=named)
def test_each_rank_of_an_instance_is_a_peer_of_its_own(kind: type[Fabric]) -> None:
    """Prefill's rank 0 has landed when the grant is revoked: rank 1's heads of the same pages stay as they were."""
    rig = SplitRig(kind(), 2, 1)
    first, second = rig.movers
    (where,) = rig.landings
    rig.landings[where].arm(GrantNo(1), first, [PageId(5)], rig.links[first, where])
    rig.movers[second].move(MoveNo(1), GrantNo(1), where, paired([(7, 5)]))
    assert rig.told[second].end_of(1) == "discarded: wrong peer"
    rig.landings[where].arm(GrantNo(1), second, [PageId(5)], rig.links[second, where])
    rig.movers[first].move(MoveNo(1), GrantNo(1), where, paired([(7, 5)]))
    assert rig.told[first].end_of(1) == ""
    rig.landings[where].revoke(GrantNo(1))
    rig.movers[second].move(MoveNo(2), GrantNo(1), where, paired([(7, 5)]))
    assert rig.told[second].end_of(2) == "discarded: revoked"
    page = rig.page(where, 5)
    assert shard_of((HEADS,), page, 0, 2) == rig.shard(7, 0, 2)
    assert shard_of((HEADS,), page, 1, 2) == b"\xee" * len(rig.shard(7, 1, 2))
    rig.close()


@pytest.mark.parametrize("kind", FABRICS, ids=named)
def test_a_mover_tears_down_all_ranks_of_an_instance(kind: type[Fabric]) -> None:
    rig = SplitRig(kind(), 1, 2)
    rig.arm(1, [5])
    (mover,) = rig.movers.values()
    mover.teardown(D.instance)
    rig.move(1, 1, [(7, 5)])
    assert rig.ends(1) == [f"peer {dst} is not connected" for _src, dst in rig.links]
    rig.close()


@pytest.mark.parametrize("kind", FENCED, ids=named)
def test_a_landing_tears_down_all_ranks_of_an_instance(kind: type[Fabric]) -> None:
    rig = SplitRig(kind(), 2, 1)
    rig.arm(1, [5])
    (where,) = rig.landings
    assert rig.landings[where].teardown(P.instance)
    rig.move(1, 1, [(7, 5)])
    assert all(rig.ends(1))
    assert rig.page(where, 5) == b"\xee" * rig.targets[where].page_bytes
    rig.close()


@pytest.mark.parametrize("kind", FABRICS, ids=named)
def test_a_slice_of_other_pages_than_a_pools_is_refused_at_both_ends(kind: type[Fabric]) -> None:
    rig = Rig(kind())
    other = SplitRig(kind(), 1, 2)
    (src, dst), slice_ = next(iter(other.links.items()))
    with pytest.raises(ValueError, match="this pool has pages of 4096"):
        rig.mover.connect(dst, rig.landing.endpoint, slice_)
    with pytest.raises(ValueError, match="this pool has pages of 4096"):
        rig.landing.arm(GrantNo(1), src, [PageId(1)], slice_)
    rig.close()
    other.close()


# --- checksums ---------------------------------------------------------------------------------------------------


HONEST = [kind for kind in FABRICS if not issubclass(kind, Faulty)]


def corrupted(kind: type[Fabric], checksum: bool) -> Rig:
    """One byte of the first frame is wrong by the time that it is in the pool."""
    rig = Rig(kind(), checksum=checksum, faults=LandingFaults(seed=5, corrupt=Picks(at=(0,))))
    rig.arm(1, [8, 9])
    rig.move(1, 1, [(0, 8), (1, 9)])
    rig.told.end_of(1)
    sent, here = content(0, PAGE_BYTES) + content(1, PAGE_BYTES), rig.target.memory[8 * PAGE_BYTES : 10 * PAGE_BYTES]
    assert sum(ours != theirs for ours, theirs in zip(sent, here, strict=True)) == 1
    return rig


@pytest.mark.parametrize("kind", [kind for kind in HONEST if kind.checksums], ids=named)
def test_a_wrong_byte_fails_its_move_where_there_are_checksums(kind: type[Fabric]) -> None:
    rig = corrupted(kind, checksum=True)
    assert rig.told.end_of(1) == "discarded: corrupt"
    assert rig.told.landed == []
    rig.move(2, 1, [(0, 8), (1, 9)])
    assert rig.told.end_of(2) == ""
    assert rig.told.pages_of(1) == [8, 9]
    assert rig.has(8, src=0)
    assert rig.has(9, src=1)
    rig.close()


@pytest.mark.parametrize("kind", HONEST, ids=named)
def test_a_wrong_byte_is_seen_by_nobody_where_there_are_none(kind: type[Fabric]) -> None:
    rig = corrupted(kind, checksum=False)
    assert rig.told.end_of(1) == ""
    rig.close()
