"""The checkers of pages by themselves: each rule, kept and broken, on a handful of events and effects."""

from __future__ import annotations

import msgspec
import pytest

from pdplane.core.effects import (
    ArmGrant,
    DisarmGrant,
    Effect,
    ExtendPages,
    Lane,
    Note,
    RetractEngine,
    RunDecode,
    RunPrefill,
)
from pdplane.core.frames import Row, Success
from pdplane.core.ids import GrantNo, Link, MoveNo, PageId, Rank, Rid, Room, Seat
from pdplane.core.slices import whole_page
from pdplane.sim.checkers import Pages, Violation
from pdplane.sim.content import PAGE_BYTES
from pdplane.sim.plan import plan
from pdplane.sim.rest import at_rest, conservation
from pdplane.transport.contract import Pair
from pdplane.transport.memory import Batch

from .watched import Worker, pages, work

ROW = Row(first_token=1, prompt_tokens=4, prompt_digest=b"")
D, P = Worker("decode"), Worker("prefill")
LANE = Lane(Link(Rank(), Seat(P.instance, Rank())), "memory", whole_page(PAGE_BYTES))


def batch(grant: int, *pairs: tuple[int, int]) -> Batch:
    moved = tuple(Pair(PageId(src), PageId(dst)) for src, dst in pairs)
    src, dst = Seat(P.instance, Rank()), Seat(D.instance, Rank())
    return Batch(MoveNo(1), GrantNo(grant), src, dst, moved, "token", whole_page(PAGE_BYTES), True, 1)


class Watch:
    def __init__(self, *, fence: bool = True) -> None:
        self.works = {Rid("a"): work("a"), Rid("b"): work("b", serial=2)}
        self.pages = Pages(self.works, fence=fence)
        self.pending: list[Batch] = []

    def see(self, *effects: Effect, who: Worker = D) -> None:
        for effect in effects:
            self.pages.effect(who, effect, self.pending)

    def grant(self, number: int, rid: str, *held: int) -> None:
        self.see(Note(Rid(rid), Room(5), "Granted"), ArmGrant(GrantNo(number), pages(*held), (LANE,)))

    def share(self, number: int, rid: str, shared: tuple[int, ...], *held: int) -> None:
        """A grant of `held`, behind a head that is there already."""
        armed = ArmGrant(GrantNo(number), pages(*held), (LANE,), pages(*shared))
        self.see(Note(Rid(rid), Room(5), "Granted"), armed)

    def success(self, number: int, cached_tokens: int = 0) -> None:
        row = msgspec.structs.replace(ROW, cached_tokens=cached_tokens)
        success = Success(room=Room(5), grant=GrantNo(number), src=P.instance, dst=D.instance, rank=Rank(), row=row)
        self.pages.success(P, success, Rank())


def test_a_write_under_a_live_grant_is_fine() -> None:
    watch = Watch()
    watch.grant(1, "a", 3, 4)
    watch.pages.landed(batch(1, (0, 4)), work("a").tag(1))


def test_o1_a_write_under_a_grant_that_nobody_gave() -> None:
    with pytest.raises(Violation, match="O1: a write under grant 7"):
        Watch().pages.landed(batch(7, (0, 3)), b"")


def test_o2_a_page_in_two_grants() -> None:
    watch = Watch()
    watch.grant(1, "a", 3, 4)
    with pytest.raises(Violation, match="O2: d0#1 hands page 4 to b while a holds it"):
        watch.grant(2, "b", 4)


def test_o2_a_grant_number_given_twice() -> None:
    watch = Watch()
    watch.grant(1, "a", 3)
    watch.see(Note(Rid("a"), Room(5), "Gone"))
    with pytest.raises(Violation, match="O2: d0#1 gives grant number 1 twice"):
        watch.grant(1, "b", 4)


def test_o2_a_running_request_grows_into_a_granted_page() -> None:
    watch = Watch()
    watch.grant(1, "a", 3)
    with pytest.raises(Violation, match="O2"):
        watch.see(ExtendPages(Rid("b"), pages(3)))


