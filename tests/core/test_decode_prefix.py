"""The prefix cache at decode: what decode has already is not moved, and is nobody's to write."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdplane.core import acceptor
from pdplane.core.effects import AnswerRow, ArmGrant, DisarmGrant, MovePages, RunDecode
from pdplane.core.events import FrameIn
from pdplane.core.frames import Failed, Grant, Success
from pdplane.core.layout import PREFIX_PROTOCOL
from pdplane.core.pages import Page
from pdplane.core.rooms.table import R, S

from .facing import PAGE, Facing, limits, only, prompt


def keys(text: str) -> dict[str, Any]:
    """A prompt that says one letter a page, with half a page behind them: what a leg of it carries."""
    return {"prompt": prompt(len(text) * PAGE + 8, text.encode()), "page_keys": _chained(text)}


def whole(text: str) -> dict[str, Any]:
    """The same with nothing behind its full pages."""
    return {"prompt": prompt(len(text) * PAGE, text.encode()), "page_keys": _chained(text)}


def _chained(text: str) -> tuple[bytes, ...]:
    return tuple(text[: end + 1].encode() for end in range(len(text)))


def ended(world: Facing, number: int, **leg: Any) -> None:
    """A request from its legs to its end at decode."""
    world.meet(number, **leg)
    world.send_all(number)
    world.pump()
    world.release(number, world.d)


def test_the_second_of_two_prompts_that_begin_alike_moves_only_what_decode_lacks() -> None:
    world = Facing()
    ended(world, 5, **keys("abc"))
    assert world.decode.ledger.counts[Page.CACHED] == 3
    world.meet(6, **keys("abx"))
    grant, armed = world.d.sent(Grant)[-1], world.d.all(ArmGrant)[-1]
    assert (grant.prefix_pages, len(grant.pages)) == (2, 2)
    assert (armed.pages, len(armed.shared)) == (grant.pages, 2)
    world.send_all(6)
    moves = [move for move in world.p.all(MovePages) if move.grant == grant.grant]
    assert [page for move in moves for page in move.dst] == list(grant.pages)
    world.pump()
    run = world.d.all(RunDecode)[-1]
    assert run.pages == armed.shared + grant.pages
    world.release(6, world.d)
    assert world.decode.ledger.counts[Page.CACHED] == 4


def test_pages_that_decode_has_are_not_moved_while_the_rest_is_computed() -> None:
    world = Facing(p_limits=limits(prefix_cache=False))
    ended(world, 5, **keys("ab"))
    world.meet(6, **keys("abcd"))
    before = len(world.p.all(MovePages))
    world.compute(6, 2 * PAGE)
    assert len(world.p.all(MovePages)) == before
    world.compute(6, 3 * PAGE)
    move = world.p.all(MovePages)[-1]
    assert (move.src, move.dst) == (world.sender(6).pages[2:3], world.receiver(6).pages[:1])


def test_a_full_hit_moves_nothing_and_still_waits_for_success_and_row() -> None:
    world = Facing()
    ended(world, 5, **whole("ab"))
    moved = len(world.p.all(MovePages))
    world.meet(6, **whole("ab"))
    grant = world.d.sent(Grant)[-1]
    assert (grant.pages, grant.prefix_pages) == ((), 2)
    assert world.states(6) == (R.GRANTED, S.STREAMING)
    world.sample(6)
    assert len(world.p.sent(Success)) == 1  # only the first room's: the engine still has the pages
    world.release(6)
    world.pump()
    assert len(world.p.all(MovePages)) == moved
    run = world.d.all(RunDecode)[-1]
    assert run.row.first_token == 7
    assert len(run.pages) == 2
    assert world.d.counted("decode_prefix_hits") == ["full"]
    assert world.decode.batch.running[world.rid(6)].pages[:2] == list(run.pages)
    assert world.decode.ledger.counts[Page.ACTIVE] == 1  # it stands at its edge at once, and has grown
    world.release(6, world.d)
    assert world.decode.ledger.free_count == world.d_limits.pages - 2
    assert len(world.decode.reserve) == 0


def test_a_full_hit_whose_row_is_the_end_is_answered_and_holds_nothing() -> None:
    world = Facing()
    ended(world, 5, **whole("ab"))
    world.meet(6, **whole("ab"))
    world.send_all(6, ended="stop")
    world.pump()
    assert isinstance(only(world.d.answers("r6")), AnswerRow)
    assert (world.decode.live, len(world.decode.reserve)) == (0, 0)
    assert world.decode.pages.available == world.d_limits.pages


def test_a_hand_off_that_ends_with_its_row_is_kept_for_the_next_one() -> None:
    world = Facing()
    world.meet(5, **keys("ab"))
    world.send_all(5, ended="stop")
    world.pump()
    assert world.decode.ledger.counts[Page.CACHED] == 2
    world.meet(6, **keys("ab"))
    assert world.d.sent(Grant)[-1].prefix_pages == 2


@pytest.mark.parametrize("tp", [(1, 2), (2, 1), (2, 4)])
def test_every_link_leaves_out_the_same_head(tp: tuple[int, int]) -> None:
    world = Facing(tp=tp)
    ended(world, 5, **keys("abc"))
    world.meet(6, **whole("abc"))
    assert {(grant.pages, grant.prefix_pages) for grant in world.d.sent(Grant)[-max(tp) :]} == {((), 3)}
    world.send_all(6)
    world.pump()
    assert world.states(6) == (R.GONE, S.GONE)
    assert len(world.d.all(RunDecode)) == 2


def test_prefill_keeps_all_pages_of_a_prompt_though_it_moved_none() -> None:
    world = Facing(p_limits=limits(pages=4), d_limits=limits(pages=32))
    ended(world, 5, **whole("abcd"))
    ended(world, 6, **whole("wxyz"))  # prefill forgets the first one for it; decode has both
    world.meet(7, **whole("abcd"))
    assert world.d.sent(Grant)[-1].prefix_pages == 4
    world.send_all(7)
    world.pump()
    assert world.prefill.ledger.counts[Page.CACHED] == 4
    assert world.d_state(7) is R.GONE


# --- who shares ----------------------------------------------------------------------------------------------------


def test_a_prefill_that_does_not_know_of_heads_is_granted_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "PROTOCOL_VERSION", PREFIX_PROTOCOL - 1)
    world = Facing()
    ended(world, 5, **keys("ab"))
    ended(world, 6, **keys("ab"))
    assert [(len(grant.pages), grant.prefix_pages) for grant in world.d.sent(Grant)] == [(3, 0), (3, 0)]
    assert world.decode.ledger.counts[Page.CACHED] == 2


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    world = Facing(d_limits=limits(prefix_cache=False))
    ended(world, 5, **keys("ab"))
    assert world.decode.ledger.counts[Page.CACHED] == 0
    ended(world, 6, **keys("ab"))
    assert world.d.sent(Grant)[-1].prefix_pages == 0


def test_a_prompt_is_let_in_by_the_pages_that_it_lacks() -> None:
    world = Facing(d_limits=limits(pages=6, reserve_tokens=0))
    ended(world, 5, **keys("abcd"))
    world.meet(6, **keys("abcd") | {"max_new": 1})
    world.meet(7, **keys("abcd") | {"max_new": 1})
    assert [world.d_state(number) for number in (6, 7)] == [R.GRANTED, R.GRANTED]
    world.meet(8, **keys("abcd") | {"max_new": 1})
    assert world.d_state(8) is R.ALLOCATING
    assert world.decode.ledger.counts[Page.CACHED] == 4


def test_a_head_that_a_waiting_room_shares_is_not_evicted() -> None:
    world = Facing(d_limits=limits(pages=5, reserve_tokens=0))
    ended(world, 5, **whole("abc"))
    world.meet(6, **keys("abc") | {"max_new": 1})
    world.meet(7, **keys("xy") | {"max_new": 1})
    assert (world.d_state(6), world.d_state(7)) == (R.GRANTED, R.ALLOCATING)
    world.cancel(world.d, 6)
    world.pump()
    assert world.d_state(7) is R.GRANTED


# --- ends that are no success --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", [True, False])
def test_what_a_cancelled_room_shares_is_let_go_at_once_and_its_own_pages_with_the_proof(fence: bool) -> None:
    world = Facing(fence=fence, auto_fence=False)
    ended(world, 5, **keys("ab"))
    world.meet(6, **keys("abc"))
    own = len(world.receiver(6).pages)
    world.cancel(world.d, 6)
    assert (world.receiver(6).shared, world.d_state(6)) == ((), R.DRAINING)
    assert world.decode.pages.available == world.d_limits.pages - own
    if fence:
        world.quiet(6)
    world.pump()
    world.release(6)
    world.land_all()
    world.pump()
    assert world.d_state(6) is R.GONE
    assert world.decode.pages.available == world.d_limits.pages
    assert world.decode.ledger.counts[Page.CACHED] == 2  # nothing of the cancelled one


@pytest.mark.parametrize("fence", [True, False])
def test_a_full_hit_that_is_cancelled_owes_no_proof_for_pages(fence: bool) -> None:
    world = Facing(fence=fence)
    ended(world, 5, **whole("ab"))
    world.meet(6, **whole("ab"))
    world.cancel(world.d, 6)
    assert world.decode.pages.available == world.d_limits.pages
    assert world.d.all(DisarmGrant)[-1].grant == world.d.sent(Grant)[-1].grant
    world.pump()
    world.release(6)
    world.pump()
    assert world.states(6) == (R.GONE, S.GONE)
    assert world.armed == {}


def test_a_full_hit_of_a_prefill_that_dies_is_over_and_quarantines_nothing() -> None:
    world = Facing(fence=False)
    ended(world, 5, **whole("ab"))
    world.meet(6, **whole("ab"))
    world.p.hears = False
    world.cut(reachable=False)
    world.wait(3.0)
    assert world.d.failed("r6").code == "peer_gone"
    assert world.d_state(6) is R.GONE
    assert world.decode.ledger.counts[Page.QUARANTINED] == 0


def test_nothing_of_a_failed_hand_off_is_shared_with_the_next_one() -> None:
    world = Facing()
    world.meet(5, **keys("abc"))
    world.compute(5, 3 * PAGE)
    world.land_all()
    world.release(5, error="the model failed")
    world.pump()
    assert world.d_state(5) is R.GONE
    world.meet(6, **keys("abc"))
    assert world.d.sent(Grant)[-1].prefix_pages == 0


def test_a_client_that_leaves_a_running_request_leaves_its_prompt_to_others() -> None:
    """The hand-off was complete: what the engine did afterwards is behind the prompt."""
    world = Facing()
    world.meet(5, **keys("abc"))
    world.send_all(5)
    world.pump()
    world.cancel(world.d, 5)
    world.release(5, world.d)
    assert world.decode.ledger.counts[Page.CACHED] == 3


def test_nothing_of_a_request_on_which_the_engine_failed_is_kept() -> None:
    world = Facing()
    world.meet(5, **keys("abc"))
    world.send_all(5)
    world.pump()
    world.release(5, world.d, error="a bad weight")
    assert world.decode.ledger.free_count == world.d_limits.pages


def test_a_lost_session_says_the_same_head_again() -> None:
    world = Facing()
    ended(world, 5, **keys("ab"))
    world.meet(6, **keys("abc"))
    world.cut()
    world.wait(0.3)
    first, again = world.d.sent(Grant)[-2:]
    assert (again.pages, again.prefix_pages) == (first.pages, first.prefix_pages)
    world.send_all(6)
    world.pump()
    assert world.states(6) == (R.GONE, S.GONE)


# --- grants that cannot be -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "pages", "text"),
    [
        (3, 0, "decode granted 0 pages for 40 tokens, which need 3, and says that it has 3 already, of 2 full ones"),
        (3, 1, "decode granted 1 pages for 40 tokens, which need 3, and says that it has 3 already, of 2 full ones"),
        (1, 1, "decode granted 1 pages for 40 tokens, which need 3, and says that it has 1 already"),
        (2, 2, "decode granted 2 pages for 40 tokens, which need 3, and says that it has 2 already"),
        (2**40, 0, "says that it has 1099511627776 already"),
    ],
)
def test_a_head_that_does_not_add_up_fails_that_one_room(head: int, pages: int, text: str) -> None:
    world = Facing()
    world.meet(4)
    world.legs_in(5)
    conn, grant = next((conn, frame) for conn, _, frame in world.mail if isinstance(frame, Grant))
    world.mail.clear()
    wrong = msgspec.structs.replace(grant, pages=grant.pages[:pages], decode_prefix_len=head)
    world.p.take(FrameIn(conn, wrong))
    failed = only(world.p.sent(Failed))
    assert (failed.room, failed.cause.code, failed.cause.side) == (5, "bad_grant", "decode")
    assert text in failed.cause.message
    assert world.p_state(4) is S.STREAMING


def test_a_grant_said_again_with_another_head_fails_its_room() -> None:
    world = Facing()
    ended(world, 5, **keys("ab"))
    world.meet(6, **keys("abc"))
    grant = world.d.sent(Grant)[-1]
    other = msgspec.structs.replace(grant, decode_prefix_len=msgspec.UNSET)
    world.p.take(FrameIn(only(world.conns), other))
    assert only(world.p.sent(Failed)).cause.code == "bad_grant"
