"""The rules of holds by themselves: each kept, and each broken, on a handful of events and effects."""

from __future__ import annotations

import msgspec
import pytest

from pdplane.core.effects import (
    AnswerFailed,
    AnswerHeld,
    ArmGrant,
    Count,
    Effect,
    Lane,
    Note,
    RunWhole,
    SendFrame,
    Ungate,
)
from pdplane.core.errors import Cause
from pdplane.core.events import ControlEndpoint, Event, FrameIn, Handle, HandleRefused, RequestArrived
from pdplane.core.frames import Confirm, Confirmed, HoldIdentity, PromptId, Renewed, Row
from pdplane.core.ids import ConnId, GrantNo, HoldNo, Link, MoveNo, PageId, Rank, Rid, Seat, Shape
from pdplane.core.layout import PARAMS
from pdplane.core.slices import whole_page
from pdplane.sim.checkers import Pages, Violation
from pdplane.sim.content import PAGE_BYTES
from pdplane.sim.drawn import Plan
from pdplane.sim.hold_rules import HoldRules
from pdplane.sim.plan import plan
from pdplane.transport.contract import Pair
from pdplane.transport.memory import Batch

from .watched import Worker, calm_plan, pages, work

D, P = Worker("decode"), Worker("prefill")
LINK = Link(Rank(), Seat(P.instance, Rank()))
PROMPT = PromptId(b"digest", 4)
ROW = Row(first_token=1, prompt_tokens=4, prompt_digest=b"digest")
CONN, GRANT, HOLD = ConnId(1), GrantNo(1), HoldNo(1)
LEASE_S = 3.0


def handle(hold: HoldNo = HOLD, prompt: PromptId = PROMPT) -> Handle:
    return Handle(
        instance=P.instance,
        hold=hold,
        pages=pages(0),
        prompt=prompt,
        endpoints=((Rank(), ControlEndpoint("p0", 1)),),
        shape=Shape(),
        dp=0,
        lease_s=LEASE_S,
        rid=Rid("p"),
    )


def named(grant: GrantNo = GRANT) -> HoldIdentity:
    return HoldIdentity(hold=HOLD, grant=grant, src=P.instance, dst=D.instance, rank=Rank())


class Watch:
    """One hand-off, said step by step: request "p" at prefill, whose hold is number 1; "d" at decode, grant 1."""

    def __init__(self, drawn: Plan | None = None) -> None:
        works = {Rid(rid): work(rid) for rid in ("p", "d", "e")}
        self.pages = Pages(works, fence=True, confirms=True)
        self.rules = HoldRules(drawn or msgspec.structs.replace(calm_plan(), dialect=PARAMS), self.pages)
        self.now = 1.0

    def hear(self, event: Event, who: Worker = D) -> None:
        self.rules.event(who, event, self.now)

    def see(self, *effects: Effect, who: Worker = D) -> None:
        for effect in effects:
            self.pages.effect(who, effect, [])
            self.rules.effect(who, effect, self.now)

    def arrives(self, rid: str, brings: Handle | None = None, who: Worker = D, prompt: PromptId = PROMPT) -> None:
        self.hear(RequestArrived(rid=Rid(rid), prompt=prompt, max_new=2, deadline=300.0, handle=brings), who)

    def hold(self, number: HoldNo = HOLD) -> None:
        self.arrives("p", who=P)
        self.see(AnswerHeld(Rid("p"), ROW, number, pages(0), LEASE_S), who=P)

    def read(self, rid: str = "d", grant: GrantNo = GRANT, page: int = 5) -> None:
        lane = Lane(LINK, "memory", whole_page(PAGE_BYTES))
        self.see(Note(Rid(rid), None, "Reading"), ArmGrant(grant, pages(page), (lane,)))

    def land(self, grant: GrantNo = GRANT, page: int = 5) -> None:
        src, dst = Seat(P.instance, Rank()), Seat(D.instance, Rank())
        pairs = (Pair(PageId(0), PageId(page)),)
        batch = Batch(MoveNo(1), grant, src, dst, pairs, "token", whole_page(PAGE_BYTES), False, 1)
        self.pages.landed(batch, work("d").tag(0))

    def ask(self, grant: GrantNo = GRANT) -> None:
        asked = HoldIdentity(hold=HOLD, grant=grant, src=D.instance, dst=P.instance, rank=Rank())
        self.see(SendFrame(CONN, Confirm(**asked)))

    def confirm(self, grant: GrantNo = GRANT) -> None:
        self.see(SendFrame(CONN, Confirmed(**named(grant))), who=P)
        self.hear(FrameIn(CONN, Confirmed(**named(grant))))

    def run(self, rid: str = "d", page: int = 5, *, gated: bool = False) -> None:
        self.see(RunWhole(Rid(rid), pages(page), 2, computed=4, gated=gated))

    def handed_off(self) -> None:
        self.hold()
        self.arrives("d", handle())
        self.read()
        self.land()
        self.ask()
        self.confirm()


