"""A fault that a real system has had, as a scenario: one small world of the production core, and two sets of rules.

Under its own rules nothing may break. Under the rules that had the hole the same world must break the rule named: that
is how it is known that the scenario brings the fault about, and that the checker sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from pdplane.core.layout import EARLY, PARAMS
from pdplane.core.node import Limits

from ..content import PAGE_SIZE
from ..coverage import Reached
from ..drawn import Plan, Request
from ..faults import Fault
from ..run import Outcome, run_plan

PATTERN = "incident"
ROOMY = 32  # pages


class Incident(msgspec.Struct, frozen=True):
    """`number` is the one of docs/incidents.md. `holed`: rules with the hole; `breaks`: the rule they break here.
    `reaches`: what of coverage.py the world must have reached under our own rules, or it has shown nothing."""

    number: str
    story: str
    world: Plan
    holed: Callable[[ExitStack], None]
    breaks: str
    reaches: tuple[str, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """What became of an incident under both sets of rules."""

    incident: Incident
    ours: Outcome
    theirs: Outcome

    @property
    def missed(self) -> list[str]:
        """What the world should have reached, and did not."""
        reached: Reached = Reached(self.ours.reached)
        return [name for name in self.incident.reaches if not reached[name]]

    @property
    def as_it_should_be(self) -> bool:
        broken = self.theirs.violation.partition(": ")[0]
        return not self.ours.violation and not self.missed and broken == self.incident.breaks


def judge(incident: Incident) -> Verdict:
    ours = run_plan(incident.world, coverage=True)
    with ExitStack() as stack:
        incident.holed(stack)
        theirs = run_plan(incident.world)
    return Verdict(incident, ours, theirs)


def request(number: int, at_s: float = 0.0, *, tokens: int = 12, max_new: int = 4, **more: object) -> Request:
    """A prompt of its own, that shares nothing. `more`: any field of plan.Request."""
    drawn = Request(
        number=number,
        at_s=at_s,
        prompt=number,
        prompt_tokens=tokens,
        max_new=max_new,
        stops_at=max_new,
        leaves_after_s=None,
        deadline_s=300.0,
        family=number,
    )
    return msgspec.structs.replace(drawn, **more)


def world(
    requests: Sequence[Request],
    faults: Sequence[Fault] = (),
    *,
    seed: int = 0,
    decodes: int = 1,
    lease_s: float = 30.0,
    prefill_pages: int = ROOMY,
    running: int = 8,
    retries: int = 0,
    router_tells: bool = True,
    prefix_cache: bool = False,
) -> Plan:
    """One prefill, `decodes` decodes, a swift network. `running`: requests in a decode's batch at once."""
    limits = Limits(pages=ROOMY, page_size=PAGE_SIZE, max_running=8, reserve_tokens=0, prefix_cache=prefix_cache)
    return Plan(
        seed=seed,
        pattern=PATTERN,
        patterns=(PATTERN,),
        fence=True,
        teardown_proves=True,
        policy=EARLY,
        tp=(1, 1),
        dp=False,
        follow_room=False,
        names_rank=False,
        aborts_again=False,
        new_ports=False,
        aggregated=(),
        prefills=("p0",),
        decodes=tuple(f"d{number}" for number in range(decodes)),
        prefill_limits=msgspec.structs.replace(limits, pages=prefill_pages, hold_term_s=lease_s),
        decode_limits=msgspec.structs.replace(limits, max_running=running),
        prefill_step=1.0,
        delay_s=(0.0005, 0.002),
        hop_s=(0.0005, 0.002),
        router_tells=router_tells,
        retries=retries,
        requests=tuple(requests),
        faults=tuple(faults),
        dialect=PARAMS,
    )