def test_o3_a_write_after_the_hand_off_was_taken_as_complete() -> None:
    watch = Watch()
    watch.grant(1, "a", 3)
    watch.see(Note(Rid("a"), Room(5), "Success"), DisarmGrant(GrantNo(1), Rank(), "memory"))
    with pytest.raises(Violation, match=r"O3: .* taken as complete"):
        watch.pages.landed(batch(1, (0, 3)), work("a").tag(0))


def test_o4_a_write_into_a_free_page() -> None:
    watch = Watch()
    watch.grant(1, "a", 3)
    watch.see(Note(Rid("a"), Room(5), "Gone"))
    with pytest.raises(Violation, match=r"O4: .* page 3, which is free"):
        watch.pages.landed(batch(1, (0, 3)), b"")


def test_o4_an_old_write_into_the_next_requests_page() -> None:
    watch = Watch()
    watch.grant(1, "a", 3)
    watch.see(Note(Rid("a"), Room(5), "Gone"))
    watch.grant(2, "b", 3)
    with pytest.raises(Violation, match=r"O4: .* under grant 1 landed in page 3 of b"):
        watch.pages.landed(batch(1, (0, 3)), b"")


def test_o4_bytes_of_another_request_under_the_right_grant() -> None:
    watch = Watch()
    watch.grant(1, "a", 3)
    with pytest.raises(Violation, match=r"O4: .* is not its page 0"):
        watch.pages.landed(batch(1, (0, 3)), work("b", serial=2).tag(0))


def test_o4_a_page_is_granted_while_a_posted_write_can_land_in_it() -> None:
    watch = Watch(fence=False)
    watch.pending = [batch(1, (0, 3))]
    with pytest.raises(Violation, match=r"O4: .* a write of grant 1 can still land"):
        watch.grant(2, "b", 3)


def test_with_a_fence_a_posted_write_does_not_hold_the_page_up() -> None:
    watch = Watch()
    watch.pending = [batch(1, (0, 3))]
    watch.grant(2, "b", 3)


def test_o4_prefill_reuses_a_page_that_a_move_still_reads() -> None:
    watch = Watch()
    watch.pending = [batch(1, (6, 3))]
    with pytest.raises(Violation, match="O4: p0#1 hands out pages that move 1 still reads"):
        watch.see(RunPrefill(Rid("b"), pages(6)), who=P)


def test_o2_a_shared_page_is_handed_out_while_a_prompt_reads_it() -> None:
    watch = Watch()
    watch.see(RunPrefill(Rid("a"), pages(3, 4), 4 - 4), who=P)
    watch.see(Note(Rid("a"), Room(5), "Gone"), who=P)
    watch.works[Rid("a")] = msgspec.structs.replace(work("a"), prompt_tokens=8)
    watch.see(RunPrefill(Rid("a"), pages(3, 6), 4), who=P)
    with pytest.raises(Violation, match="O2: p0#1 hands page 3 to b while a shares it"):
        watch.see(RunPrefill(Rid("b"), pages(3)), who=P)


def test_o2_a_prompt_shares_a_page_that_another_one_writes() -> None:
    watch = Watch()
    watch.see(RunPrefill(Rid("a"), pages(3)), who=P)
    watch.works[Rid("b")] = msgspec.structs.replace(work("b"), prompt_tokens=8)
    with pytest.raises(Violation, match="O2: p0#1 lets b share page 3, which a holds"):
        watch.see(RunPrefill(Rid("b"), pages(3, 4), 4), who=P)


def test_o2_a_shared_page_at_decode_is_in_nobodys_grant() -> None:
    watch = Watch()
    watch.share(1, "a", (3,), 4)
    with pytest.raises(Violation, match="O2: d0#1 hands page 3 to b while a shares it"):
        watch.grant(2, "b", 3)


def test_o2_a_grant_may_not_name_its_own_head() -> None:
    with pytest.raises(Violation, match="O2: d0#1 hands page 3 to a while a shares it"):
        Watch().share(1, "a", (3,), 3, 4)


def test_o2_a_page_that_is_still_granted_cannot_be_shared() -> None:
    watch = Watch()
    watch.grant(1, "a", 3)
    with pytest.raises(Violation, match="O2: d0#1 lets b share page 3, which a holds"):
        watch.share(2, "b", (3,), 4)


