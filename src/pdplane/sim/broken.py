"""Faults seeded into the core, to see that the checkers see them: each is one that real systems have had.

A variant changes the core in place while one run lasts. `within_seeds` is the promise: some seed below it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from pdplane.core.layout import PARAMS, ROOMS

from . import broken_handoff as handoff
from . import broken_pages as pages
from . import broken_params as params

LATE = "late_reads"


class Broken(msgspec.Struct, frozen=True):
    """A seeded fault. `fence`: the transport it shows on; None: either."""

    story: str
    install: Callable[[ExitStack], None]
    within_seeds: int
    pattern: str | None = None
    fence: bool | None = None
    dialect: str = ROOMS


def _params(story: str, install: Callable[[ExitStack], None], within_seeds: int, pattern: str) -> Broken:
    return Broken(story, install, within_seeds, pattern, dialect=PARAMS)


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
    "shared_granted": Broken("a grant names pages that others read", pages.shared_granted, 60, "tight_pools"),
    "unproven_kept": Broken("a failed hand-off's pages are cached at decode", pages.unproven_kept, 60, "cancels"),
    "share_forgotten": Broken("a failed room holds what it shared", pages.share_forgotten, 60, "cancels"),
    "shared_freed": Broken("decode lets go twice of what others share", pages.shared_freed, 60, "retracts"),
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
    "reaper_by_order": _params("leases end in the order of their begin", params.reaper_by_order, 20, "full_decode"),
    "renewal_revives": _params("a renewal revives what has expired", params.renewal_revives, 40, "lost_renewals"),
    "never_renews": _params("decode lets leases end while requests wait", params.never_renews, 20, "full_decode"),
    "freed_under_number": _params("a lease's end frees pages, not the number", params.freed_under_number, 60, LATE),
    "endless_lease": _params("a hold waits for its reader for ever", params.endless_lease, 40, "crash_decode"),
    "deaf_to_release": _params("what is held takes no notice of a release", params.deaf_to_release, 40, "between_hops"),
    "release_forgotten": _params("decode gives up and tells nobody", params.release_forgotten, 40, "cancels"),
    "second_read": _params("a handle may be used twice", params.second_read, 60, "replays"),
    "stranger_releases": _params("a RELEASE counts, whoever sends it", params.stranger_releases, 60, "replays"),
    "any_answer": _params("a CONFIRMED counts, whoever sends it", params.any_answer, 40, "stray_frames"),
    "replay_computed": _params("a spent handle is computed anew", params.replay_computed, 20, "replays"),
    "refusal_forgotten": _params("decode turns away, prefill holds on", params.refusal_forgotten, 40, "tight_pools"),
    "reader_untold": _params("a hold is taken back untold", params.reader_untold, 100, "replays"),
    "commit_unconfirmed": _params("nobody asks for a confirmation", params.commit_unconfirmed, 20, "calm"),
    "confirm_too_early": _params("CONFIRM leaves before the last page", params.confirm_too_early, 20, "slow_transfer"),
    "half_a_read": _params("one link's pages are enough", params.half_a_read, 20, "rank_skew"),
    "always_yes": _params("CONFIRM is answered from memory", params.always_yes, 60, LATE),
    "refusal_ignored": _params("any answer to CONFIRM is a yes", params.refusal_ignored, 60, LATE),
    "silence_is_yes": _params("a dead prefill has confirmed", params.silence_is_yes, 100, "crash_prefill"),
    "no_digest": _params("neither side compares prompts", params.no_digest, 20, "mismatches"),
    "any_pages": _params("prefill brings any pages", params.any_pages, 20, "tampered"),
    "bytes_before_confirm": _params("bytes leave before CONFIRMED", params.bytes_before_confirm, 20, "calm"),
    "freed_before_fence": _params("pages are free before the fence", params.freed_before_fence, 60, "cancels"),
    "head_of_bad_pages": _params("pages behind a bad one count", params.head_of_bad_pages, 100, "lost_moves"),
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
