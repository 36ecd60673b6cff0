"""The two tables of the params dialect as data. That every cell is met is test_params_chaos.py's to show."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdplane.core.params.table import HA, HE, HOLDER, LA, LE, OVER, READER, H, L, RequestStatus

from .facing_params import FacingParams, cause
from .test_table import reachable

ENDED = {H.RELEASED, H.REVOKED}


def test_every_state_is_reachable() -> None:
    assert reachable(HOLDER, H.HELD) == set(H)
    assert reachable(READER, L.PARKED) == set(L)


def test_every_state_can_end_and_an_end_never_turns_back() -> None:
    assert all(reachable(HOLDER, state) & ENDED for state in H)
    assert all(reachable(READER, state) & OVER for state in L)
    assert [key for key in READER if key[0] in OVER] == []
    assert {(at, to) for (at, _), (to, _) in HOLDER.items() if at in ENDED} == {(state, state) for state in ENDED}


def test_every_event_and_action_is_used() -> None:
    assert {event for _, event in HOLDER} == set(HE)
    assert {action for _, actions in HOLDER.values() for action in actions} == set(HA)
    assert {event for _, event in READER} == set(LE)
    assert {action for _, actions in READER.values() for action in actions} == set(LA)


def test_a_hold_gives_its_pages_back_once_and_exactly_on_the_way_into_an_end() -> None:
    for (at, event), (to, actions) in HOLDER.items():
        assert actions.count(HA.SENT) == int(at not in ENDED and to in ENDED), (at, event)


def test_only_its_consumer_is_told_that_a_hold_was_held() -> None:
    told = {key for key, (_, actions) in HOLDER.items() if HA.CONFIRMED in actions}
    assert told == {(H.BOUND, HE.CONFIRM), (H.RELEASED, HE.CONFIRM)}


def test_whoever_reads_or_confirms_is_answered_in_every_state() -> None:
    asked = {
        H.HELD: {HE.READ, HE.READ_UNFIT, HE.CONFIRM_OTHER},  # it has no consumer yet: nobody is another one
        H.BOUND: {HE.READ, HE.READ_OTHER, HE.READ_UNFIT, HE.CONFIRM, HE.CONFIRM_OTHER},
        H.RELEASED: {HE.READ, HE.READ_OTHER, HE.CONFIRM, HE.CONFIRM_OTHER},  # its pages are gone: none are unfit
        H.REVOKED: {HE.READ, HE.READ_OTHER, HE.CONFIRM, HE.CONFIRM_OTHER},
    }
    frames = set.union(*asked.values())
    assert {state: {event for at, event in HOLDER if at is state} & frames for state in H} == asked


def test_a_read_is_committed_by_a_confirmation_alone() -> None:
    assert {event for (_, event), (_, actions) in READER.items() if LA.COMMIT in actions} == {LE.CONFIRMED}


def test_pages_go_back_to_the_scheduler_only_when_nothing_lands_there() -> None:
    """After the last page, after the fences, or before anything was asked for."""
    quiet = {(L.READING, LE.LANDED_ALL), (L.DRAINING, LE.QUIET)}
    for (at, event), (_, actions) in READER.items():
        if LA.RECEIVED in actions:
            assert (at, event) in quiet or at in (L.PARKED, L.SALVAGING), (at, event)


def test_every_failure_is_said_once_and_with_the_end_of_its_load() -> None:
    for (at, event), (to, actions) in READER.items():
        if LA.FAIL in actions:
            assert to is L.FAILED
            assert (LA.RECEIVED in actions) == (at is not L.CONFIRMING), (at, event)


def test_the_lease_is_kept_until_the_load_is_over() -> None:
    for (at, event), (to, actions) in READER.items():
        assert (LA.DROP_LEASE in actions) == (to in OVER), (at, event)


def test_a_reader_that_gives_up_says_so_wherever_prefill_cannot_know() -> None:
    """Not to one that is gone, nor to one that has said itself that nothing is held."""
    knows = {LE.LOST, LE.PEER_GONE, LE.UNREACHABLE, LE.REFUSED, LE.CONFIRMED}
    for (at, event), (to, actions) in READER.items():
        if to in OVER:
            assert (LA.RELEASE in actions) == (event not in knows), (at, event)


@given(st.sampled_from(list(H)), st.sampled_from(list(HE)))
def test_a_missing_cell_is_late_and_changes_nothing_at_prefill(state: H, event: HE) -> None:
    if (state, event) in HOLDER:
        return
    world = FacingParams()
    world.hold(1)
    holder = world.holder(1)
    holder.state = state
    before = vars(holder).copy()
    holder.apply(event, cause=cause())
    assert vars(holder) == before
    assert [repr(effect) for effect in world.prefill.out] == [f"Count(name='late', label='{state}/{event}')"]


@given(st.sampled_from(list(L)), st.sampled_from(list(LE)))
def test_a_missing_cell_is_late_and_changes_nothing_at_decode(state: L, event: LE) -> None:
    if (state, event) in READER:
        return
    world = FacingParams()
    world.hold(1)
    world.second(1)
    reader = world.reader(1)
    world.decode.out.clear()
    reader.state = state
    before = vars(reader).copy()
    reader.apply(event, cause=cause())
    assert vars(reader) == before
    assert [repr(effect) for effect in world.decode.out] == [f"Count(name='late', label='{state}/{event}')"]


def test_vllms_names_say_who_is_finished() -> None:
    assert [status for status in RequestStatus if status.finished] == [
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_ABORTED,
        RequestStatus.FINISHED_ERROR,
    ]