def test_o4_a_write_into_a_shared_page() -> None:
    watch = Watch()
    watch.grant(1, "a", 3)
    watch.see(Note(Rid("a"), Room(5), "Gone"))
    watch.share(2, "b", (3,), 4)
    with pytest.raises(Violation, match=r"O4: .* page 3, which is free"):
        watch.pages.landed(batch(1, (0, 3)), work("a").tag(0))


def test_o4_a_page_is_shared_while_a_posted_write_can_land_in_it() -> None:
    watch = Watch(fence=False)
    watch.pending = [batch(1, (0, 3))]
    with pytest.raises(Violation, match=r"O4: .* a write of grant 1 can still land"):
        watch.share(2, "b", (3,), 4)


def test_pages_behind_a_head_hold_what_comes_behind_it() -> None:
    watch = Watch()
    watch.share(1, "a", (3,), 4)
    watch.pages.landed(batch(1, (1, 4)), work("a").tag(1))
    with pytest.raises(Violation, match=r"O4: .* is not its page 1"):
        watch.pages.landed(batch(1, (0, 4)), work("a").tag(0))


def test_a_head_is_shared_until_the_room_drains_and_again_while_it_runs() -> None:
    watch = Watch()
    watch.share(1, "a", (3,), 4)
    watch.see(Note(Rid("a"), Room(5), "Draining"))
    watch.grant(2, "b", 3)
    other = Watch()
    other.share(1, "a", (3,), 4)
    other.see(Note(Rid("a"), Room(5), "Gone"), RunDecode(Rid("a"), pages(3, 4), ROW, 2))
    with pytest.raises(Violation, match="O2: d0#1 hands page 3 to b while a shares it"):
        other.grant(2, "b", 3)


def test_o3_decode_starts_on_the_head_that_it_shares() -> None:
    watch = Watch()
    watch.share(1, "a", (3,), 4)
    watch.see(Note(Rid("a"), Room(5), "Gone"))
    with pytest.raises(Violation, match="O3: d0#1 lets a start on other pages than it shares"):
        watch.see(RunDecode(Rid("a"), pages(5, 4), ROW, 2))


def test_a_full_hit_is_a_success_of_no_pages_and_one_of_no_grant_is_none() -> None:
    watch = Watch()
    watch.share(1, "a", (3,))
    watch.success(1)
    with pytest.raises(Violation, match=r"O3: p0#1 says SUCCESS of grant 2 .* where 0 of 0 pages"):
        watch.success(2)


def test_o2_pages_are_handed_out_before_the_retracted_request_has_let_go_of_them() -> None:
    watch = Watch()
    watch.see(RunDecode(Rid("a"), pages(3), ROW, 2))
    watch.see(RetractEngine(Rid("a"), pages(3)))
    with pytest.raises(Violation, match="O2"):
        watch.grant(1, "b", 3)
    watch.pages.retracted(D, Rid("a"))
    watch.grant(2, "b", 3)


def test_o3_success_may_not_overtake_the_bytes() -> None:
    watch = Watch()
    watch.grant(1, "a", 3)
    with pytest.raises(Violation, match=r"O3: p0#1 says SUCCESS of grant 1 .* where 0 of 1 pages have landed"):
        watch.success(1)
    watch.pages.landed(batch(1, (0, 3)), work("a").tag(0))
    watch.success(1)


def test_cached_tokens_are_those_that_were_shared() -> None:
    watch = Watch()
    watch.grant(1, "a", 3)
    watch.pages.landed(batch(1, (0, 3)), work("a").tag(0))
    with pytest.raises(Violation, match="cached: p0#1 says 3 of 4 tokens were cached, and shared 0"):
        watch.success(1, cached_tokens=3)


def test_a_prompt_is_never_shared_whole() -> None:
    with pytest.raises(Violation, match="cached: p0#1 lets a compute nothing"):
        Watch().see(RunPrefill(Rid("a"), pages(3), 4), who=P)


def test_conservation_and_rest_hold_for_an_idle_worker_and_see_a_lost_page() -> None:
    worker = Worker("decode")
    conservation(worker)
    at_rest(worker, plan(0))
    del worker.node.ledger._free[PageId(2)]
    with pytest.raises(Violation, match="conservation: d0#1: page 2 is free and disagrees"):
        conservation(worker)