def test_a_whole_hand_off_breaks_nothing() -> None:
    watch = Watch()
    watch.handed_off()
    watch.run()
    watch.see(Note(Rid("p"), None, "freed"), who=P)
    watch.rules.bounded(300.0)


def test_the_engine_may_begin_before_the_answer_and_no_byte_may_leave() -> None:
    watch = Watch()
    watch.hold()
    watch.arrives("d", handle())
    watch.read()
    watch.land()
    watch.ask()
    watch.run(gated=True)
    with pytest.raises(Violation, match="confirm: d0#1 answers d from hold 1 of p0#1, which was not confirmed"):
        watch.see(Ungate(Rid("d")))
    watch.confirm()
    watch.see(Ungate(Rid("d")))


def test_a_run_without_a_gate_and_without_a_confirmation() -> None:
    watch = Watch()
    watch.hold()
    watch.arrives("d", handle())
    watch.read()
    watch.land()
    with pytest.raises(Violation, match="confirm"):
        watch.run()


def test_a_confirmation_that_was_asked_for_before_the_last_page_had_come() -> None:
    watch = Watch()
    watch.hold()
    watch.arrives("d", handle())
    watch.read()
    watch.ask()
    watch.confirm()
    watch.land()
    with pytest.raises(Violation, match=r"confirm: .*: 0 of 1 pages had come when it asked"):
        watch.run()


def test_what_prefill_has_given_back_it_cannot_confirm() -> None:
    watch = Watch()
    watch.hold()
    watch.see(Note(Rid("p"), None, "freed"), who=P)
    with pytest.raises(Violation, match="confirm: p0#1 confirms hold 1 to d0#1, whose pages it has given back"):
        watch.see(SendFrame(CONN, Confirmed(**named())), who=P)


def test_its_consumer_may_hear_the_same_yes_again() -> None:
    watch = Watch()
    watch.handed_off()
    watch.see(Note(Rid("p"), None, "freed"), who=P)
    watch.confirm()


def test_a_hold_is_confirmed_to_one_grant_alone() -> None:
    watch = Watch()
    watch.handed_off()
    with pytest.raises(Violation, match="consumer: p0#1 confirms hold 1 to d0#1, and has confirmed it to"):
        watch.see(SendFrame(CONN, Confirmed(**named(GrantNo(2)))), who=P)


def test_a_hold_that_was_never_given() -> None:
    with pytest.raises(Violation, match="confirm: p0#1 confirms hold 1 to d0#1, which it never gave"):
        Watch().see(SendFrame(CONN, Confirmed(**named())), who=P)


def test_a_hold_serves_the_prompt_that_it_is_of() -> None:
    watch = Watch()
    watch.hold()
    watch.arrives("d", handle(), prompt=PromptId(b"another", 4))
    watch.read()
    watch.land()
    watch.ask()
    watch.confirm()
    with pytest.raises(Violation, match="prompt: d0#1 answers d from hold 1 of p0#1, which is of another prompt"):
        watch.run()


def test_pages_that_nobody_loaded_are_not_computed() -> None:
    watch = Watch()
    watch.arrives("e")
    with pytest.raises(Violation, match="O3: d0#1 takes 1 pages of e as computed, and nothing was loaded"):
        watch.run("e")


def test_the_last_token_of_a_prompt_is_computed_here() -> None:
    watch = Watch()
    watch.arrives("e")
    with pytest.raises(Violation, match="cached: d0#1 lets e compute nothing of its own"):
        watch.see(RunWhole(Rid("e"), pages(5), 2, computed=4, shared=1))


