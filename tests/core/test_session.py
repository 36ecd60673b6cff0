"""Sessions on their own: HELLO, REJECT, silence, grace, redial; and what a stranger on the wire can do (nothing)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdplane.core.acceptor import Acceptor
from pdplane.core.dialler import Dialler, DState
from pdplane.core.effects import CloseConn, Dial, Effect, SendFrame
from pdplane.core.errors import Cause
from pdplane.core.events import ControlEndpoint, RouteKnown
from pdplane.core.frames import Abort, Beat, DataEndpoint, Frame, Hello, Reject, Welcome
from pdplane.core.ids import ConnId, GrantNo, Instance, Link, Rank, Room, Seat
from pdplane.core.layout import PROTOCOL_VERSION
from pdplane.core.membership import Membership
from pdplane.core.session import NO_CONN, Gone, SessionTimes, TurnedAway, Up
from pdplane.core.slices import whole_page

from .facing import STAMP, identity

AT = ControlEndpoint("p", 1)
TCP = DataEndpoint("tcp", "", "host", 9, "word")
D = identity("D1", secret="s", data=((TCP,),))
P = identity("P1", secret="s", data=((TCP,),))
SEAT = Seat(Instance("P1"), Rank())
WHOLE = whole_page(STAMP.page_bytes)
D1 = Link(Rank(), Seat(Instance("D1"), Rank()))
ONE, TWO = ConnId(1), ConnId(2)
HELLO: dict[str, Any] = {"src": "D1", "dst": "", "rank": Rank(), "stamp": STAMP, "secret": "s", "data": (TCP,)}


def dialler() -> tuple[Dialler, list[Effect]]:
    out: list[Effect] = []
    return Dialler(AT, Rank(), D, SessionTimes(), out, lambda: Beat(src=D.instance)), out


def acceptor() -> tuple[Acceptor, list[Effect]]:
    out: list[Effect] = []
    return Acceptor(P, SessionTimes(), out, lambda peer: Beat(src=P.instance, progress={1: len(peer)})), out


def welcome(src: str = "P1", **more: Any) -> Welcome:
    return Welcome(**({"src": Instance(src), "dst": D.instance, "rank": Rank(), "stamp": STAMP} | more))


def up_as(there: str) -> Up:
    return Up(Link(Rank(), Seat(Instance(there), Rank())), TCP, WHOLE)


def up() -> tuple[Dialler, list[Effect]]:
    it, out = dialler()
    it.want(0.0)
    it.dialled(ONE, 0.0)
    assert it.frame(welcome(), 0.0) == [up_as("P1")]
    out.clear()
    return it, out


def frames(out: list[Effect]) -> list[Frame]:
    return [effect.frame for effect in out if isinstance(effect, SendFrame)]


# --- the dialler ----------------------------------------------------------------------------------------------------


def test_the_first_hello_names_nobody_and_says_where_to_write() -> None:
    it, out = dialler()
    it.want(0.0)
    it.want(0.0)
    assert out == [Dial(AT, Rank())]
    it.dialled(ONE, 0.0)
    (hello,) = frames(out)
    assert isinstance(hello, Hello)
    assert (hello.dst, hello.data_host, hello.data_port, hello.data_token) == ("", "host", 9, "word")


def test_after_a_loss_hello_names_the_bound_instance() -> None:
    it, out = up()
    assert it.lost(1.0) == []
    assert out == [Dial(AT, Rank())]
    it.dialled(TWO, 1.0)
    (hello,) = frames(out)
    assert isinstance(hello, Hello)
    assert hello.dst == "P1"
    assert it.frame(welcome(), 1.5) == [up_as("P1")]
    assert it.tick(100.0) != [Gone(Instance("P1"))]


def test_the_grace_runs_from_the_first_loss_whatever_redials_do() -> None:
    it, _ = up()
    it.lost(1.0)
    for now in (1.1, 1.6, 2.2, 2.8):
        if it.state is DState.DIALLING:
            it.dial_failed("refused", now)
        assert it.tick(now) == []
    assert it.tick(3.0) == [Gone(Instance("P1"))]
    assert it.bound is None
    assert it.was == Link(Rank(), SEAT)


def test_redials_back_off() -> None:
    it, out = up()
    it.lost(0.0)
    now, dials = 0.0, 0
    while now < 1.9:
        if it.state is DState.DIALLING:
            dials += 1
            it.dial_failed("refused", now)
        now += 0.01
        it.tick(now)
    assert 4 <= dials <= 8
    assert out.count(Dial(AT, Rank())) in (dials, dials + 1)


def test_silence_closes_the_session() -> None:
    it, out = up()
    assert it.tick(4.9) == []
    assert it.up
    it.tick(5.0)
    assert CloseConn(ONE) in out
    assert not it.up
    assert it.tick(7.0) == [Gone(Instance("P1"))]


def test_every_frame_is_a_sign_of_life() -> None:
    it, _ = up()
    for now in (3.0, 6.0, 9.0):
        it.frame(Beat(src=Instance("P1")), now)
        it.tick(now + 1.0)
    assert it.up


def test_beats_go_out_at_their_rate() -> None:
    it, out = up()
    for tenth in range(1, 81):
        it.frame(Beat(src=Instance("P1")), tenth / 10)
        it.tick(tenth / 10)
    assert len(frames(out)) == 4


def test_a_listener_that_never_answers_is_given_up() -> None:
    it, _ = dialler()
    it.want(0.0)
    it.dialled(ONE, 0.0)
    (refused,) = it.tick(5.0)
    assert isinstance(refused, TurnedAway)
    assert refused.cause.code == "prefill_unreachable"
    assert it.state is DState.IDLE


def test_a_reject_by_the_successor_ends_the_old_one_and_dials_anew() -> None:
    it, out = up()
    it.lost(1.0)
    it.dialled(TWO, 1.0)
    out.clear()
    reject = Reject(src=Instance("P2"), cause=Cause("wrong_instance", "not here", 503))
    assert it.frame(reject, 1.1) == [Gone(Instance("P1"))]
    assert out == [CloseConn(TWO), Dial(AT, Rank())]
    it.dialled(ConnId(3), 1.1)
    assert frames(out)[-1].dst == ""  # type: ignore[union-attr]


def test_a_welcome_by_another_instance_ends_the_old_one_first() -> None:
    it, _ = up()
    it.lost(1.0)
    it.dialled(TWO, 1.0)
    assert it.frame(welcome("P2"), 1.1) == [Gone(Instance("P1")), up_as("P2")]


def test_a_welcome_for_somebody_else_is_refused() -> None:
    it, out = dialler()
    it.want(0.0)
    it.dialled(ONE, 0.0)
    (refused,) = it.frame(welcome(dst=Instance("D9")), 0.0)
    assert isinstance(refused, TurnedAway)
    assert out[-1] == CloseConn(ONE)
    assert not it.up


def test_a_welcome_with_another_layout_is_refused_with_both_values() -> None:
    it, _ = dialler()
    it.want(0.0)
    it.dialled(ONE, 0.0)
    (refused,) = it.frame(welcome(stamp=msgspec.structs.replace(STAMP, page_size=32)), 0.0)
    assert isinstance(refused, TurnedAway)
    assert "page_size" in refused.cause.message
    assert "32" in refused.cause.message
    assert "16" in refused.cause.message


def test_a_connection_nobody_asked_for_is_closed() -> None:
    it, out = up()
    it.dialled(TWO, 1.0)
    assert out == [CloseConn(TWO)]
    assert it.conn == ONE


# --- the acceptor ---------------------------------------------------------------------------------------------------


def greeted(conn: ConnId = ONE, **more: Any) -> tuple[Acceptor, list[Effect]]:
    it, out = acceptor()
    it.accepted(conn, Rank(), 0.0)
    it.frame(conn, Hello(**(HELLO | more)), 0.0)
    return it, out


def test_a_hello_is_welcomed_and_the_session_is_up() -> None:
    it, out = greeted()
    assert isinstance(frames(out)[0], Welcome)
    assert it.conn_of(D1) == ONE
    assert it.link_of(ONE) == D1


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"dst": "P0"}, "wrong_instance"),
        ({"secret": "guess"}, "unauthorized"),
        ({"protocol_min": PROTOCOL_VERSION + 1, "protocol_max": PROTOCOL_VERSION + 2}, "incompatible"),
        ({"stamp": msgspec.structs.replace(STAMP, weights="w2")}, "incompatible"),
        ({"stamp": msgspec.structs.replace(STAMP, policy="prefill_complete")}, "incompatible"),
    ],
)
def test_a_hello_that_does_not_fit_is_rejected_and_closed(more: dict[str, Any], code: str) -> None:
    it, out = greeted(**more)
    (reject,) = frames(out)
    assert isinstance(reject, Reject)
    assert (reject.src, reject.cause.code) == ("P1", code)
    assert out[-1] == CloseConn(ONE)
    assert it.sessions == 0
    assert it.next_due() is None


def test_whoever_speaks_before_hello_is_turned_away() -> None:
    it, out = acceptor()
    it.accepted(ONE, Rank(), 0.0)
    frame = Abort(
        room=Room(1), grant=GrantNo(1), src=Instance("D1"), dst=Instance("P1"), rank=Rank(), cause=Cause("x", "x")
    )
    assert it.frame(ONE, frame, 0.0) == []
    assert out[-1] == CloseConn(ONE)
    assert it.link_of(ONE) is None


def test_a_stranger_that_never_greets_is_closed() -> None:
    it, out = acceptor()
    it.accepted(ONE, Rank(), 0.0)
    assert it.tick(5.0) == []
    assert out == [CloseConn(ONE)]
    assert it.next_due() is None


def test_the_newest_connection_of_an_instance_wins() -> None:
    it, out = greeted()
    it.accepted(TWO, Rank(), 1.0)
    notices = it.frame(TWO, Hello(**(HELLO | {"dst": "P1"})), 1.0)
    assert notices == [up_as("D1")]
    assert CloseConn(ONE) in out
    it.lost(ONE, 1.0)
    assert it.conn_of(D1) == TWO
    assert it.tick(4.0) == []


def test_a_session_cannot_change_its_owner() -> None:
    it, out = greeted()
    it.frame(ONE, Hello(**(HELLO | {"src": "D2"})), 1.0)
    assert out[-1] == CloseConn(ONE)
    assert it.sessions == 0
    assert it.tick(3.0) == [Gone(Instance("D1"))]


def test_a_second_hello_that_does_not_fit_ends_the_session() -> None:
    it, _ = greeted()
    it.frame(ONE, Hello(**(HELLO | {"secret": "guess"})), 1.0)
    assert it.conn_of(D1) == NO_CONN
    assert it.tick(3.0) == [Gone(Instance("D1"))]


def test_a_guest_lost_has_its_grace_and_is_gone_once() -> None:
    it, _ = greeted()
    it.lost(ONE, 1.0)
    assert it.conn_of(D1) == NO_CONN
    assert it.tick(2.9) == []
    assert it.tick(3.0) == [Gone(Instance("D1"))]
    assert it.tick(9.0) == []


def test_a_guest_back_in_time_is_not_gone() -> None:
    it, _ = greeted()
    it.lost(ONE, 1.0)
    it.accepted(TWO, Rank(), 2.0)
    it.frame(TWO, Hello(**(HELLO | {"dst": "P1"})), 2.0)
    assert it.tick(4.0) == []


def test_silence_of_a_guest_is_a_loss() -> None:
    it, out = greeted()
    it.tick(5.0)
    assert CloseConn(ONE) in out
    assert it.tick(7.0) == [Gone(Instance("D1"))]


def test_beats_of_the_acceptor_are_for_each_peer() -> None:
    it, out = greeted()
    out.clear()
    it.frame(ONE, Beat(src=Instance("D1")), 1.9)
    it.tick(2.0)
    (beat,) = frames(out)
    assert isinstance(beat, Beat)
    assert beat.progress == {1: 2}


# --- what is remembered of others -----------------------------------------------------------------------------------


def membership() -> Membership:
    return Membership(D, SessionTimes(), [], lambda: Beat(src=D.instance))


def test_a_registry_that_does_not_answer_is_forgotten() -> None:
    members = membership()
    for number in range(3):
        assert members.seek(f"nowhere:{number}", Room(number + 1), None, 0.0) is None
        assert members.failed(f"nowhere:{number}") == [Room(number + 1)]
    assert members.groups == {}


def test_an_endpoint_that_a_registry_no_longer_names_is_forgotten_once_nobody_is_there() -> None:
    members = membership()
    for port in range(1, 4):
        members.seek("registry:1", Room(port), None, 0.0)
        at = ControlEndpoint("p", port)
        members.known(RouteKnown("registry:1", ((Rank(), at),)), 0.0)
        dialler = members.diallers[at, Rank()]
        assert dialler.dial_failed("refused", 0.0)
        members.refused(dialler)
    assert list(members.diallers) == [(ControlEndpoint("p", 3), Rank())]


def test_an_endpoint_whose_dial_is_under_way_is_not_forgotten() -> None:
    members = membership()
    for port in range(1, 3):
        members.seek("registry:1", Room(1), None, 0.0)
        members.groups["registry:1"].looking = True
        members.known(RouteKnown("registry:1", ((Rank(), ControlEndpoint("p", port)),)), 0.0)
    assert [dialler.state for dialler in members.diallers.values()] == [DState.DIALLING] * 2
