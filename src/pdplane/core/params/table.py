"""The state tables of the params dialect: a hold at prefill, and a load at decode. As in table.py, a missing cell
means: count the event as `late` and change nothing; the order of actions within a cell is part of the table.

Prefill holds what it has computed under a lease, for one consumer. Its pages may go at the lease's end without any
word from a reader, who may be at work just then: safety rests on CONFIRM alone, which asks after the last read whether
the hold was still held. Numbers are never reused, so "held now" means "held all along" (PROTOCOL 3, I23).

Decode reserves all pages, or none, before it reads. What it has read it may use once CONFIRM has been answered; its own
pages go when its own fence has closed, and never earlier, whatever prefill says.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class RequestStatus(StrEnum):
    """vLLM's public view of a request; FINISHED ones are over for their client."""

    WAITING = "WAITING"
    WAITING_FOR_REMOTE_KVS = "WAITING_FOR_REMOTE_KVS"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"
    FINISHED_STOPPED = "FINISHED_STOPPED"
    FINISHED_ABORTED = "FINISHED_ABORTED"
    FINISHED_ERROR = "FINISHED_ERROR"

    @property
    def finished(self) -> bool:
        return self.name.startswith("FINISHED")


# --- prefill: the holder ------------------------------------------------------------------------------------------


class H(StrEnum):
    """States of a hold."""

    HELD = "Held"  # under its lease; nobody has asked for it
    BOUND = "Bound"  # one consumer reads, or has read; the lease runs on
    RELEASED = "Released"  # its consumer has confirmed, or nobody wants it
    REVOKED = "Revoked"  # the lease has ended, an abort named it, or its consumer is gone


class HE(StrEnum):
    """Events of a hold. `other`: by somebody who is not its consumer."""

    READ = "read"
    READ_OTHER = "read, another consumer"
    READ_UNFIT = "read, of another prompt or other pages"
    CONFIRM = "confirm"
    CONFIRM_OTHER = "confirm, another consumer"
    RELEASE = "release"
    LEASE_END = "lease_end"
    CANCEL = "cancel"
    PEER_GONE = "peer_gone"


class HA(StrEnum):
    """Actions of a hold."""

    BIND = "its one consumer from now on"
    MOVE = "bring the pages over this link, once"
    REFUSE = "READ_FAILED on this link with the cause"
    CONFIRMED = "CONFIRMED without a refusal"
    DENY = "CONFIRMED with the refusal"
    STOP_MOVES = "queued writes are dropped; what runs, lands where nobody will confirm it"
    TELL = "READ_FAILED with the cause, on every link that its consumer reads over"
    SENT = "finished_sending: held->free or cached"


_OVER = (HA.STOP_MOVES, HA.SENT)
_TAKEN_BACK = (HA.STOP_MOVES, HA.TELL, HA.SENT)
_UNBOUND_END = {
    (H.HELD, event): (state, (HA.SENT,))
    for event, state in (
        (HE.RELEASE, H.RELEASED),
        (HE.LEASE_END, H.REVOKED),
        (HE.CANCEL, H.REVOKED),
    )
}

HOLDER: Mapping[tuple[H, HE], tuple[H, tuple[HA, ...]]] = {
    **_UNBOUND_END,
    (H.HELD, HE.READ): (H.BOUND, (HA.BIND, HA.MOVE)),
    (H.HELD, HE.READ_UNFIT): (H.HELD, (HA.REFUSE,)),
    # Nobody has read a page: whoever asks confirms nothing.
    (H.HELD, HE.CONFIRM_OTHER): (H.HELD, (HA.DENY,)),
    (H.BOUND, HE.READ): (H.BOUND, (HA.MOVE,)),
    # One consumer per hold (I12): the second is refused, the first is not touched.
    (H.BOUND, HE.READ_OTHER): (H.BOUND, (HA.REFUSE,)),
    (H.BOUND, HE.READ_UNFIT): (H.BOUND, (HA.REFUSE,)),
    (H.BOUND, HE.CONFIRM): (H.RELEASED, (HA.CONFIRMED, HA.SENT)),
    (H.BOUND, HE.CONFIRM_OTHER): (H.BOUND, (HA.DENY,)),
    (H.BOUND, HE.RELEASE): (H.RELEASED, _OVER),
    # Its consumer waits for pages that will not come: it hears so now, and not by its next renewal.
    (H.BOUND, HE.LEASE_END): (H.REVOKED, _TAKEN_BACK),
    (H.BOUND, HE.CANCEL): (H.REVOKED, _TAKEN_BACK),
    (H.BOUND, HE.PEER_GONE): (H.REVOKED, _OVER),
    # Over: who asks hears why, and its consumer, whose session broke, hears the same answer again.
    (H.RELEASED, HE.CONFIRM): (H.RELEASED, (HA.CONFIRMED,)),
    **{(state, event): (state, (HA.REFUSE,)) for state in (H.RELEASED, H.REVOKED) for event in
       (HE.READ, HE.READ_OTHER)},
    (H.RELEASED, HE.CONFIRM_OTHER): (H.RELEASED, (HA.DENY,)),
    (H.REVOKED, HE.CONFIRM): (H.REVOKED, (HA.DENY,)),
    (H.REVOKED, HE.CONFIRM_OTHER): (H.REVOKED, (HA.DENY,)),
}  # fmt: skip


# --- decode: the reader -------------------------------------------------------------------------------------------


