"""One request of the params dialect from the first leg to its answer, and what each side says and holds on the way."""

from __future__ import annotations

import pytest

from pdplane.core.effects import (
    AnswerHeld,
    AnswerRow,
    ArmGrant,
    Count,
    DisarmGrant,
    MovePages,
    Note,
    RunPrefill,
    RunWhole,
    SendFrame,
    Ungate,
)
from pdplane.core.events import Drain, Released, Sampled
from pdplane.core.frames import Confirm, Confirmed, Read, Release
from pdplane.core.pages import Page
from pdplane.core.params.table import H, L, RequestStatus

from .facing import PAGE, limits, only
from .facing_params import FacingParams, answers, request

TP = pytest.mark.parametrize(("tp", "links"), [((1, 2), 2), ((2, 1), 2), ((2, 2), 2), ((2, 4), 4), ((4, 1), 4)])


def steps(world: FacingParams) -> list[str]:
    """What decode asked for, in order, without the session's own frames."""
    told = []
    for effect in world.d.log:
        if isinstance(effect, SendFrame) and isinstance(effect.frame, (Read, Confirm, Release)):
            told.append(type(effect.frame).__name__)
        elif not isinstance(effect, (Note, Count, SendFrame)):
            told.append(type(effect).__name__)
    return told


def test_prefill_answers_as_soon_as_the_prompt_is_computed_and_holds_the_pages() -> None:
    world = FacingParams()
    world.ask(1)
    assert len(only(world.p.all(RunPrefill)).pages) == 3
    assert answers(world.p, "p1") == []
    handle = world.computed(1)
    held = only(answers(world.p, "p1"))
    assert isinstance(held, AnswerHeld)
    assert (held.lease_s, held.row.first_token, held.row.prompt_tokens) == (30.0, 7, 40)
    assert handle.pages == only(world.p.all(RunPrefill)).pages
    assert world.prefill.ledger.counts[Page.HELD] == 3
    assert world.holder(1).state is H.HELD


def test_the_answer_waits_until_the_engine_has_let_go_of_the_pages() -> None:
    world = FacingParams()
    rid = world.ask(1)
    world.p.take(Sampled(rid=rid, token=7))
    assert answers(world.p, "p1") == []
    world.p.take(Released(rid=rid))
    assert len(answers(world.p, "p1")) == 1


def test_decode_reserves_arms_asks_reads_confirms_and_only_then_lets_the_answer_go() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    assert (world.status(1), world.states(1)) == (RequestStatus.WAITING_FOR_REMOTE_KVS, (H.BOUND, L.READING))
    assert world.decode.ledger.counts[Page.GRANTED] == 3
    assert world.d.all(RunWhole) == []
    world.land_all()
    assert (world.status(1), world.states(1)) == (RequestStatus.RUNNING, (H.BOUND, L.CONFIRMING))
    assert world.run_of(1).gated
    assert not world.may_leave(1)
    world.pump()
    assert world.may_leave(1)
    assert steps(world) == ["Dial", "ArmGrant", "Read", "DisarmGrant", "Confirm", "RunWhole", "Ungate"]
    assert only(world.p.sent(Confirmed)).refusal is None


def test_prefill_frees_its_pages_with_the_confirmation_and_decode_with_the_end() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    world.land_all()
    assert world.p.free == 13
    world.pump()
    assert world.p.free == 16
    assert world.d.free == 13
    world.let_go(1)
    assert world.idle()


def test_the_last_token_of_the_prompt_is_computed_at_decode() -> None:
    world = FacingParams()
    world.whole(1)
    run = world.run_of(1)
    assert (run.computed, run.shared, run.max_new) == (40, 0, 4)
    assert world.decode.batch.running[run.rid].tokens == 39


def test_an_answer_that_is_over_before_the_confirmation_waits_for_it() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1, max_new=1)
    world.land_all()
    world.let_go(1)
    assert world.status(1) is RequestStatus.FINISHED_STOPPED
    assert not world.may_leave(1)
    world.pump()
    assert world.may_leave(1)
    assert world.idle()


