"""I05: a peer never reports. vLLM 46283, 46289.

Prefill keeps what it has computed until decode says that it has read it. Decode dies in the middle of its read, and
says nothing any more: a hold that ends by that word alone lasts for ever. Here its lease ends it, or the end of the
session with its consumer, whichever is first.
"""

from __future__ import annotations

from contextlib import ExitStack

from pdplane.core.params.table import HE

from .. import broken_params as rules
from ..faults import Crash, SlowTransfer
from .incident import Incident, request, world


def _until_told(stack: ExitStack) -> None:
    rules.endless_lease(stack)
    rules.drop_cells(stack, HE.PEER_GONE)


I05 = Incident(
    number="I05",
    story="a peer never reports",
    world=world(
        [request(0), request(1, 0.1, decode_delay_s=1.0), request(2, 8.0)],
        [
            SlowTransfer(process="p0", at_s=0.0, for_s=2.0, extra_s=1.5),
            Crash(process="d0", at_s=0.8, restart_after_s=5.0),
        ],
        lease_s=3.0,
        router_tells=False,
    ),
    holed=_until_told,
    breaks="lease",
    reaches=("holder Bound/peer_gone", "holder Held/lease_end"),
)
