"""The legs that a simulated router sends: whose they are, what they carry, and what a worker's edge makes of them."""

from __future__ import annotations

import hashlib
from typing import Protocol

import msgspec

from pdplane.core.attempts import DECODE, RequestAttempts, Side
from pdplane.core.errors import Cause
from pdplane.core.events import Event, Handle, JobArrived, LegArrived, RequestArrived
from pdplane.core.frames import PromptId
from pdplane.core.ids import Rid, Room
from pdplane.core.layout import PARAMS

from .content import Work
from .drawn import Plan, Request
from .handles import Answering

OTHER_PROMPT = 1_000_000


class Worker(Answering, Protocol):
    alive: bool

    def post(self, event: Event) -> None: ...


class Leg(msgspec.Struct, eq=False):
    """One leg of one attempt. `worker` is a life: a successor on the same address never gets it."""

    client: Client
    attempt: int
    side: Side
    rid: Rid
    room: Room
    worker: Worker
    refused_at_edge: bool
    sent: bool = False
    arrived: bool = False
    closed: bool = False
    heard_at: float = 0.0
    handle: Handle | None = None  # what decode's leg brings
    again: bool = False  # with a handle that went out before: nobody waits for it


class Client(msgspec.Struct, eq=False):
    """One request: its machine, its legs, and what it came to."""

    request: Request
    machine: RequestAttempts
    arrived_at: float
    legs: dict[Side, Leg] = {}
    rids: list[Rid] = []
    room: Room | None = None
    serial: int = 0
    handle: Handle | None = None  # of this attempt
    lease_ends: float = 0.0
    finished_at: float | None = None
    verdict: Cause | None = None
    replied: bool = False
    done: bool = False


def work_of(leg: Leg, plan: Plan) -> Work:
    request, aggregated = leg.client.request, leg.client.machine.prefill is None
    return Work(
        leg.rid,
        leg.room,
        leg.client.serial,
        request.prompt_tokens,
        request.max_new,
        request.stops_at,
        breaks_here=request.breaks_at == leg.side,
        prompt=_prompt(leg) if plan.dialect == PARAMS else request.prompt,
        family=request.family,
        family_tokens=request.family_tokens,
        marked_by_prompt=plan.shares_prefixes and not aggregated,
    )


def prompt_of(leg: Leg) -> PromptId:
    """Of the prompt that this leg carries."""
    return prompt_id(_prompt(leg), leg.client.request.prompt_tokens)


def prompt_id(prompt: int, tokens: int) -> PromptId:
    return PromptId(hashlib.blake2b(prompt.to_bytes(4, "little"), digest_size=16).digest(), tokens)


def _prompt(leg: Leg) -> int:
    request = leg.client.request
    differs = request.prompts_differ or request.tampers == "digest"
    return request.prompt + (OTHER_PROMPT if leg.side == DECODE and differs else 0)


def event_of(leg: Leg, plan: Plan, work: Work, now: float) -> LegArrived | JobArrived | RequestArrived:
    """As it reaches the worker's core, by the kind of worker and the dialect."""
    request, client = leg.client.request, leg.client
    deadline_at = now + max(0.001, client.arrived_at + request.deadline_s - now)
    if client.machine.prefill is None:
        return JobArrived(
            rid=leg.rid,
            prompt_tokens=request.prompt_tokens,
            max_new=request.max_new,
            deadline=deadline_at,
            priority=request.priority,
        )
    if plan.dialect == PARAMS:
        return RequestArrived(
            rid=leg.rid,
            prompt=prompt_of(leg),
            max_new=request.max_new if leg.side == DECODE else 1,
            deadline=deadline_at,
            priority=request.priority,
            page_keys=work.page_keys,
            handle=leg.handle,
        )
    return _leg_of_a_room(leg, client.machine.prefill, plan, work, deadline_at)


def _leg_of_a_room(leg: Leg, prefill: str, plan: Plan, work: Work, deadline_at: float) -> LegArrived:
    request, decode = leg.client.request, leg.side == DECODE
    rank = plan.dp_of(prefill) + request.wrong_rank
    return LegArrived(
        rid=leg.rid,
        room=leg.room,
        prompt=prompt_of(leg),
        max_new=request.max_new,
        deadline=deadline_at,
        priority=request.priority,
        address=f"{'group' if plan.dp else prefill}:registry" if decode else "",
        dp_rank=rank % 2 if decode and (plan.names_rank or request.wrong_rank) else None,
        page_keys=work.page_keys,
    )
