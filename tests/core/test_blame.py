"""A cause names the side to avoid: the peer that is gone or deaf, not the one who missed it."""

from __future__ import annotations

from pdplane.core.rooms.table import S

from .facing import Facing


def test_decode_blames_the_prefill_that_is_gone_and_prefill_the_decode() -> None:
    world = Facing()
    world.meet(5)
    world.cut(reachable=False)
    world.wait(3.0)
    assert (world.d.failed("r5").code, world.d.failed("r5").side) == ("peer_gone", "prefill")
    assert (world.p.failed("r5").code, world.p.failed("r5").side) == ("peer_gone", "decode")


def test_decode_blames_a_prefill_that_cannot_be_reached() -> None:
    world = Facing()
    world.reachable = False
    world.meet(5)
    assert (world.d.failed("r5").code, world.d.failed("r5").side) == ("prefill_unreachable", "prefill")


def test_decode_blames_a_prefill_that_shows_no_progress() -> None:
    world = Facing()
    world.meet(5)
    assert world.p_state(5) is S.STREAMING
    world.wait(70.0)
    assert (world.d.failed("r5").code, world.d.failed("r5").side) == ("no_progress", "prefill")
