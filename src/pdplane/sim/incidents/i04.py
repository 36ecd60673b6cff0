"""I04: an abort meets a completion. vLLM 32255 (its review), 56089.

A request at decode has all of its pages, and waits for a place in the batch; its load was reported over long ago. Its
client leaves now. A scheduler that lets an abort delay the free "until the load has been reported" waits for a report
that has been: the pages are never given back. The other order, the abort first and the load's end after it, must end
the same way: one verdict, one free.
"""

from __future__ import annotations

from .. import broken_params as rules
from ..faults import SlowTransfer
from .incident import Incident, request, world

LONG = 60  # tokens: who is in the batch stays there for a while

I04 = Incident(
    number="I04",
    story="abort against completion",
    world=world(
        [
            request(0, max_new=LONG),
            request(1, 0.1, max_new=LONG, leaves_after_s=0.4),  # loaded, and waits for its place: completion first
            request(2, 3.0, leaves_after_s=0.5),  # its load takes a second: abort first
            request(3, 5.0),
        ],
        [SlowTransfer(process="p0", at_s=2.9, for_s=2.0, extra_s=1.0)],
        running=1,
    ),
    holed=rules.untold_end,
    breaks="back",
    reaches=("reader Reading/cancel", "reader Draining/quiet, nothing good came", "reader Confirming/confirmed"),
)
