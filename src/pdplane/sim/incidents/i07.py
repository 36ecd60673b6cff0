"""I07: the wrong side's id in a notice. vLLM 36958.

Decode has the whole prompt in its cache already: it reads nothing, and tells prefill that it need not hold it. It does
so by its own number, where prefill knows the hold by another; prefill shrugs, and keeps the pages. Here the two numbers
are two types, every frame about a hold carries the one that prefill gave it, and a number that prefill does not know is
counted where an operator sees it.
"""

from __future__ import annotations

from .. import broken_params as rules
from .incident import Incident, request, world

TOKENS = 13  # three full pages, and the last token, which decode computes itself

I07 = Incident(
    number="I07",
    story="the wrong id in a notice",
    world=world(
        [request(0, tokens=TOKENS), request(1, 1.0, tokens=TOKENS, prompt=0, family=0), request(2, 2.0)],
        prefix_cache=True,
    ),
    holed=rules.wrong_id,
    breaks="back",
    reaches=("holder Held/release", "reader Parked/nothing_to_read"),
)
