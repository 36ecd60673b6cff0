"""Control connections that fail in ways of their own: impossible addresses, doors that shut at once, deaf peers."""

from __future__ import annotations

import asyncio
import socket

import pytest

from pdplane.core.events import Accepted, ConnLost, ControlEndpoint, DialFailed, Dialled, Event
from pdplane.core.frames import Beat
from pdplane.core.ids import Instance, Rank
from pdplane.worker import control
from pdplane.worker.control import ControlNet

from .fleets import HOST, until

IMPOSSIBLE = {"a port": ControlEndpoint(HOST, 70_000), "a name": ControlEndpoint("x" * 70, 1)}


def net() -> tuple[ControlNet, list[Event]]:
    events: list[Event] = []
    return ControlNet(events.append, lambda name: None), events


@pytest.mark.parametrize("what", IMPOSSIBLE)
async def test_a_dial_to_an_impossible_address_fails_like_any_other(what: str) -> None:
    it, events = net()
    it.dial(IMPOSSIBLE[what], Rank())
    await until(lambda: bool(events))
    [failed] = events
    assert isinstance(failed, DialFailed)
    assert failed.endpoint == IMPOSSIBLE[what]
    assert failed.error


async def test_a_connection_that_is_lost_before_the_dial_was_told_is_a_dial_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener, _ = net()
    port = await listener.listen(HOST, 0, Rank())
    it, events = net()
    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def and_lose_it(*given: object, **more: object) -> object:
        transport, connection = await connect(*given, **more)  # type: ignore[call-overload]
        connection.connection_lost(None)
        return transport, connection

    monkeypatch.setattr(loop, "create_connection", and_lose_it)
    it.dial(ControlEndpoint(HOST, port), Rank())
    await until(lambda: bool(events) and isinstance(events[-1], DialFailed))
    await it.stop()
    await listener.stop()


async def test_a_closed_connection_does_not_wait_for_ever_for_a_peer_that_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "FLUSH_LIMIT_S", 0.01)
    it, events = net()
    port = await it.listen(HOST, 0, Rank())
    with socket.create_connection((HOST, port)) as deaf:
        await until(lambda: bool(events))
        [accepted] = events
        assert isinstance(accepted, Accepted)
        connection = it._conns[accepted.conn]
        transport = connection._transport
        assert transport is not None
        beat = Beat(src=Instance("x" * 100_000))
        while not transport.get_write_buffer_size():
            it.send(accepted.conn, beat)
        it.close(accepted.conn)
        await until(lambda: not transport.get_write_buffer_size())
        assert ConnLost(accepted.conn) not in events
        deaf.close()
    await it.stop()


async def test_every_rank_has_a_port_of_its_own_and_both_ends_say_whose_session_it_is() -> None:
    listener, accepted = net()
    dialler, dialled = net()
    ranks = [Rank(dp=1, tp=tp) for tp in range(2)]
    ports = [await listener.listen(HOST, 0, rank) for rank in ranks]
    assert len(set(ports)) == 2
    for port, rank in zip(ports, ranks, strict=True):
        dialler.dial(ControlEndpoint(HOST, port), rank)
    await until(lambda: len(accepted) == len(dialled) == 2)
    assert {event.here for event in accepted if isinstance(event, Accepted)} == set(ranks)
    assert {(event.endpoint.port, event.here) for event in dialled if isinstance(event, Dialled)} == set(
        zip(ports, ranks, strict=True)
    )
    await dialler.stop()
    await listener.stop()
