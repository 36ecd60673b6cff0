"""I23: the lease is over, and the read goes on. vLLM 55470, and its source.

Decode's renewals do not arrive. Prefill's lease ends while its pages are still on their way; the pages are given to
the next prompts, and what arrives is theirs in part. A decode that takes the end of a read for its success answers 200
with another's text. Here it asks after the last page whether the hold was still held, and is told that it was not.
"""

from __future__ import annotations

from .. import broken_params as rules
from ..coverage import FOREIGN
from ..faults import SlowLink, SlowTransfer
from .incident import Incident, request, world

I23 = Incident(
    number="I23",
    story="lease over, read goes on",
    world=world(
        [
            request(0),  # the two meet
            *(request(number, 0.10 + 0.01 * number) for number in range(1, 4)),
            *(request(number, 0.30 + 0.02 * number) for number in range(4, 12)),  # their pages are taken by these
        ],
        [
            SlowTransfer(process="p0", at_s=0.1, for_s=2.0, extra_s=0.6),
            SlowLink(src="d0", dst="p0", at_s=0.25, for_s=3.0, extra_s=1.0),
            SlowLink(src="p0", dst="d0", at_s=0.25, for_s=3.0, extra_s=1.0),
        ],
        lease_s=0.5,
        prefill_pages=9,
        router_tells=False,
    ),
    holed=rules.commit_unconfirmed,
    breaks="confirm",
    reaches=("holder Bound/lease_end", "holder Revoked/confirm", "reader Confirming/refused", FOREIGN),
)
