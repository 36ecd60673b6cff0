"""Faults that the simulator has found in the core, each as its shortest story."""

from __future__ import annotations

import pytest

from pdplane.core.batch import Batch
from pdplane.core.effects import AnswerFailed, Dial, Effect, SendFrame
from pdplane.core.errors import Cause
from pdplane.core.events import (
    ConnLost,
    ControlEndpoint,
    DialFailed,
    Dialled,
    Event,
    FrameIn,
    LegArrived,
    PagesLanded,
    RankKnown,
    ReleaseHold,
    RouteKnown,
    Tick,
)
from pdplane.core.frames import DataEndpoint, Grant, Hello, PromptId, Row, Success, Welcome
from pdplane.core.ids import ConnId, Instance, Link, Rank, Rid, Room, Seat, Shape
from pdplane.core.node import Limits
from pdplane.core.rooms.decode import DecodeNode
from pdplane.core.session import Identity
from pdplane.sim.process import KIND, STAMP

from ..core.facing_params import FacingParams

HERE = Rank()
ENDPOINT = ControlEndpoint("p0", 1)
PROMPT = PromptId(b"digest", 10)
P, D = Instance("p0#1"), Instance("d0#1")
LINK = Link(HERE, Seat(P, Rank()))


class Decode:
    def __init__(self) -> None:
        me = Identity(D, STAMP, data=((DataEndpoint(KIND),),))
        self.node = DecodeNode(me, Limits(pages=8, page_size=4), fenced=frozenset())
        self.effects: list[Effect] = []

    def at(self, now: float, *events: Event) -> None:
        for event in events:
            self.effects += self.node.handle(event, now)

    def leg(self, room: int = 5, **more: object) -> LegArrived:
        rid = Rid(f"a{room}")
        return LegArrived(rid=rid, room=Room(room), prompt=PROMPT, max_new=4, deadline=300.0, address="p0", **more)  # type: ignore[arg-type]

    def welcome(self, rank: Rank, shape: Shape) -> Welcome:
        return Welcome(src=P, dst=D, rank=rank, stamp=STAMP, protocol=2, shape=shape, data_kind=KIND)

    def hand_off(self) -> None:
        """Up to SUCCESS, all pages landed."""
        route = RouteKnown("p0", ((Rank(), ENDPOINT),))
        conn = ConnId(1)
        self.at(0.0, self.leg(), route, Dialled(ENDPOINT, HERE, conn), FrameIn(conn, self.welcome(HERE, Shape())))
        sent = [effect.frame for effect in self.effects if isinstance(effect, SendFrame)]
        (grant,) = [frame for frame in sent if isinstance(frame, Grant)]
        row = Row(first_token=1, prompt_tokens=10, prompt_digest=b"digest")
        success = Success(room=Room(5), grant=grant.grant, src=P, dst=D, rank=Rank(), row=row)
        self.at(0.1, PagesLanded(grant.grant, LINK, grant.pages), FrameIn(conn, success))

    @property
    def answers(self) -> list[str]:
        return [effect.cause.code for effect in self.effects if isinstance(effect, AnswerFailed)]

    @property
    def dialled(self) -> list[int]:
        return [effect.endpoint.port for effect in self.effects if isinstance(effect, Dial)]


def test_a_handed_off_request_waits_for_its_place_as_long_as_its_deadline_lets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompt is computed: a 429 now would throw that away. Who may be handed off is bounded at the door."""
    monkeypatch.setattr(Batch, "full", property(lambda self: True))
    decode = Decode()
    decode.hand_off()
    decode.at(299.0, Tick())
    assert decode.answers == []
    decode.at(300.2, Tick())
    assert decode.answers == ["deadline"]
    assert decode.node.ledger.free_count == 8
    assert len(decode.node.reserve) == 0


TWO = Shape(tp=2)
OLD = tuple((Rank(tp=tp), ControlEndpoint("p0", 1 + tp)) for tp in range(2))
NEW = tuple((Rank(tp=tp), ControlEndpoint("p0", 17 + tp)) for tp in range(2))


def _gone_while_one_rank_is_dialled(decode: Decode) -> None:
    """Prefill of two ranks is met; both sessions are lost, and the grace ends while rank 0 is being dialled again.
    A new route names other ports."""
    decode.at(0.0, decode.leg(), RouteKnown("p0", OLD, TWO))
    for tp, (rank, endpoint) in enumerate(OLD):
        conn = ConnId(1 + tp)
        decode.at(0.1, Dialled(endpoint, HERE, conn), FrameIn(conn, decode.welcome(rank, TWO)))
    decode.at(1.0, ConnLost(ConnId(1)), ConnLost(ConnId(2)))
    decode.at(4.0, Tick())
    decode.at(4.1, decode.leg(room=6), RouteKnown("p0", NEW, TWO))
    assert decode.dialled == [1, 2, 1, 2, 17, 18]


def test_a_dial_may_fail_after_its_instance_was_given_up_and_its_endpoint_forgotten() -> None:
    decode = Decode()
    _gone_while_one_rank_is_dialled(decode)
    decode.at(4.2, DialFailed(OLD[0][1], HERE, "refused"))
    assert decode.answers == ["peer_gone"]


def test_a_dial_that_is_out_when_its_instance_is_given_up_is_asked_who_it_is() -> None:
    decode = Decode()
    _gone_while_one_rank_is_dialled(decode)
    decode.effects.clear()
    decode.at(4.2, Dialled(OLD[0][1], HERE, ConnId(9)))
    (hello,) = [effect.frame for effect in decode.effects if isinstance(effect, SendFrame)]
    assert isinstance(hello, Hello)
    assert hello.dst == ""


def test_a_room_whose_rank_is_told_later_is_refused_where_the_route_lacks_a_part_of_it() -> None:
    decode = Decode()
    shape = Shape(dp=2, tp=2)
    ranks = [(Rank(dp=dp, tp=tp), ControlEndpoint(f"p{dp}", 1 + tp)) for dp in range(2) for tp in range(2)]
    decode.at(0.0, decode.leg(), RouteKnown("p0", tuple(ranks[:3]), shape, follow_room=False))
    decode.at(0.1, Tick())
    decode.at(0.2, RankKnown("p0", Room(5), 1))
    assert decode.answers == ["prefill_not_ready"]


def test_a_hold_that_is_taken_back_under_its_reader_says_so_at_once() -> None:
    """Its reader, whose moves were dropped, had waited for its next renewal: five seconds, with all pages reserved."""
    world = FacingParams()
    world.hold(1)
    world.read(1)
    world.p.take(ReleaseHold(Rid("p1"), Cause("aborted", "by its name", 499)))
    world.pump()
    assert world.d.failed("d1").code == "aborted"
    assert world.d.free == world.p.free == 16
