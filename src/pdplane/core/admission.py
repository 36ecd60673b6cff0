"""What a request may come to need of a pool, and who is turned away before anything is allocated."""

from __future__ import annotations

import msgspec

from .errors import Cause, bad_request, busy
from .layout import pages_for
from .node import Limits, Node


class Demand(msgspec.Struct, frozen=True):
    """pages: for the prompt. most: for prompt and growth. max_new: what was wanted, cut to what the pool can hold."""

    pages: int
    most: int
    max_new: int


def demand(prompt_tokens: int, max_new: int, limits: Limits) -> Demand:
    """What one request may come to need of a pool. The last sampled token's KV is never stored, hence the - 1."""
    room = limits.pages * limits.page_size
    fits = min(max_new, room - prompt_tokens + 1)
    return Demand(
        pages_for(prompt_tokens, limits.page_size),
        pages_for(prompt_tokens + fits - 1, limits.page_size),
        fits,
    )


def refuse(node: Node, prompt_tokens: int, waiting: int) -> Cause | None:
    """Why a newcomer is turned away at once, before anything is allocated; None where it may wait."""
    limits = node.limits
    if node.draining:
        return Cause("draining", f"{node.draining}; use another worker", 503, retryable=True, side=node.side)
    if prompt_tokens > limits.pages * limits.page_size:
        room = limits.pages * limits.page_size
        return bad_request(
            f"the prompt has {prompt_tokens} tokens; this {node.side} worker's pool holds {room}",
            code="context_length_exceeded",
            side=node.side,
        )
    if waiting >= limits.max_queue:
        return queue_full(node)
    return None


def queue_full(node: Node) -> Cause:
    return busy(f"{node.side} has no room now; try again later", side=node.side)
