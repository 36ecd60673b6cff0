"""Rooms that a decode asks for and no leg comes for: bounded, answered, and never in the way of others."""

from __future__ import annotations

from pdplane.core.events import FrameIn
from pdplane.core.frames import Announce, Drained, Failed
from pdplane.core.ids import ConnId, Link, Rank, Room, Seat

from .facing import Facing, limits


def test_a_decode_that_asks_without_end_is_answered_and_costs_no_memory() -> None:
    world = Facing(p_limits=limits(max_queue=4))
    world.meet(1)
    prefill, decode = world.prefill, world.decode
    conn = prefill.sessions.conn_of(Link(Rank(), Seat(decode.instance, Rank())))
    for number in range(100, 110):
        world.p.take(FrameIn(conn, announce(world, number)))
    orphans = [room for room in prefill.rooms.live if room >= 100]
    assert len(orphans) == 4
    refused = [frame for frame in world.p.sent(Failed) if frame.room >= 104]
    assert {frame.cause.code for frame in refused} == {"overloaded"}
    assert {frame.room for frame in world.p.sent(Drained)} >= {Room(number) for number in range(104, 110)}


def test_orphans_that_end_make_room_for_others() -> None:
    world = Facing(p_limits=limits(max_queue=1))
    world.meet(1)
    conn = world.prefill.sessions.conn_of(Link(Rank(), Seat(world.decode.instance, Rank())))
    world.p.take(FrameIn(conn, announce(world, 100)))
    world.wait(world.prefill.limits.peer_wait_s + 1)
    world.p.take(FrameIn(ConnId(conn), announce(world, 101)))
    assert Room(101) in world.prefill.rooms.live


def announce(world: Facing, number: int) -> Announce:
    return Announce(room=Room(number), src=world.decode.instance, dst=world.prefill.instance, rank=Rank())