def test_a_request_without_a_handle_computes_its_prompt_at_decode() -> None:
    world = FacingParams()
    world.d.take(request("d1", 40, b"prompt", world.now))
    run = only(world.d.all(RunWhole))
    assert (run.computed, run.gated) == (0, False)
    world.let_go(1)
    assert world.idle()
    assert world.conns == {}


def test_both_sides_keep_the_full_pages_of_the_prompt() -> None:
    world = FacingParams()
    world.whole(1, 40, keys="ab")
    assert world.prefill.ledger.counts[Page.CACHED] == 2
    assert world.decode.ledger.counts[Page.CACHED] == 0  # not before somebody else may read them
    world.decoded(1, 41)
    world.let_go(1)
    assert world.decode.ledger.counts[Page.CACHED] == 2
    assert world.idle()


def test_what_is_not_confirmed_is_in_nobodys_prefix() -> None:
    world = FacingParams()
    world.hold(1, 40, keys="ab")
    world.read(1, keys="ab", max_new=1)
    world.land_all()
    world.decoded(1, 40)
    world.let_go(1)
    assert world.decode.ledger.counts[Page.CACHED] == 0
    world.hold(2, 40, keys="ab")
    world.second(2, keys="ab")
    assert world.decode.pages.hits(world.scheduled(2).prompt) == 0


@pytest.mark.parametrize("pages", [1, 2, 4])
@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("hits", [0, 1, 99])
def test_a_head_that_decode_has_is_not_read_again(pages: int, edge: int, hits: int) -> None:
    """Prompts of kp-1, kp and kp+1 tokens with none, one and all of their full pages at decode."""
    tokens, keys = pages * PAGE + edge, "abcd"
    world = FacingParams()
    if hits:
        world.whole(1, tokens, keys=keys[:hits])
        world.decoded(1, tokens)
        world.let_go(1)
    handle = world.hold(2, tokens, keys=keys)
    world.read(2, keys=keys)
    most = (tokens - 1) // PAGE  # the last token is computed here, in a page of its own
    shared = min(hits, most)
    if shared * PAGE == tokens - 1:
        assert world.status(2) is RequestStatus.RUNNING
        assert [frame.hold for frame in world.d.sent(Release)] == [handle.hold]
        assert [read.hold for read in world.d.sent(Read)].count(handle.hold) == 0
    else:
        read = world.d.sent(Read)[-1]
        assert read.src_pages == handle.pages[shared:]
        assert world.d.all(ArmGrant)[-1].pages == read.dst_pages
        world.land_all()
        world.pump()
        assert world.run_of(2).computed == tokens
    assert world.run_of(2).shared == shared
    assert world.may_leave(2)
    world.let_go(2)
    assert world.idle()


def test_a_full_hit_never_parks_and_releases_prefill_at_once() -> None:
    world = FacingParams()
    world.whole(1, 33, keys="ab")
    world.decoded(1, 34)
    world.let_go(1)
    world.hold(2, 33, keys="ab")
    world.second(2, keys="ab")
    assert world.status(2) is RequestStatus.RUNNING
    assert not world.run_of(2).gated
    world.pump()
    assert world.holder(2).state is H.RELEASED
    parked = [e for e in world.d.all(Note) if e.rid == "d2" and e.state == RequestStatus.WAITING_FOR_REMOTE_KVS]
    assert parked == []


def test_prefills_own_prefix_hits_are_part_of_the_hold() -> None:
    world = FacingParams()
    world.whole(1, 40, keys="ab")
    handle = world.hold(2, 40, keys="ab")
    assert world.p.all(RunPrefill)[-1].cached_tokens == 32
    world.read(2)
    assert world.d.sent(Read)[-1].src_pages == handle.pages
    world.land_all()
    world.pump()
    for number in (1, 2):
        world.let_go(number)
    assert world.idle()


def test_pages_are_taken_all_or_none() -> None:
    world = FacingParams(d_limits=limits(pages=4))
    world.hold(1)
    world.hold(2, 32)
    world.read(1)
    world.read(2)
    assert world.status(2) is RequestStatus.WAITING
    assert world.decode.ledger.counts[Page.GRANTED] == 3
    assert world.states(2) == (H.HELD, L.PARKED)
    world.land_all()
    world.pump()
    world.let_go(1)
    assert world.states(2)[1] is L.READING


