"""THE state table of the rooms protocol: (state, event) -> (next state, actions).

One machine per (room, side). A missing cell means: count the event as `late` and change nothing. Actions are names
for what the machine of that side does (receiver.py, sender.py); their order within a cell is part of the table.
`cancel` stands for every local end with a cause of its own: client left, abort call, deadline, no progress.

The policies differ in two cells only: `early` goes from Queued straight to Allocating, and Waiting never starts;
`prefill_complete` waits in Announced for READY, and Waiting may start ahead of any grant.

The terminal answer is given on entering Draining, Gone or Success and never changes; pages follow later, on proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum


class KVPoll(IntEnum):
    """SGLang's public view of a hand-off; a projection of the states below, never stored."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


# --- decode: the receiver -----------------------------------------------------------------------------------------


class R(StrEnum):
    """States of a room at decode."""

    QUEUED = "Queued"  # its prefill's route or session is not known yet
    ANNOUNCED = "Announced"  # prefill_complete: every rank is asked to compute and say READY
    ALLOCATING = "Allocating"  # announced; waits for pages on all ranks
    GRANTED = "Granted"  # pages are prefill's to write
    SUCCESS = "Success"  # every page landed, row matches; waits for the batch
    DRAINING = "Draining"  # answered; pages wait for proof that nobody writes them
    QUARANTINE = "Quarantine"  # the proof did not come in time; a holder is named
    GONE = "Gone"


class RE(StrEnum):
    """Events of a room at decode."""

    ROUTE_OK = "route_ok"
    ROUTE_OK_AHEAD = "route_ok, prefill_complete"
    READY_ALL = "ready_all"
    ROUTE_BAD = "route_bad"
    PAGES_OK = "pages_ok"
    SUCCESS_ALL = "success_all"
    ROW_BAD = "row_bad"
    PEER_FAILED = "peer_failed"
    PEER_GONE = "peer_gone"
    CANCEL = "cancel"
    SESSION_UP = "session_up"
    QUIET_ALL = "quiet_all"
    ABORT_LIMIT = "abort_limit"
    DRAIN_LIMIT = "drain_limit"
    OPERATOR_RELEASE = "operator_release"
    BATCH = "batch"
    ROW_ENDS = "row_ends"


class RA(StrEnum):
    """Actions of a room at decode."""

    ANNOUNCE = "ANNOUNCE on all links"
    ANNOUNCE_ONE = "ANNOUNCE on this link again"
    GRANT = "free->granted, arm, GRANT on all links"
    GRANT_ONE = "GRANT on this link again, same number"
    FILL = "granted->filled, disarm"
    RECEIVED = "RECEIVED on all links"
    FENCE = "close the local fences where there are any"
    ABORT = "ABORT on links that are not quiet and still bound, RECEIVED on those that have said SUCCESS"
    ABORT_ONE = "ABORT on this link if it is not quiet, RECEIVED if it has said SUCCESS"
    OWE_ABORT = "ABORT as soon as a session is up"
    DRAIN = "granted->draining"
    QUARANTINE = "draining->quarantined, alarm with holder"
    FREE = "->free"
    ACTIVATE = "filled->active: the engine owns it"
    ANSWER = "answer the client with the first cause"
    ANSWER_ROW = "answer the client with the row"
    TOMBSTONE = "leave a tombstone"
    PROVEN = "the alarm's end: the proof has come"
    UNPROVEN = "log: freed without a proof"


_END_AT_DECODE = (RA.ANSWER, RA.FENCE, RA.DRAIN, RA.ABORT)

