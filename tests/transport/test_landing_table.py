"""The fence itself: what a revoke proves, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdplane.core.ids import GrantNo, PageId
from pdplane.core.slices import Slice, Span, whole_page
from pdplane.transport.landing_table import Claim, LandingTable, Verdict

from .rigs import seat

P, P1, OTHER = seat("p-1"), seat("p-1", 1), seat("p-2")
WHOLE = whole_page(64)
G = GrantNo(1)


class Desk:
    def __init__(self) -> None:
        self.landed: list[PageId] = []
        self.quiet: list[GrantNo] = []
        self.table = LandingTable(16, 64, lambda _grant, _peer, pages: self.landed.extend(pages), self.quiet.append)
        self.table.arm(G, P, pages(0, 1, 2, 3), WHOLE)

    def claim(self, *wanted: int) -> Claim:
        claim = self.table.claim(G, P, pages(*wanted))
        assert isinstance(claim, Claim)
        return claim


def pages(*numbers: int) -> Sequence[PageId]:
    return [PageId(number) for number in numbers]


def test_a_revoke_during_a_read_is_quiet_when_that_read_returns() -> None:
    desk = Desk()
    claim = desk.claim(0)
    assert desk.table.enter(claim)
    assert not desk.table.revoke(G)
    assert not desk.table.revoke(G)
    assert desk.quiet == []
    desk.table.leave(claim)
    assert desk.quiet == [G]
    assert desk.table.revoke(G)


def test_a_revoke_between_two_reads_is_quiet_now_and_the_next_read_is_turned_away() -> None:
    desk = Desk()
    claim = desk.claim(0)
    assert desk.table.enter(claim)
    desk.table.leave(claim)
    assert desk.table.revoke(G)
    assert not desk.table.enter(claim)
    assert desk.table.abandon(claim) is Verdict.REVOKED
    assert desk.quiet == []


def test_two_reads_under_way_owe_one_quiet() -> None:
    desk = Desk()
    first, second = desk.claim(0), desk.claim(1)
    assert desk.table.enter(first)
    assert desk.table.enter(second)
    assert not desk.table.revoke(G)
    desk.table.leave(first)
    assert desk.quiet == []
    assert desk.table.finish(second) is Verdict.REVOKED
    assert desk.quiet == [G]


def test_a_frame_that_completes_under_a_revoke_has_not_landed() -> None:
    desk = Desk()
    claim = desk.claim(0, 1)
    assert desk.table.enter(claim)
    desk.table.revoke(G)
    assert desk.table.finish(claim) is Verdict.REVOKED
    assert desk.landed == []
    assert desk.table.discarded == {Verdict.REVOKED: 1}


def test_a_disarm_during_a_read_does_not_lose_the_quiet() -> None:
    desk = Desk()
    claim = desk.claim(0)
    assert desk.table.enter(claim)
    assert not desk.table.revoke(G)
    desk.table.disarm(G)
    desk.table.leave(claim)
    assert desk.quiet == [G]


def test_a_page_that_is_being_written_cannot_be_claimed_again() -> None:
    desk = Desk()
    desk.claim(0, 1)
    assert desk.table.claim(G, P, pages(1, 2)) is Verdict.REPEATED


def test_an_abandoned_page_can_be_sent_again_and_lands_once() -> None:
    desk = Desk()
    desk.table.abandon(desk.claim(0, 1))
    again = desk.claim(0, 1)
    assert desk.table.enter(again)
    assert desk.table.finish(again) is Verdict.LANDED
    assert desk.landed == pages(0, 1)


def test_a_cut_peer_lands_nothing_under_old_grants_and_all_under_new_ones() -> None:
    desk = Desk()
    claim = desk.claim(0)
    assert desk.table.cut(P.instance)
    assert not desk.table.enter(claim)
    assert desk.table.abandon(claim) is Verdict.CUT
    assert desk.table.claim(G, P, pages(1)) is Verdict.CUT
    desk.table.arm(GrantNo(2), P, pages(0), WHOLE)
    assert isinstance(desk.table.claim(GrantNo(2), P, pages(0)), Claim)


def test_a_callback_that_fails_does_not_lose_the_quiet() -> None:
    quiet: list[GrantNo] = []
    table = LandingTable(16, 64, lambda _grant, _peer, _pages: 1 // 0, quiet.append)
    table.arm(G, P, pages(0, 1), WHOLE)
    finishing, running = table.claim(G, P, pages(0)), table.claim(G, P, pages(1))
    assert isinstance(finishing, Claim)
    assert isinstance(running, Claim)
    assert table.enter(finishing)
    assert table.enter(running)
    try:
        table.finish(finishing)
    except ZeroDivisionError:
        failed = True
    assert failed
    assert not table.revoke(G)
    table.leave(running)
    assert quiet == [G]


def test_pages_are_granted_in_any_order_and_claimed_in_any_other() -> None:
    desk = Desk()
    desk.table.arm(GrantNo(2), P, pages(9, 3, 14, 0, 9), WHOLE)
    for wanted, refusal in (
        ((14, 9), None),
        ((9,), Verdict.REPEATED),
        ((3, 3), Verdict.REPEATED),
        ((0, 4), Verdict.NOT_GRANTED),
        ((0, 15), Verdict.NOT_GRANTED),
        ((-1,), Verdict.NOT_GRANTED),
        ((2**32,), Verdict.NOT_GRANTED),
        ((3, 0), None),
    ):
        claim = desk.table.claim(GrantNo(2), P, pages(*wanted))
        assert isinstance(claim, Claim) if refusal is None else claim is refusal, wanted


def test_a_frame_that_is_refused_takes_none_of_its_pages() -> None:
    desk = Desk()
    desk.claim(1)
    assert desk.table.claim(G, P, pages(0, 1)) is Verdict.REPEATED
    assert desk.table.claim(G, P, pages(2), 63) is Verdict.MISFIT
    desk.claim(0, 2)


def test_nothing_can_be_claimed_of_a_grant_without_pages() -> None:
    desk = Desk()
    desk.table.arm(GrantNo(2), P, [], WHOLE)
    assert desk.table.claim(GrantNo(2), P, pages(0)) is Verdict.NOT_GRANTED


@pytest.mark.parametrize("page", [-1, 16, 2**32])
def test_a_page_outside_the_pool_is_not_armed(page: int) -> None:
    desk = Desk()
    with pytest.raises(IndexError, match=f"page {page} is outside the pool of 16 pages"):
        desk.table.arm(GrantNo(2), P, pages(0, page, 1), WHOLE)
    assert desk.table.claim(GrantNo(2), P, pages(0)) is Verdict.UNKNOWN_GRANT


# --- several peers -----------------------------------------------------------------------------------------------


def test_a_revoke_is_quiet_when_the_last_peer_has_left() -> None:
    desk = Desk()
    desk.table.arm(G, P1, pages(0, 1), WHOLE)
    ours, theirs = desk.claim(0), desk.table.claim(G, P1, pages(0))
    assert isinstance(theirs, Claim)
    assert desk.table.enter(ours)
    assert desk.table.enter(theirs)
    assert not desk.table.revoke(G)
    desk.table.leave(ours)
    assert desk.quiet == []
    desk.table.leave(theirs)
    assert desk.quiet == [G]


def test_one_peer_claims_and_lands_what_another_has_claimed_and_landed() -> None:
    desk = Desk()
    desk.table.arm(G, P1, pages(0, 1), WHOLE)
    for peer in (P, P1):
        claim = desk.table.claim(G, peer, pages(0))
        assert isinstance(claim, Claim)
        assert (claim.grant, claim.peer, claim.slice) == (G, peer, WHOLE)
        assert desk.table.enter(claim)
        assert desk.table.finish(claim) is Verdict.LANDED
        assert desk.table.claim(G, peer, pages(0)) is Verdict.REPEATED
    assert desk.landed == pages(0, 0)


def test_another_rank_of_the_same_instance_is_another_peer() -> None:
    assert Desk().table.claim(G, P1, pages(0)) is Verdict.WRONG_PEER


def test_a_cut_instance_loses_all_of_its_ranks_and_no_other_does() -> None:
    desk = Desk()
    desk.table.arm(G, P1, pages(0), WHOLE)
    desk.table.arm(G, OTHER, pages(0), WHOLE)
    assert desk.table.cut(P.instance)
    assert desk.table.claim(G, P, pages(0)) is Verdict.CUT
    assert desk.table.claim(G, P1, pages(0)) is Verdict.CUT
    assert isinstance(desk.table.claim(G, OTHER, pages(0)), Claim)


def test_a_cut_is_no_proof_while_a_read_is_under_way() -> None:
    desk = Desk()
    claim = desk.claim(0)
    assert desk.table.enter(claim)
    assert not desk.table.cut(P.instance)
    desk.table.leave(claim)
    assert desk.table.cut(P.instance)


def test_a_peer_that_is_armed_after_the_revoke_lands_nothing() -> None:
    desk = Desk()
    assert desk.table.revoke(G)
    desk.table.arm(G, P1, pages(0), WHOLE)
    assert desk.table.claim(G, P1, pages(0)) is Verdict.REVOKED


# --- slices and verdicts of the transport's own --------------------------------------------------------------------


def test_a_frame_must_be_as_long_as_its_slice() -> None:
    desk = Desk()
    half = Slice(32, 64, (Span(0, 32, 32, 32, 32, 1),))
    desk.table.arm(G, P1, pages(0, 1), half)
    assert desk.table.claim(G, P1, pages(0, 1), 128) is Verdict.MISFIT
    assert desk.table.discarded == {Verdict.MISFIT: 1}
    assert isinstance(desk.table.claim(G, P1, pages(0, 1), 64), Claim)


def test_pages_that_are_corrupt_have_not_landed_and_may_come_again() -> None:
    desk = Desk()
    claim = desk.claim(0)
    assert desk.table.enter(claim)
    assert desk.table.finish(claim, Verdict.CORRUPT) is Verdict.CORRUPT
    assert desk.landed == []
    assert desk.table.discarded == {Verdict.CORRUPT: 1}
    desk.claim(0)


def test_a_grant_that_ended_meanwhile_matters_more_than_what_the_transport_found() -> None:
    desk = Desk()
    claim = desk.claim(0)
    assert desk.table.enter(claim)
    desk.table.revoke(G)
    assert desk.table.finish(claim, Verdict.CORRUPT) is Verdict.REVOKED
