"""Faults that the simulator has found in the core, each as its shortest story."""

from __future__ import annotations

import pytest

from pdplane.core.decode import DecodeNode
from pdplane.core.effects import AnswerFailed, Effect, SendFrame
from pdplane.core.events import (
    ControlEndpoint,
    Dialled,
    Event,
    FrameIn,
    LegArrived,
    PagesLanded,
    RouteKnown,
    Tick,
)
from pdplane.core.frames import Grant, PromptId, Row, Success, Welcome
from pdplane.core.ids import ConnId, Instance, Rank, Rid, Room
from pdplane.core.node import Limits
from pdplane.core.session import Identity
from pdplane.sim.process import STAMP

ENDPOINT = ControlEndpoint("p0", 1)
PROMPT = PromptId(b"digest", 10)
P, D = Instance("p0#1"), Instance("d0#1")


class Decode:
    def __init__(self) -> None:
        self.node = DecodeNode(Identity(D, Rank(), STAMP), Limits(pages=8, page_size=4), fence=False)
        self.effects: list[Effect] = []

    def at(self, now: float, *events: Event) -> None:
        for event in events:
            self.effects += self.node.handle(event, now)

    def hand_off(self) -> None:
        """Up to SUCCESS, all pages landed."""
        leg = LegArrived(rid=Rid("a"), room=Room(5), prompt=PROMPT, max_new=4, deadline=300.0, address="p0")
        welcome = Welcome(src=P, dst=D, rank=Rank(), stamp=STAMP)
        route = RouteKnown("p0", ((Rank(), ENDPOINT),))
        self.at(0.0, leg, route, Dialled(ENDPOINT, ConnId(1)), FrameIn(ConnId(1), welcome))
        sent = [effect.frame for effect in self.effects if isinstance(effect, SendFrame)]
        (grant,) = [frame for frame in sent if isinstance(frame, Grant)]
        row = Row(first_token=1, prompt_tokens=10, prompt_digest=b"digest")
        success = Success(room=Room(5), grant=grant.grant, src=P, dst=D, rank=Rank(), row=row)
        self.at(0.1, PagesLanded(grant.grant, grant.pages), FrameIn(ConnId(1), success))

    @property
    def answers(self) -> list[str]:
        return [effect.cause.code for effect in self.effects if isinstance(effect, AnswerFailed)]


def test_a_handed_off_request_whose_pages_to_grow_went_into_quarantine_does_not_wait_for_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = Decode()
    monkeypatch.setattr(decode.node.reserve, "may_run", lambda owner: False)
    decode.hand_off()
    decode.at(59.0, Tick())
    assert decode.answers == []
    decode.at(60.2, Tick())
    assert decode.answers == ["overloaded"]
    assert decode.node.ledger.free_count == 8
    assert len(decode.node.reserve) == 0
