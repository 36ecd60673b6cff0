"""The record says on each side when a request's pages began to move and when they were free."""

from __future__ import annotations

from pdplane.core.effects import Note

from .facing import Box, Facing


def noted(side: Box, rid: str) -> list[str]:
    return [note.state for note in side.all(Note) if note.rid == rid and note.state in ("moving", "freed")]


def test_a_whole_hand_off_moves_once_and_frees_at_prefill_while_decode_runs() -> None:
    world = Facing()
    world.run_to_batch(5)
    assert noted(world.p, "r5") == ["moving", "freed"]
    assert noted(world.d, "r5") == []


def test_a_cancel_frees_at_decode_by_its_fence_and_at_prefill_when_the_step_returns() -> None:
    world = Facing(fence=True)
    world.meet(5)
    world.cancel(world.d, 5)
    world.pump()
    assert noted(world.d, "r5") == ["freed"]
    assert noted(world.p, "r5") == []
    world.release(5)
    assert noted(world.p, "r5") == ["freed"]
