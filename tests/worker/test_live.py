"""How far an abort may go at once, by where its request is."""

from __future__ import annotations

import pytest

from pdplane.core.ids import Rid
from pdplane.worker.live import Abort, Live

A, B = Rid("a"), Rid("b")


def live(*seen: Rid) -> Live:
    """With these, which the engine has seen."""
    it = Live()
    for rid in seen:
        it.add(rid)
        assert it.see(rid)
    return it


def test_what_the_engine_has_not_seen_is_dropped_at_once_and_never_seen() -> None:
    it = Live()
    it.add(A)
    assert it.abort(A) is Abort.UNSEEN
    assert len(it) == 0
    assert not it.see(A)
    assert it.abort(A) is Abort.NOT_LIVE


def test_what_the_engine_has_is_marked_until_it_is_dropped() -> None:
    it = live(A, B)
    assert it.abort(A) is Abort.WITH_ENGINE
    assert (it.aborted(A), it.aborted(B), it.any_aborted) == (True, False, True)
    assert not it.pick_up(A)
    it.drop(A)
    assert (len(it), it.any_aborted) == (1, False)


def test_what_is_in_hand_is_ended_by_whoever_puts_it_down() -> None:
    it = live(A, B)
    assert it.pick_up(A)
    assert it.abort(B) is Abort.WITH_ENGINE
    assert it.abort(A) is Abort.IN_HAND
    assert it.put_down() == A
    assert it.put_down() is None


def test_what_is_put_down_unharmed_is_nobodys_end() -> None:
    it = live(A)
    assert it.pick_up(A)
    assert it.put_down() is None
    assert it.abort(A) is Abort.WITH_ENGINE


def test_what_has_ended_or_waits_still_cannot_be_picked_up() -> None:
    it = live(A)
    it.drop(A)
    it.add(B)
    assert not it.pick_up(A)
    assert not it.pick_up(B)


def test_a_live_rid_cannot_be_added_again_and_none_once_closed() -> None:
    it = live(A)
    with pytest.raises(ValueError, match="'a' is already running"):
        it.add(A)
    it.close()
    with pytest.raises(RuntimeError, match="stopping"):
        it.add(B)
    assert it.give_up() == [A]
    assert len(it) == 0
