"""What prefill's answer becomes in a router's hands: a handle, as decode's edge reads it, whole or tampered with."""

from __future__ import annotations

from typing import Protocol

import msgspec

from pdplane.core.attempts import HANDOFF, Failure
from pdplane.core.effects import AnswerHeld
from pdplane.core.errors import Cause
from pdplane.core.events import ControlEndpoint, Handle
from pdplane.core.frames import PromptId
from pdplane.core.ids import HoldNo, Instance, PageId, Rank

from .drawn import Plan

HOLD_LOST = frozenset({"spent", "expired", "unknown_hold", "wrong_instance"})
"""Decode's word that prefill does not hold any more what it answered: another hand-off may go well."""


class Answering(Protocol):
    name: str
    instance: Instance
    dp: int
    first_port: int


def answered(who: Answering, answer: AnswerHeld, prompt: PromptId, plan: Plan) -> Handle:
    shape = plan.shape_of("prefill")
    ranks = [(Rank(dp=who.dp, tp=tp), ControlEndpoint(who.name, who.first_port + tp)) for tp in range(shape.tp)]
    return Handle(
        instance=who.instance,
        hold=answer.hold,
        pages=answer.pages,
        prompt=prompt,
        endpoints=tuple(ranks),
        shape=shape,
        dp=who.dp,
        lease_s=answer.lease_s,
        rid=answer.rid,
    )


def tampered(handle: Handle, how: str, prompt: PromptId) -> Handle:
    """`prompt`: of the leg that will bring it."""
    match how:
        case "blocks":
            pages = tuple(reversed(handle.pages)) if len(handle.pages) > 1 else (PageId(handle.pages[0] + 1),)
            return msgspec.structs.replace(handle, pages=pages)
        case "digest":
            return msgspec.structs.replace(handle, prompt=prompt)
        case "hold":
            return msgspec.structs.replace(handle, hold=HoldNo(handle.hold + 1))
        case "instance":
            return msgspec.structs.replace(handle, instance=Instance(f"{handle.instance} before"))
        case _:
            return handle


def lost_hold(cause: Cause) -> Failure | None:
    """How the router takes decode's word on a handle; None where it is like any other word."""
    if cause.code not in HOLD_LOST:
        return None
    return Failure(cause=msgspec.structs.replace(cause, retryable=True), blames=HANDOFF)