class L(StrEnum):
    """States of a load."""

    PARKED = "Parked"  # the hold is known and its lease kept; no page is reserved, or no session is up yet
    READING = "Reading"  # pages are reserved and come
    CONFIRMING = "Confirming"  # all have come; was the hold held all along?
    SALVAGING = "Salvaging"  # only a head has come: the same question, for what is there
    DRAINING = "Draining"  # given up: the fences close
    READY = "Ready"  # confirmed
    RECOMPUTE = "Recompute"  # confirmed up to the first bad page
    FAILED = "Failed"  # over with nothing to show


class LE(StrEnum):
    """Events of a load."""

    START = "start"
    NOTHING_TO_READ = "nothing_to_read"
    LANDED_ALL = "landed_all"
    READ_FAILED = "read_failed"
    LOST = "lost"  # prefill says by RENEWED that it is held no more
    PEER_GONE = "peer_gone"
    UNREACHABLE = "unreachable"
    CANCEL = "cancel"
    CONFIRMED = "confirmed"
    REFUSED = "refused"
    QUIET = "quiet, nothing good came"
    QUIET_HEAD = "quiet, a head of the pages came"
    SESSION_UP = "session_up"
    OPERATOR_RELEASE = "operator_release"  # somebody answers for it that nothing comes any more


class LA(StrEnum):
    """Actions of a load."""

    READ = "arm, READ on all links"
    READ_ONE = "READ on this link again"
    CONFIRM = "CONFIRM on one link"
    DISARM = "forget the grant at the landings"
    FENCE = "close the local fences"
    RELEASE = "RELEASE: prefill need not hold it any longer"
    DROP_LEASE = "renew it no more"
    RECEIVED = "finished_recving"
    COMMIT = "confirmed"
    FAIL = "failed_recving, with the first cause"
    BAD_TAIL = "invalid_block_ids: the pages from the first that did not come on"


_GIVE_UP = (LA.DROP_LEASE, LA.RELEASE)

READER: Mapping[tuple[L, LE], tuple[L, tuple[LA, ...]]] = {
    (L.PARKED, LE.START): (L.READING, (LA.READ,)),
    (L.PARKED, LE.NOTHING_TO_READ): (L.READY, _GIVE_UP),
    (L.PARKED, LE.CANCEL): (L.FAILED, _GIVE_UP),
    (L.PARKED, LE.LOST): (L.FAILED, (LA.DROP_LEASE, LA.FAIL, LA.RECEIVED)),
    (L.PARKED, LE.PEER_GONE): (L.FAILED, (LA.DROP_LEASE, LA.FAIL, LA.RECEIVED)),
    (L.PARKED, LE.UNREACHABLE): (L.FAILED, (LA.DROP_LEASE, LA.FAIL, LA.RECEIVED)),
    # O3: all pages, on all links, visible here. The engine may begin; nothing leaves before CONFIRMED.
    (L.READING, LE.LANDED_ALL): (L.CONFIRMING, (LA.DISARM, LA.CONFIRM, LA.RECEIVED)),
    (L.READING, LE.READ_FAILED): (L.DRAINING, (LA.FENCE,)),
    (L.READING, LE.LOST): (L.DRAINING, (LA.FENCE,)),
    (L.READING, LE.PEER_GONE): (L.DRAINING, (LA.FENCE,)),
    # The lease is kept until nothing of the read can land any more.
    (L.READING, LE.CANCEL): (L.DRAINING, (LA.FENCE,)),
    (L.READING, LE.SESSION_UP): (L.READING, (LA.READ_ONE,)),
    (L.DRAINING, LE.READ_FAILED): (L.DRAINING, ()),
    (L.DRAINING, LE.LOST): (L.DRAINING, ()),
    (L.DRAINING, LE.PEER_GONE): (L.DRAINING, ()),
    (L.DRAINING, LE.CANCEL): (L.DRAINING, ()),
    # O4: the fences have closed, so that the pages are decode's own again.
    (L.DRAINING, LE.QUIET): (L.FAILED, (LA.DISARM, *_GIVE_UP, LA.FAIL, LA.RECEIVED)),
    (L.DRAINING, LE.OPERATOR_RELEASE): (L.FAILED, (LA.DISARM, *_GIVE_UP)),
    (L.DRAINING, LE.QUIET_HEAD): (L.SALVAGING, (LA.DISARM, LA.CONFIRM)),
    (L.SALVAGING, LE.CONFIRMED): (L.RECOMPUTE, (LA.DROP_LEASE, LA.BAD_TAIL, LA.RECEIVED, LA.COMMIT)),
    (L.SALVAGING, LE.REFUSED): (L.FAILED, (LA.DROP_LEASE, LA.FAIL, LA.RECEIVED)),
    (L.SALVAGING, LE.PEER_GONE): (L.FAILED, (LA.DROP_LEASE, LA.FAIL, LA.RECEIVED)),
    (L.SALVAGING, LE.CANCEL): (L.FAILED, _GIVE_UP),
    (L.SALVAGING, LE.SESSION_UP): (L.SALVAGING, (LA.CONFIRM,)),
    (L.CONFIRMING, LE.CONFIRMED): (L.READY, (LA.DROP_LEASE, LA.COMMIT)),
    # A read that cannot be confirmed is never committed.
    (L.CONFIRMING, LE.REFUSED): (L.FAILED, (LA.DROP_LEASE, LA.FAIL)),
    (L.CONFIRMING, LE.PEER_GONE): (L.FAILED, (LA.DROP_LEASE, LA.FAIL)),
    (L.CONFIRMING, LE.CANCEL): (L.FAILED, _GIVE_UP),
    (L.CONFIRMING, LE.SESSION_UP): (L.CONFIRMING, (LA.CONFIRM,)),
}

OVER = frozenset({L.READY, L.RECOMPUTE, L.FAILED})
