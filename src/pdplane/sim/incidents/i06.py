"""I06: a request is cancelled between the hops. llm-d's documentation; vLLM 50425, 41269.

Prefill has answered, and holds the prompt's KV. The client leaves before decode has heard of the request, so decode
will never tell anybody anything; and where a finished request at prefill takes no notice of an abort, its pages stay
until a lease of half a minute ends. The router closes the gap: it lets the hold go by name, and prefill obeys.
"""

from __future__ import annotations

from .. import broken_params as rules
from .incident import Incident, request, world

I06 = Incident(
    number="I06",
    story="cancelled between the hops",
    world=world([request(0, decode_delay_s=4.0, leaves_after_s=0.5), request(1, 1.0)]),
    holed=rules.deaf_to_release,
    breaks="back",
    reaches=("holder Held/cancel",),
)