RECEIVER: Mapping[tuple[R, RE], tuple[R, tuple[RA, ...]]] = {
    (R.QUEUED, RE.ROUTE_OK): (R.ALLOCATING, (RA.ANNOUNCE,)),
    (R.QUEUED, RE.ROUTE_BAD): (R.GONE, (RA.ANSWER, RA.TOMBSTONE)),
    # Cancelled before the route is known: prefill may hold a leg for this room, so the ABORT is still owed.
    (R.QUEUED, RE.CANCEL): (R.DRAINING, (RA.ANSWER, RA.OWE_ABORT)),
    (R.QUEUED, RE.ROUTE_OK_AHEAD): (R.ANNOUNCED, (RA.ANNOUNCE,)),
    # Nothing is reserved here before prefill's pages are taken: with one order, P then D, no two rooms wait for each
    # other's pages.
    (R.ANNOUNCED, RE.READY_ALL): (R.ALLOCATING, ()),
    (R.ANNOUNCED, RE.SESSION_UP): (R.ANNOUNCED, (RA.ANNOUNCE_ONE,)),
    (R.ANNOUNCED, RE.PEER_FAILED): (R.DRAINING, _END_AT_DECODE),
    (R.ANNOUNCED, RE.PEER_GONE): (R.DRAINING, _END_AT_DECODE),
    (R.ANNOUNCED, RE.CANCEL): (R.DRAINING, _END_AT_DECODE),
    (R.ALLOCATING, RE.PAGES_OK): (R.GRANTED, (RA.GRANT,)),
    (R.ALLOCATING, RE.SESSION_UP): (R.ALLOCATING, (RA.ANNOUNCE_ONE,)),
    (R.ALLOCATING, RE.PEER_FAILED): (R.DRAINING, _END_AT_DECODE),
    (R.ALLOCATING, RE.PEER_GONE): (R.DRAINING, _END_AT_DECODE),
    (R.ALLOCATING, RE.CANCEL): (R.DRAINING, _END_AT_DECODE),
    (R.GRANTED, RE.SESSION_UP): (R.GRANTED, (RA.GRANT_ONE,)),
    # O3: taken only after the last page is visible here and the row matches.
    (R.GRANTED, RE.SUCCESS_ALL): (R.SUCCESS, (RA.FILL, RA.RECEIVED)),
    (R.GRANTED, RE.ROW_BAD): (R.DRAINING, _END_AT_DECODE),
    (R.GRANTED, RE.PEER_FAILED): (R.DRAINING, _END_AT_DECODE),
    (R.GRANTED, RE.PEER_GONE): (R.DRAINING, _END_AT_DECODE),
    (R.GRANTED, RE.CANCEL): (R.DRAINING, _END_AT_DECODE),
    (R.SUCCESS, RE.BATCH): (R.GONE, (RA.ACTIVATE, RA.TOMBSTONE)),
    (R.SUCCESS, RE.ROW_ENDS): (R.GONE, (RA.ANSWER_ROW, RA.FREE, RA.TOMBSTONE)),
    # Every rank is quiet by its SUCCESS: free at once.
    (R.SUCCESS, RE.CANCEL): (R.GONE, (RA.ANSWER, RA.FREE, RA.TOMBSTONE)),
    (R.DRAINING, RE.SESSION_UP): (R.DRAINING, (RA.ABORT_ONE,)),
    (R.DRAINING, RE.PEER_GONE): (R.DRAINING, ()),
    (R.DRAINING, RE.PEER_FAILED): (R.DRAINING, ()),
    (R.DRAINING, RE.CANCEL): (R.DRAINING, ()),  # the first verdict stays
    (R.DRAINING, RE.QUIET_ALL): (R.GONE, (RA.FREE, RA.TOMBSTONE)),  # O4
    (R.DRAINING, RE.ABORT_LIMIT): (R.GONE, (RA.TOMBSTONE,)),
    (R.DRAINING, RE.DRAIN_LIMIT): (R.QUARANTINE, (RA.QUARANTINE,)),
    (R.QUARANTINE, RE.SESSION_UP): (R.QUARANTINE, (RA.ABORT_ONE,)),
    (R.QUARANTINE, RE.PEER_GONE): (R.QUARANTINE, ()),
    (R.QUARANTINE, RE.PEER_FAILED): (R.QUARANTINE, ()),
    (R.QUARANTINE, RE.CANCEL): (R.QUARANTINE, ()),
    (R.QUARANTINE, RE.QUIET_ALL): (R.GONE, (RA.PROVEN, RA.FREE, RA.TOMBSTONE)),
    (R.QUARANTINE, RE.OPERATOR_RELEASE): (R.GONE, (RA.UNPROVEN, RA.FREE, RA.TOMBSTONE)),
}


