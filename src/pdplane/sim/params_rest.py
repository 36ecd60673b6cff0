"""What is left of the params dialect when a fleet has come to rest: no hold, no load, no lease, no page."""

from __future__ import annotations

from pdplane.core.ids import Instance
from pdplane.core.node import Node
from pdplane.core.pages import Page
from pdplane.core.params.decode import ParamsDecodeNode
from pdplane.core.params.prefill import ParamsPrefillNode

from .checkers import Violation


def params_at_rest(name: Instance, node: ParamsPrefillNode | ParamsDecodeNode) -> None:
    """A fence closes by itself: nothing is ever left in quarantine here."""
    left: dict[str, object] = {"requests": list(node.requests)}
    if isinstance(node, ParamsPrefillNode):
        left |= {"holds": list(node.held.holds), "in the engine": node.computing}
    else:
        left |= {"loads": list(node.pull.readers), "claims": len(node.reserve)}
        left |= {"running": len(node.batch), "laid aside": node.batch.parked}
    if any(left.values()):
        raise Violation("rest", f"{name} keeps {left}")
    _free_again(name, node)


def _free_again(name: Instance, node: Node) -> None:
    counts = node.ledger.counts
    if counts[Page.FREE] + counts[Page.CACHED] != node.ledger.capacity:
        raise Violation("rest", f"{name} leaks pages: {node.ledger.holders()}")
    timers = [key for key in node.timers.running() if key[0] not in ("sessions", "owed")]
    if timers:
        raise Violation("rest", f"{name} has clocks running: {timers}")