@pytest.mark.parametrize("code", ["spent", "unknown_hold", "prompt_mismatch", "invalid_params"])
def test_a_handle_that_is_no_good_is_refused_and_not_hidden_by_a_prompt_computed_anew(code: str) -> None:
    with pytest.raises(Violation, match=f"consumer: d0#1 computes a prompt itself .* a handle that is {code}"):
        Watch().see(Count("recompute", code))
    Watch().see(Count("recompute", "expired"))


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_number_is_given_once() -> None:
    watch = Watch()
    watch.hold()
    with pytest.raises(Violation, match="lease: p0#1 gives hold number 1 a second time"):
        watch.hold()


def test_pages_of_a_hold_go_back_once() -> None:
    watch = Watch()
    watch.hold()
    watch.see(Note(Rid("p"), None, "freed"), who=P)
    with pytest.raises(Violation, match="lease: p0#1 gives the pages of hold 1 back a second time"):
        watch.see(Note(Rid("p"), None, "freed"), who=P)


def test_a_hold_ends_with_its_lease() -> None:
    watch = Watch()
    watch.hold()
    watch.rules.bounded(watch.now + LEASE_S)
    with pytest.raises(Violation, match=r"lease: p0#1 keeps hold 1 of p, whose lease ended at 4.0 s"):
        watch.rules.bounded(watch.now + LEASE_S + 1.5)


def test_a_renewal_moves_the_end_of_what_is_held_and_revives_nothing() -> None:
    watch = Watch()
    watch.hold()
    renewed = Renewed(src=P.instance, dst=D.instance, rank=Rank(), holds=(HOLD,), lease_s=LEASE_S)
    watch.now = 3.0
    watch.see(SendFrame(CONN, renewed), who=P)
    watch.rules.bounded(6.5)
    watch.see(Note(Rid("p"), None, "freed"), who=P)
    with pytest.raises(Violation, match="lease: p0#1 renews hold 1, which it does not hold"):
        watch.see(SendFrame(CONN, renewed), who=P)


def test_a_dead_prefill_keeps_nothing() -> None:
    watch = Watch()
    watch.hold()
    watch.rules.died(P)
    watch.rules.bounded(300.0)


# --- pages back -------------------------------------------------------------------------------------------------------


def test_what_a_client_has_left_behind_is_given_back_in_two_seconds() -> None:
    watch = Watch()
    watch.hold()
    watch.arrives("d", handle())
    watch.read()
    over = {Rid("d"): 2.0}
    watch.rules.given_back(2.0 + watch.rules.back_s, [D], over)
    with pytest.raises(Violation, match=r"back: d0#1 has not given back the pages of d, over since 2.0 s"):
        watch.rules.given_back(2.1 + watch.rules.back_s, [D], over)


@pytest.mark.parametrize("turned_away", [True, False], ids=["at_the_edge", "by_the_core"])
def test_prefill_has_back_what_decode_has_given_up(turned_away: bool) -> None:
    watch = Watch()
    watch.hold()
    cause = Cause("bad_request", "no", 400)
    if turned_away:
        watch.hear(HandleRefused(handle(), cause))
    else:
        watch.arrives("d", handle())
        watch.see(AnswerFailed(Rid("d"), cause))
    watch.rules.bounded(1.0 + min(watch.rules.back_s, LEASE_S))
    with pytest.raises(Violation, match=r"back: p0#1 keeps hold 1 of p, given up at decode at 1.0 s"):
        watch.rules.bounded(1.1 + watch.rules.back_s)


def test_what_is_somebody_elses_is_not_decodes_to_give_up() -> None:
    watch = Watch()
    watch.hold()
    watch.arrives("d", handle())
    watch.see(AnswerFailed(Rid("d"), Cause("spent", "another has it", 409)))
    watch.rules.bounded(1.0 + LEASE_S)


def test_pages_are_back_sooner_where_nobody_may_be_away() -> None:
    near = Watch(plan(0, pattern="slow_transfer", dialect=PARAMS)).rules.back_s
    apart = Watch(plan(0, pattern="crash_decode", dialect=PARAMS)).rules.back_s
    assert near < 15.0 < apart
