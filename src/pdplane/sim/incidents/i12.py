"""I12: a retry with a spent handle. vLLM-Ascend 13929; vLLM 53250, 52234.

A router sends what prefill has answered to a second decode, while the first still reads, or after it has read. Where
the first reader's word frees the pages, the second one reads what came after, and answers 200. Here a hold has one
consumer: the second is told that the hold is spent, and the first is not disturbed.
"""

from __future__ import annotations

from .. import broken_params as rules
from ..faults import SlowTransfer
from .incident import Incident, request, world

I12 = Incident(
    number="I12",
    story="a retry with a spent handle",
    world=world(
        [
            request(0, replays="sent", replay_delay_s=0.02),
            request(1, 0.2, replays="ended", replay_delay_s=0.5),
            request(2, 0.4, replays="sent", replay_delay_s=0.3),
            *(request(number, 0.1 * number) for number in range(5, 20)),
        ],
        [SlowTransfer(process="p0", at_s=0.0, for_s=3.0, extra_s=0.2)],
        seed=1,  # the first replay goes to the other decode
        decodes=2,
        prefill_pages=12,
    ),
    holed=rules.handles_for_all,
    breaks="consumer",
    reaches=("holder Bound/read, another consumer", "holder Released/read, another consumer", "spent"),
)
