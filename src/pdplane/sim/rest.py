"""What is left when a fleet has come to rest: nothing of any request, and every page accounted for."""

from __future__ import annotations

from collections.abc import Sequence

from pdplane.core.aggregated import AggregatedNode
from pdplane.core.layout import EARLY
from pdplane.core.pages import Page
from pdplane.core.params.decode import ParamsDecodeNode
from pdplane.core.params.prefill import ParamsPrefillNode
from pdplane.core.rooms.prefill import PrefillNode
from pdplane.core.rooms.receiver import Receiver
from pdplane.core.rooms.sender import Sender

from .checkers import Violation, Watched
from .drawn import Plan
from .params_rest import params_at_rest


def conservation(who: Watched) -> None:
    if faults := who.node.audit_all():
        raise Violation("conservation", f"{who.instance}: {'; '.join(faults)}")


def quarantine_allowed(plan: Plan) -> bool:
    """Only a process that never comes back leaves pages without a proof, and only where there is no local fence, and
    cutting it off proves nothing."""
    return plan.crashes and not plan.fence and not plan.teardown_proves


def starved_s(plan: Plan) -> float:
    """Where decode lacks pages for good, KV that is computed ahead is held for its whole term, one after the other."""
    ahead = quarantine_allowed(plan) and plan.policy != EARLY
    return plan.prefill_limits.hold_term_s * len(plan.requests) if ahead else 0.0


def at_rest(who: Watched, plan: Plan) -> None:
    """Nothing of any request is left on a living process, tombstones apart."""
    node, name = who.node, who.instance
    if isinstance(node, (ParamsPrefillNode, ParamsDecodeNode)):
        params_at_rest(name, node)
        return
    machines: list[Receiver | Sender] = [] if isinstance(node, AggregatedNode) else [*node.rooms.live.values()]
    stuck = [machine for machine in machines if machine.state != "Quarantine"]
    if stuck:
        states = ", ".join(f"room {machine.room} {machine.state}" for machine in stuck)
        raise Violation("rest", f"{name} still has {states}")
    if machines and not quarantine_allowed(plan):
        raise Violation("quarantine", f"{name} keeps {len(machines)} rooms in quarantine, though a proof was to be had")
    for machine in machines:
        if isinstance(machine, Receiver) and not machine.holders:
            raise Violation("quarantine", f"{name}: room {machine.room} is quarantined and names no holder")
    _free_again(who, machines)
    if not isinstance(node, PrefillNode):
        left = {"claims": len(node.reserve), "running": len(node.batch), "retracted": node.batch.parked}
        if any(left.values()) or node.live > len(machines):
            raise Violation("rest", f"{name} keeps {left}")
    timers = [key for key in node.timers.running() if key[0] not in ("sessions", "owed")]  # owed: a tombstone's
    if timers:
        raise Violation("rest", f"{name} has clocks running: {timers}")


def _free_again(who: Watched, machines: Sequence[Receiver | Sender]) -> None:
    kept = sum(len(machine.own if isinstance(machine, Sender) else machine.pages) for machine in machines)
    ledger = who.node.ledger
    counts = ledger.counts
    if counts[Page.QUARANTINED] != kept or counts[Page.FREE] + counts[Page.CACHED] + kept != ledger.capacity:
        raise Violation("rest", f"{who.instance} leaks pages: {ledger.holders()}")
