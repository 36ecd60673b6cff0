"""The two tables as data: reachable, terminal, total in the sense that what is missing is late."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.core.errors import client_left
from pdplane.core.ids import NO_GRANT
from pdplane.core.rooms.receiver import Receiver
from pdplane.core.rooms.sender import Sender
from pdplane.core.rooms.table import RA, RE, RECEIVER, SA, SE, SENDER, KVPoll, R, S, receiver_poll, sender_poll

from .facing import Facing

T = TypeVar("T")


def reachable(table: Mapping[tuple[T, object], tuple[T, object]], start: T) -> set[T]:
    found, new = {start}, {start}
    while new:
        new = {to for (at, _), (to, _) in table.items() if at in new} - found
        found |= new
    return found


def test_every_state_is_reachable() -> None:
    assert reachable(RECEIVER, R.QUEUED) == set(R)
    assert reachable(SENDER, S.NEW) == set(S)


def test_every_state_can_end() -> None:
    assert all(R.GONE in reachable(RECEIVER, state) for state in R)
    assert all(S.GONE in reachable(SENDER, state) for state in S)


def test_gone_is_terminal() -> None:
    assert [key for key in RECEIVER if key[0] is R.GONE] == []
    assert {to for (at, _), (to, _) in SENDER.items() if at is S.GONE} == {S.GONE}


def test_an_end_never_turns_back() -> None:
    ended = {R.DRAINING, R.QUARANTINE, R.GONE}
    assert all(to in ended for (at, _), (to, _) in RECEIVER.items() if at in ended)
    assert all(to in {S.DRAINING, S.GONE} for (at, _), (to, _) in SENDER.items() if at is S.DRAINING)
    assert all(to in {S.SENT, S.GONE} for (at, _), (to, _) in SENDER.items() if at is S.SENT)


def test_every_event_and_action_is_used() -> None:
    assert {event for _, event in RECEIVER} == set(RE)
    assert {action for _, actions in RECEIVER.values() for action in actions} == set(RA)
    assert {event for _, event in SENDER} == set(SE)
    assert {action for _, actions in SENDER.values() for action in actions} == set(SA)


def test_the_client_is_answered_exactly_on_the_way_into_an_end() -> None:
    before = {R.QUEUED, R.ANNOUNCED, R.ALLOCATING, R.GRANTED, R.SUCCESS}
    for (at, event), (to, actions) in RECEIVER.items():
        answers = sum(action in (RA.ANSWER, RA.ANSWER_ROW) for action in actions)
        ends = at in before and to not in before and event is not RE.BATCH
        assert answers == int(ends), (at, event)


def test_pages_are_freed_only_on_proof_at_decode() -> None:
    proofs = {RE.QUIET_ALL, RE.OPERATOR_RELEASE, RE.ROW_ENDS}
    for (at, event), (_, actions) in RECEIVER.items():
        if RA.FREE in actions:
            assert event in proofs or at is R.SUCCESS, (at, event)


def test_prefill_says_drained_only_when_nothing_can_write() -> None:
    working = {S.STREAMING, S.FLUSHING}
    for (at, event), (_, actions) in SENDER.items():
        if SA.DRAINED in actions or SA.FREE in actions:
            assert at not in working or event is SE.WRITES_DONE, (at, event)


def test_a_terminal_status_crosses_from_every_live_state() -> None:
    for state in (S.ORPHAN, S.WAITING, S.ARMED, S.STREAMING, S.FLUSHING):
        assert SA.FAILED in SENDER[state, SE.CANCEL][1]
    for at in (R.ALLOCATING, R.GRANTED):
        for event in (RE.CANCEL, RE.PEER_FAILED, RE.PEER_GONE):
            assert RA.ABORT in RECEIVER[at, event][1]


@given(st.sampled_from(list(R)), st.sampled_from(list(RE)))
def test_a_missing_cell_is_late_and_changes_nothing_at_decode(state: R, event: RE) -> None:
    if (state, event) in RECEIVER:
        return
    world = Facing()
    receiver = Receiver(world.leg(5), 0.0, world.decode)
    receiver.state = state
    before = vars(receiver).copy()
    receiver.apply(event, cause=client_left("decode"))
    assert vars(receiver) == before
    assert [repr(effect) for effect in world.decode.out] == [f"Count(name='late', label='{state}/{event}')"]


@given(st.sampled_from(list(S)), st.sampled_from(list(SE)))
def test_a_missing_cell_is_late_and_changes_nothing_at_prefill(state: S, event: SE) -> None:
    if (state, event) in SENDER:
        return
    world = Facing()
    sender = Sender(world.leg(5).room, 0.0, world.prefill)
    sender.state = state
    before = vars(sender).copy()
    sender.apply(event, cause=client_left("prefill"))
    assert vars(sender) == before
    assert [repr(effect) for effect in world.prefill.out] == [f"Count(name='late', label='{state}/{event}')"]


@pytest.mark.parametrize(
    ("state", "landed", "failed", "poll"),
    [
        (R.QUEUED, False, False, KVPoll.BOOTSTRAPPING),
        (R.ALLOCATING, False, False, KVPoll.BOOTSTRAPPING),
        (R.GRANTED, False, False, KVPoll.WAITING_FOR_INPUT),
        (R.GRANTED, True, False, KVPoll.TRANSFERRING),
        (R.SUCCESS, True, False, KVPoll.SUCCESS),
        (R.GONE, True, False, KVPoll.SUCCESS),
        (R.DRAINING, True, True, KVPoll.FAILED),
        (R.QUARANTINE, True, True, KVPoll.FAILED),
        (R.GONE, True, True, KVPoll.FAILED),
    ],
)
def test_decodes_public_poll(state: R, landed: bool, failed: bool, poll: KVPoll) -> None:
    assert receiver_poll(state, landed=landed, failed=failed) is poll


@pytest.mark.parametrize(
    ("state", "wrote", "failed", "poll"),
    [
        (S.ORPHAN, False, False, KVPoll.BOOTSTRAPPING),
        (S.WAITING, False, False, KVPoll.BOOTSTRAPPING),
        (S.ARMED, False, False, KVPoll.WAITING_FOR_INPUT),
        (S.STREAMING, False, False, KVPoll.WAITING_FOR_INPUT),
        (S.STREAMING, True, False, KVPoll.TRANSFERRING),
        (S.FLUSHING, True, False, KVPoll.TRANSFERRING),
        (S.SENT, True, False, KVPoll.SUCCESS),
        (S.GONE, True, False, KVPoll.SUCCESS),
        (S.DRAINING, True, True, KVPoll.FAILED),
        (S.GONE, False, True, KVPoll.FAILED),
    ],
)
def test_prefills_public_poll(state: S, wrote: bool, failed: bool, poll: KVPoll) -> None:
    assert sender_poll(state, wrote=wrote, failed=failed) is poll


def test_nothing_is_granted_before_it_is() -> None:
    assert Receiver(Facing().leg(5), 0.0, Facing().decode).grant == NO_GRANT