def receiver_poll(state: R, *, landed: bool, failed: bool) -> KVPoll:
    """KVPoll of a room at decode; `landed`: at least one page is in; `failed`: it ended without its row."""
    if failed:
        return KVPoll.FAILED
    if state in (R.QUEUED, R.ANNOUNCED, R.ALLOCATING):
        return KVPoll.BOOTSTRAPPING
    if state is R.GRANTED:
        return KVPoll.TRANSFERRING if landed else KVPoll.WAITING_FOR_INPUT
    return KVPoll.SUCCESS


# --- prefill: the sender ------------------------------------------------------------------------------------------


class S(StrEnum):
    """States of a room at prefill."""

    NEW = "New"  # nothing of this room is known; never stored
    ORPHAN = "Orphan"  # decode spoke first; the leg is awaited
    WAITING = "Waiting"  # leg in, no grant: nothing may be computed (early), or it waits for its turn
    AHEAD = "Ahead"  # prefill_complete: computing, no grant yet
    HELD = "Held"  # prefill_complete: computed; the KV waits for the grant, under a term
    ARMED = "Armed"  # granted; waits for its turn
    STREAMING = "Streaming"  # computing; full pages are moved as they come
    FLUSHING = "Flushing"  # computed; writes are outstanding
    SENT = "Sent"  # SUCCESS said; never becomes failed
    DRAINING = "Draining"  # answered; a step or a write still touches the pages
    GONE = "Gone"


class SE(StrEnum):
    """Events of a room at prefill."""

    LEG = "leg"
    LEG_WITH_GRANT = "leg, grant already in"
    ANNOUNCE = "announce"
    GRANT = "grant"
    GRANT_PART = "grant for one link of several"
    ABORT = "abort"
    RECEIVED = "received"
    CANCEL = "cancel"
    PEER_GONE = "peer_gone"
    START = "start"
    CHUNK = "chunk"
    COMPUTED = "computed"
    WRITES_DONE = "writes_done"
    WRITE_ERR = "write_err"
    QUIET = "quiet"
    DRAIN_LIMIT = "drain_limit"
    TTL = "ttl"
    HOLD_END = "hold_end"


class SA(StrEnum):
    """Actions of a room at prefill."""

    ANNOUNCE_CLOCK = "start the clock for decode's first word"
    LEG_CLOCK = "start the clock for the leg"
    QUEUE = "queue for computing"
    MOVE_FULL = "computing->sending: write the pages that are full"
    MOVE_REST = "computing->sending: write the rest"
    HOLD = "computing->held"
    READY = "READY to whoever has announced"
    SUCCESS = "SUCCESS(row)"
    FAILED = "FAILED(cause) if an endpoint is known"
    DRAINED = "DRAINED if an endpoint is known"
    STOP = "abort the engine, drop queued writes, ->draining"
    KEEP = "whole pages ->cached, the rest ->free"
    FREE = "->free"
    QUARANTINE = "draining->quarantined, alarm"
    ANSWER = "answer the leg with the first cause"
    ANSWER_SENT = "answer the leg: done"
    TOMBSTONE = "leave a tombstone"
    ROW_CLOCK = "keep the row for a while"


_END_BEFORE_START = (SA.FAILED, SA.DRAINED, SA.ANSWER, SA.TOMBSTONE)
_END_HELD = (SA.FAILED, SA.KEEP, SA.DRAINED, SA.ANSWER, SA.TOMBSTONE)
_END_AT_WORK = (SA.FAILED, SA.STOP, SA.ANSWER)
_AT_WORK = (S.AHEAD, S.STREAMING, S.FLUSHING)

