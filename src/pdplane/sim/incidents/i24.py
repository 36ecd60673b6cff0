"""I24: a reaper trusts an order. vLLM 58222.

Leases are looked at in the order in which they began, up to the first that has not ended. Decode is full, and renews
what waits for it; behind such a lease one of a client that has left is over and is not seen, for as long as anybody
before it is renewed. Here every lease is in a heap of clocks.
"""

from __future__ import annotations

from .. import broken_params as rules
from .incident import Incident, request, world

LONG = 60

I24 = Incident(
    number="I24",
    story="a reaper trusts an order",
    world=world(
        [
            *(request(number, 0.01 * number, max_new=LONG) for number in range(8)),
            request(8, 0.3, decode_delay_s=20.0, leaves_after_s=0.8),
        ],
        lease_s=0.5,
        prefill_pages=60,
        running=1,
        router_tells=False,
    ),
    holed=rules.reaper_by_order,
    breaks="lease",
    reaches=("holder Held/lease_end", "renewals"),
)