def test_a_parked_request_keeps_its_pages_whoever_wants_them() -> None:
    """WAITING_FOR_REMOTE_KVS is never preempted: a running one that cannot grow gives way itself, or waits."""
    world = FacingParams(d_limits=limits(pages=6, reserve_tokens=0))
    world.hold(1, 32)
    world.hold(2, 32)
    world.read(1, max_new=40)
    world.read(2)
    world.land(world.p.all(MovePages)[0])
    world.pump()
    for tokens in (33, 48, 64, 80):
        world.decoded(1, tokens)
    assert world.status(2) is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert len(world.scheduled(2).own) == 2
    world.land(world.p.all(MovePages)[1])
    world.pump()
    assert world.status(2) is RequestStatus.RUNNING


def test_a_confirmed_request_waits_for_its_place_in_the_batch() -> None:
    world = FacingParams(d_limits=limits(max_running=1))
    world.whole(1)
    world.hold(2)
    world.read(2)
    world.land_all()
    world.pump()
    assert world.status(2) is RequestStatus.WAITING
    world.let_go(1)
    assert world.status(2) is RequestStatus.RUNNING
    assert not world.run_of(2).gated
    assert [ungate.rid for ungate in world.d.all(Ungate)] == ["d1"]


@TP
def test_pages_come_over_every_link_and_are_confirmed_once(tp: tuple[int, int], links: int) -> None:
    world = FacingParams(tp=tp)
    world.whole(1)
    assert len(world.d.sent(Read)) == len(world.p.all(MovePages)) == links
    assert len(only(world.d.all(ArmGrant)).lanes) == links
    assert len(world.d.sent(Confirm)) == len(world.p.sent(Confirmed)) == 1
    assert len(world.d.all(DisarmGrant)) == tp[1]
    world.let_go(1)
    assert world.idle()


def test_a_page_that_only_one_link_has_brought_is_not_there() -> None:
    world = FacingParams(tp=(2, 1))
    world.hold(1)
    world.read(1)
    world.land_pages(1, 3, link=0)
    assert world.states(1)[1] is L.READING
    world.land_pages(1, 2, link=1)
    assert world.reader(1).head == 2
    world.land_pages(1, 3, link=1)
    assert world.states(1)[1] is L.CONFIRMING


def test_prefill_credits_and_pages_are_back_pressure() -> None:
    world = FacingParams(p_limits=limits(pages=6, max_running=1))
    for number in (1, 2, 3):
        world.ask(number)
    assert [run.rid for run in world.p.all(RunPrefill)] == ["p1"]
    world.computed(1)
    world.computed(2)
    assert [run.rid for run in world.p.all(RunPrefill)] == ["p1", "p2"]  # both hold their pages
    world.read(1)
    world.land_all()
    world.pump()
    assert [run.rid for run in world.p.all(RunPrefill)] == ["p1", "p2", "p3"]


def test_a_drained_decode_takes_nothing_new_and_ends_what_it_has() -> None:
    world = FacingParams()
    world.hold(1)
    world.hold(2)
    world.read(1)
    world.d.take(Drain("going down"))
    world.read(2)
    assert world.d.failed("d2").code == "draining"
    assert world.holder(2).state is H.RELEASED
    world.land_all()
    world.pump()
    world.let_go(1)
    assert world.idle()


def test_a_drained_prefill_still_serves_what_it_holds() -> None:
    world = FacingParams()
    world.hold(1)
    world.p.take(Drain("going down"))
    world.ask(2)
    assert world.p.failed("p2").code == "draining"
    world.read(1)
    world.land_all()
    world.pump()
    assert world.may_leave(1)


def test_the_first_token_may_end_prefills_prompt_and_decode_finds_out_for_itself() -> None:
    world = FacingParams()
    world.ask(1)
    world.computed(1, ended="stop")
    held = only(world.p.all(AnswerHeld))
    assert held.row.finish_reason == "stop"
    world.read(1)
    world.land_all()
    world.pump()
    assert world.may_leave(1)
    assert world.d.all(AnswerRow) == []