SENDER: Mapping[tuple[S, SE], tuple[S, tuple[SA, ...]]] = {
    (S.NEW, SE.LEG): (S.WAITING, (SA.ANNOUNCE_CLOCK,)),
    (S.NEW, SE.ANNOUNCE): (S.ORPHAN, (SA.LEG_CLOCK,)),
    (S.NEW, SE.GRANT): (S.ORPHAN, (SA.LEG_CLOCK,)),
    (S.NEW, SE.ABORT): (S.GONE, (SA.TOMBSTONE, SA.DRAINED)),  # tombstone first: the leg may still come
    (S.ORPHAN, SE.LEG): (S.WAITING, ()),
    (S.ORPHAN, SE.LEG_WITH_GRANT): (S.ARMED, (SA.QUEUE,)),
    (S.ORPHAN, SE.ANNOUNCE): (S.ORPHAN, ()),
    (S.NEW, SE.GRANT_PART): (S.ORPHAN, (SA.LEG_CLOCK,)),
    (S.ORPHAN, SE.GRANT): (S.ORPHAN, ()),
    (S.ORPHAN, SE.GRANT_PART): (S.ORPHAN, ()),
    (S.ORPHAN, SE.ABORT): (S.GONE, (SA.TOMBSTONE, SA.DRAINED)),
    (S.ORPHAN, SE.CANCEL): (S.GONE, (SA.FAILED, SA.DRAINED, SA.TOMBSTONE)),
    (S.ORPHAN, SE.PEER_GONE): (S.GONE, (SA.TOMBSTONE,)),
    (S.WAITING, SE.ANNOUNCE): (S.WAITING, ()),
    (S.WAITING, SE.GRANT): (S.ARMED, (SA.QUEUE,)),  # O1: no write, and no computing, without page numbers
    (S.WAITING, SE.GRANT_PART): (S.WAITING, ()),
    (S.WAITING, SE.START): (S.AHEAD, ()),  # prefill_complete alone
    (S.WAITING, SE.ABORT): (S.GONE, (SA.DRAINED, SA.ANSWER, SA.TOMBSTONE)),
    (S.WAITING, SE.CANCEL): (S.GONE, _END_BEFORE_START),
    (S.WAITING, SE.PEER_GONE): (S.GONE, (SA.ANSWER, SA.TOMBSTONE)),
    (S.ARMED, SE.ANNOUNCE): (S.ARMED, ()),
    (S.ARMED, SE.GRANT): (S.ARMED, ()),
    (S.ARMED, SE.START): (S.STREAMING, (SA.MOVE_FULL,)),  # a cached prefix goes at once
    (S.ARMED, SE.ABORT): (S.GONE, (SA.DRAINED, SA.ANSWER, SA.TOMBSTONE)),
    (S.ARMED, SE.CANCEL): (S.GONE, _END_BEFORE_START),
    (S.ARMED, SE.PEER_GONE): (S.GONE, (SA.ANSWER, SA.TOMBSTONE)),
    (S.AHEAD, SE.ANNOUNCE): (S.AHEAD, ()),
    (S.AHEAD, SE.GRANT): (S.STREAMING, (SA.MOVE_FULL,)),
    (S.AHEAD, SE.GRANT_PART): (S.AHEAD, ()),
    (S.AHEAD, SE.CHUNK): (S.AHEAD, ()),
    (S.AHEAD, SE.COMPUTED): (S.HELD, (SA.HOLD, SA.READY)),
    (S.HELD, SE.ANNOUNCE): (S.HELD, (SA.READY,)),  # every time: idempotent
    (S.HELD, SE.GRANT): (S.FLUSHING, (SA.MOVE_REST,)),
    (S.HELD, SE.GRANT_PART): (S.HELD, ()),
    (S.HELD, SE.HOLD_END): (S.GONE, _END_HELD),
    (S.HELD, SE.CANCEL): (S.GONE, _END_HELD),
    (S.HELD, SE.ABORT): (S.GONE, (SA.KEEP, SA.DRAINED, SA.ANSWER, SA.TOMBSTONE)),
    (S.HELD, SE.PEER_GONE): (S.GONE, (SA.KEEP, SA.ANSWER, SA.TOMBSTONE)),
    (S.STREAMING, SE.ANNOUNCE): (S.STREAMING, ()),
    (S.STREAMING, SE.GRANT): (S.STREAMING, ()),
    (S.STREAMING, SE.CHUNK): (S.STREAMING, (SA.MOVE_FULL,)),
    (S.STREAMING, SE.COMPUTED): (S.FLUSHING, (SA.MOVE_REST,)),
    (S.FLUSHING, SE.ANNOUNCE): (S.FLUSHING, ()),
    (S.FLUSHING, SE.GRANT): (S.FLUSHING, ()),
    (S.FLUSHING, SE.WRITES_DONE): (S.SENT, (SA.SUCCESS, SA.KEEP, SA.ANSWER_SENT, SA.ROW_CLOCK)),
    (S.DRAINING, SE.QUIET): (S.GONE, (SA.FREE, SA.DRAINED, SA.TOMBSTONE)),
    # A write that never returns: no DRAINED until it does, so decode quarantines too.
    (S.DRAINING, SE.DRAIN_LIMIT): (S.DRAINING, (SA.QUARANTINE,)),
    (S.DRAINING, SE.ANNOUNCE): (S.DRAINING, (SA.FAILED,)),
    (S.DRAINING, SE.GRANT): (S.DRAINING, (SA.FAILED,)),
    (S.DRAINING, SE.GRANT_PART): (S.DRAINING, (SA.FAILED,)),
    (S.DRAINING, SE.ABORT): (S.DRAINING, ()),
    (S.DRAINING, SE.CANCEL): (S.DRAINING, ()),
    (S.DRAINING, SE.PEER_GONE): (S.DRAINING, ()),
    (S.SENT, SE.ANNOUNCE): (S.SENT, (SA.SUCCESS,)),
    (S.SENT, SE.GRANT): (S.SENT, (SA.SUCCESS,)),
    (S.SENT, SE.RECEIVED): (S.GONE, (SA.TOMBSTONE,)),
    (S.SENT, SE.TTL): (S.GONE, (SA.TOMBSTONE,)),
    (S.SENT, SE.PEER_GONE): (S.GONE, (SA.TOMBSTONE,)),
    (S.SENT, SE.ABORT): (S.GONE, (SA.DRAINED, SA.TOMBSTONE)),
    (S.SENT, SE.CANCEL): (S.SENT, ()),  # sent never becomes failed
    (S.GONE, SE.ANNOUNCE): (S.GONE, (SA.FAILED, SA.DRAINED)),
    (S.GONE, SE.GRANT): (S.GONE, (SA.FAILED, SA.DRAINED)),
    (S.GONE, SE.GRANT_PART): (S.GONE, (SA.FAILED, SA.DRAINED)),
    (S.GONE, SE.ABORT): (S.GONE, (SA.DRAINED,)),
    **{(state, SE.CANCEL): (S.DRAINING, _END_AT_WORK) for state in _AT_WORK},
    **{(state, SE.WRITE_ERR): (S.DRAINING, _END_AT_WORK) for state in (S.STREAMING, S.FLUSHING)},
    **{(state, SE.PEER_GONE): (S.DRAINING, (SA.STOP, SA.ANSWER)) for state in _AT_WORK},
    **{(state, SE.ABORT): (S.DRAINING, (SA.STOP, SA.ANSWER)) for state in _AT_WORK},
}


def sender_poll(state: S, *, wrote: bool, failed: bool) -> KVPoll:
    """KVPoll of a room at prefill; `wrote`: a write was posted; `failed`: it ended without SUCCESS."""
    if failed:
        return KVPoll.FAILED
    if state in (S.NEW, S.ORPHAN, S.WAITING, S.AHEAD, S.HELD):
        return KVPoll.BOOTSTRAPPING
    if state in (S.ARMED, S.STREAMING, S.FLUSHING):
        return KVPoll.TRANSFERRING if wrote else KVPoll.WAITING_FOR_INPUT
    return KVPoll.SUCCESS
