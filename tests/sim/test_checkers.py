"""The checkers by themselves: each rule, kept and broken, on a handful of events and effects."""

from __future__ import annotations

import pytest

from pdplane.core.decode import DecodeNode
from pdplane.core.effects import AnswerFailed, AnswerRow, ArmGrant, DisarmGrant, Effect, ExtendPages, Note, RunPrefill
from pdplane.core.errors import client_left
from pdplane.core.events import LegArrived
from pdplane.core.frames import PromptId, Row
from pdplane.core.ids import GrantNo, Instance, MoveNo, PageId, Rank, Rid, Room
from pdplane.core.node import Limits
from pdplane.core.prefill import PrefillNode
from pdplane.core.session import Identity
from pdplane.sim.checkers import Ends, Pages, Violation, at_rest, conservation
from pdplane.sim.engine import Work
from pdplane.sim.plan import plan
from pdplane.sim.process import STAMP
from pdplane.transport.contract import Pair
from pdplane.transport.memory import Batch

ROW = Row(first_token=1, prompt_tokens=4, prompt_digest=b"")


class Worker:
    """A process of which only the name matters."""

    def __init__(self, side: str) -> None:
        self.side = side
        self.instance = Instance(f"{side[0]}0#1")
        self.alive = True
        me, limits = Identity(self.instance, Rank(), STAMP), Limits(pages=8)
        self.node = PrefillNode(me, limits) if side == "prefill" else DecodeNode(me, limits, fence=True)


D, P = Worker("decode"), Worker("prefill")


def pages(*numbers: int) -> tuple[PageId, ...]:
    return tuple(PageId(number) for number in numbers)


def work(name: str, serial: int = 1) -> Work:
    return Work(Rid(name), Room(5), serial, 4, 2, 2)


def batch(grant: int, *pairs: tuple[int, int]) -> Batch:
    moved = tuple(Pair(PageId(src), PageId(dst)) for src, dst in pairs)
    return Batch(MoveNo(1), GrantNo(grant), P.instance, D.instance, moved, "token", True)


class Watch:
    def __init__(self, *, fence: bool = True) -> None:
        self.pages = Pages(fence=fence)
        self.pending: list[Batch] = []

    def see(self, *effects: Effect, who: Worker = D) -> None:
        for effect in effects:
            self.pages.effect(who, effect, self.pending)

    def grant(self, number: int, rid: str, *held: int) -> None:
        armed = ArmGrant(GrantNo(number), (P.instance,), pages(*held))
        self.see(Note(Rid(rid), Room(5), "Granted"), armed)


def test_a_write_under_a_live_grant_is_fine() -> None:
    watch = Watch()
    watch.grant(1, "a", 3, 4)
    watch.pages.landed(batch(1, (0, 4)), [work("a").tag(1)], {Rid("a"): work("a")})


def test_o1_a_write_under_a_grant_that_nobody_gave() -> None:
    with pytest.raises(Violation, match="O1: a write under grant 7"):
        Watch().pages.landed(batch(7, (0, 3)), [b""], {})


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
    watch.see(Note(Rid("a"), Room(5), "Success"), DisarmGrant(GrantNo(1)))
    with pytest.raises(Violation, match=r"O3: .* taken as complete"):
        watch.pages.landed(batch(1, (0, 3)), [work("a").tag(0)], {Rid("a"): work("a")})


def test_o4_a_write_into_a_free_page() -> None:
    watch = Watch()
    watch.grant(1, "a", 3)
    watch.see(Note(Rid("a"), Room(5), "Gone"))
    with pytest.raises(Violation, match=r"O4: .* page 3, which is free"):
        watch.pages.landed(batch(1, (0, 3)), [b""], {})


def test_o4_an_old_write_into_the_next_requests_page() -> None:
    watch = Watch()
    watch.grant(1, "a", 3)
    watch.see(Note(Rid("a"), Room(5), "Gone"))
    watch.grant(2, "b", 3)
    with pytest.raises(Violation, match=r"O4: .* under grant 1 landed in page 3 of b"):
        watch.pages.landed(batch(1, (0, 3)), [b""], {})


def test_o4_bytes_of_another_request_under_the_right_grant() -> None:
    watch = Watch()
    watch.grant(1, "a", 3)
    with pytest.raises(Violation, match=r"O4: .* is not its page 0"):
        watch.pages.landed(batch(1, (0, 3)), [work("b", serial=2).tag(0)], {Rid("a"): work("a")})


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


def _ends() -> Ends:
    ends = Ends(plan(0, pattern="calm"))
    for who in (D, P):
        leg = LegArrived(rid=Rid(f"a{who.side[0]}"), room=Room(5), prompt=PromptId(b"", 4), max_new=2, deadline=300.0)
        ends.event(who, leg, 1.0)
    return ends


def test_a_second_answer_breaks_the_verdict() -> None:
    ends = _ends()
    ends.effect(D, AnswerFailed(Rid("ad"), client_left("decode")), 2.0)
    with pytest.raises(Violation, match="verdict: d0#1 answers ad a second time"):
        ends.effect(D, AnswerRow(Rid("ad"), ROW), 3.0)


def test_a_failure_must_cross_in_time() -> None:
    ends = _ends()
    ends.effect(P, AnswerFailed(Rid("ap"), client_left("prefill")), 2.0)
    ends.crossed(2.0 + ends.bound_s)
    with pytest.raises(Violation, match=r"crossing: attempt a: one side failed .* ad at d0#1 has not ended"):
        ends.crossed(2.1 + ends.bound_s)


def test_prefills_good_end_starts_no_clock_for_decode() -> None:
    ends = _ends()
    ends.effect(P, AnswerRow(Rid("ap"), ROW), 2.0)
    ends.crossed(200.0)


def test_a_leg_that_never_ends_is_named() -> None:
    ends = _ends()
    ends.effect(P, AnswerRow(Rid("ap"), ROW), 2.0)
    with pytest.raises(Violation, match="end: ad at d0#1 never ended"):
        ends.all_over()


def test_a_room_is_taken_once() -> None:
    ends = _ends()
    ends.effect(D, Note(Rid("ad"), Room(5), "Queued"), 1.0)
    with pytest.raises(Violation, match="room: d0#1 takes b for room 5"):
        ends.effect(D, Note(Rid("b"), Room(5), "Queued"), 2.0)


def test_conservation_and_rest_hold_for_an_idle_worker_and_see_a_lost_page() -> None:
    worker = Worker("decode")
    conservation(worker)
    at_rest(worker, plan(0))
    del worker.node.ledger._free[PageId(2)]
    with pytest.raises(Violation, match="conservation: d0#1: page 2 is free and disagrees"):
        conservation(worker)
