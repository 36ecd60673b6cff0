"""Faults seeded into the core, to see that the checkers see them: each is one that real systems have had.

A variant changes the core in place while one run lasts. `within_seeds` is the promise: some seed below it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from . import broken_handoff as handoff
from . import broken_pages as pages


class Broken(msgspec.Struct, frozen=True):
    """A seeded fault. `fence`: the transport it shows on; None: either."""

    story: str
    install: Callable[[ExitStack], None]
    within_seeds: int
    pattern: str | None = None
    fence: bool | None = None


BROKEN: dict[str, Broken] = {
    "free_at_abort": Broken("pages are freed when a request is aborted", handoff.free_at_abort, 20, "cancels", False),
    "success_at_submit": Broken("success before the bytes are visible", handoff.success_at_submit, 20, "cancels"),
    "resync_to_successor": Broken(
        "a restarted prefill is taken for the granted one", handoff.resync_to_successor, 150, "ghost_writes", False
    ),
    "lost_identity_check": Broken(
        "frames of another grant or process count", handoff.lost_identity_check, 20, "stray_frames", False
    ),
    "freed_in_flight": Broken(
        "prefill frees pages that a step or a write still uses", handoff.freed_in_flight, 40, "cancels+tight_pools"
    ),
    "no_tombstone": Broken("a finished room is forgotten", handoff.no_tombstone, 20, "duplicate_rooms"),
    "double_grant": Broken("one page in two grants", handoff.double_grant, 20, "tight_pools"),
    "silent_failure": Broken("prefill's failure does not cross", handoff.silent_failure, 40, "late_legs"),
    "second_verdict": Broken("a request is answered twice", handoff.second_verdict, 20, "cancels"),
    "proof_by_clock": Broken("the drain limit frees pages", handoff.proof_by_clock, 150, "ghost_writes", False),
    "ack_of_the_dead": Broken("a dead peer counts as quiet", handoff.ack_of_the_dead, 40, "ghost_writes", False),
    "teardown_trusted": Broken(
        "a teardown proves where it proves nothing", handoff.teardown_trusted, 60, "ghost_writes", False
    ),
    "drained_trusted": Broken(
        "DRAINED frees pages behind a fence", handoff.drained_trusted, 60, "lost_moves+tight_pools", True
    ),
    "any_model": Broken("a pair that serves two models", handoff.any_model, 20, "other_weights"),
    "half_a_prompt": Broken("one link's SUCCESS is enough", handoff.half_a_prompt, 20, "rank_skew"),
    "part_of_a_grant": Broken("one link's GRANT is enough", handoff.part_of_a_grant, 60, "rank_skew"),
    "sent_becomes_failed": Broken("sent becomes failed", handoff.sent_becomes_failed, 40, "lost_frames+cancels"),
    "cached_abort": Broken("an aborted prefill's pages are cached", pages.cached_abort, 60, "cancels"),
    "evicts_held": Broken("the prefix cache evicts what is read", pages.evicts_held, 60, "tight_pools"),
    "cached_boasted": Broken("cached_tokens is more than was shared", pages.cached_boasted, 20, "calm"),
    "ready_too_early": Broken("READY before the KV is there", pages.ready_too_early, 40, "hold_expiry"),
    "endless_hold": Broken("held KV has no term", pages.endless_hold, 60, "hold_expiry"),
    "freed_under_read": Broken(
        "held KV is freed while a move reads it", pages.freed_under_read, 60, "cancels+slow_transfer+tight_pools"
    ),
    "freed_at_retract": Broken("pages are freed before the copy is made", pages.freed_at_retract, 20, "retracts"),
    "restored_elsewhere": Broken("a restore takes others' pages", pages.restored_elsewhere, 20, "retracts"),
    "short_restore": Broken("a restore gives too few pages back", pages.short_restore, 20, "retracts"),
    "harvest_starved": Broken("a finished hand-off waits for the retracted", pages.harvest_starved, 60, "retracts"),
    "never_retracts": Broken("growth is ignored, and nobody gives way", pages.never_retracts, 40, "retracts"),
    "lacking_rank": Broken("decode takes a route that lacks a rank", pages.lacking_rank, 60, "registry_swap+rank_skew"),
    "rank_ignored": Broken("an explicit rank is ignored", pages.rank_ignored, 20, "mismatches"),
}


@contextmanager
def variant(name: str | None) -> Iterator[None]:
    """The core as variant `name` has it; None: as it is. Raises ValueError for an unknown name."""
    if name is not None and name not in BROKEN:
        raise ValueError(f"there is no broken variant {name!r}; choose one of {', '.join(BROKEN)}")
    with ExitStack() as stack:
        if name is not None:
            BROKEN[name].install(stack)
        yield
