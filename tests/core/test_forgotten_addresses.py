"""Handles name addresses, and anybody may send one: what led nowhere is forgotten."""

from __future__ import annotations

from pdplane.core.effects import AnswerFailed, Dial
from pdplane.core.events import ControlEndpoint, DialFailed, Handle, RequestArrived
from pdplane.core.frames import PromptId
from pdplane.core.ids import HoldNo, Instance, PageId, Rank, Rid, Shape
from pdplane.core.membership import KEPT_IDLE
from pdplane.core.node import Limits
from pdplane.core.params_decode import ParamsDecodeNode
from pdplane.core.session import Identity
from pdplane.sim.process import STAMP

PROMPT = PromptId(b"digest", 4)


def _asks(number: int) -> RequestArrived:
    handle = Handle(
        instance=Instance(f"P{number}"),
        hold=HoldNo(1),
        pages=(PageId(0),),
        prompt=PROMPT,
        endpoints=((Rank(), ControlEndpoint(f"h{number}", 1)),),
        shape=Shape(),
        dp=0,
        lease_s=30.0,
    )
    return RequestArrived(rid=Rid(f"d{number}"), prompt=PROMPT, max_new=2, deadline=300.0, handle=handle)


def test_addresses_that_nobody_answers_at_are_kept_for_a_while_and_not_without_end() -> None:
    node = ParamsDecodeNode(Identity(Instance("D"), STAMP), Limits(pages=8, page_size=4))
    failed = 0
    for number in range(4 * KEPT_IDLE):
        effects = node.handle(_asks(number), float(number))
        dials = [effect for effect in effects if isinstance(effect, Dial)]
        while dials:  # what the handle names, and where a RELEASE is owed to
            effects = node.handle(DialFailed(dials[0].endpoint, dials[0].here, "refused"), float(number))
            failed += sum(isinstance(effect, AnswerFailed) for effect in effects)
            dials = [effect for effect in effects if isinstance(effect, Dial)]
    assert failed == 4 * KEPT_IDLE
    assert len(node.pull.members.groups) <= KEPT_IDLE + 2
    assert len(node.pull.members.diallers) <= KEPT_IDLE + 2
