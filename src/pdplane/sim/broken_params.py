"""Seeded faults of the params dialect: leases, the one consumer, the confirmation, the prompt, the gate, the fence."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, cast
from unittest.mock import patch

import msgspec

from pdplane.core.effects import RunWhole, SendFrame, Ungate
from pdplane.core.errors import Cause
from pdplane.core.frames import Confirmed, Read, ReadFailed, Release, Renew, Renewed
from pdplane.core.ids import HoldNo, Link
from pdplane.core.params import loads as params_loads
from pdplane.core.params.decode import ParamsDecodeNode
from pdplane.core.params.hold_connector import HoldConnector
from pdplane.core.params.holder import Holder
from pdplane.core.params.leases import Leases
from pdplane.core.params.pull_connector import PullConnector
from pdplane.core.params.reader import Reader
from pdplane.core.params.scheduled import Scheduled
from pdplane.core.params.table import HA, HE, HOLDER, LA, LE, READER, H, L

from .broken_handoff import swap

HoldCell = tuple[H, tuple[HA, ...]]
LoadCell = tuple[L, tuple[LA, ...]]
_GIVE_UP = (LA.DROP_LEASE, LA.RELEASE)
_OVER = (HA.STOP_MOVES, HA.SENT)


def set_holder(stack: ExitStack, cells: dict[tuple[H, HE], HoldCell]) -> None:
    stack.enter_context(patch.dict(cast("dict[Any, Any]", HOLDER), cells))


def set_reader(stack: ExitStack, cells: dict[tuple[L, LE], LoadCell]) -> None:
    stack.enter_context(patch.dict(cast("dict[Any, Any]", READER), cells))


def drop_cells(stack: ExitStack, event: HE) -> None:
    """Prefill takes no notice of it."""
    stack.enter_context(patch.dict(cast("dict[Any, Any]", HOLDER)))
    for cell in [cell for cell in HOLDER if cell[1] is event]:
        del cast("dict[Any, Any]", HOLDER)[cell]


# --- leases -------------------------------------------------------------------------------------------------------


def reaper_by_order(stack: ExitStack) -> None:
    """I24: leases are looked at in the order in which they began, up to the first that has not ended."""
    due = HoldConnector.due

    def in_order(self: HoldConnector, kind: str, name: object) -> None:
        first = next(iter(self.holds.values()), None)
        if kind != "lease" or first is None or first.number == name:
            due(self, kind, name)
        else:
            self.node.timers.set((kind, name), self._ends_at(first) + 0.01)

    swap(stack, HoldConnector, "due", in_order)


def renewal_revives(stack: ExitStack) -> None:
    """A renewal counts for what has expired, too."""
    renew = HoldConnector._renew

    def reviving(self: HoldConnector, link: Link, frame: Renew) -> None:
        first = len(self.node.out)
        renew(self, link, frame)
        for at, effect in enumerate(self.node.out[first:], first):
            if isinstance(effect, SendFrame) and isinstance(effect.frame, Renewed):
                alive = msgspec.structs.replace(effect.frame, holds=frame.holds)
                self.node.out[at] = msgspec.structs.replace(effect, frame=alive)

    swap(stack, HoldConnector, "_renew", reviving)


def never_renews(stack: ExitStack) -> None:
    """Decode keeps a request waiting, and lets its lease end."""
    swap(stack, Leases, "_ask", lambda self, holder: None)


def freed_under_number(stack: ExitStack) -> None:
    """A lease's end frees the pages, and the hold goes on to be held."""
    set_holder(stack, {(H.BOUND, HE.LEASE_END): (H.BOUND, _OVER)})


def endless_lease(stack: ExitStack) -> None:
    """I05: a hold waits for its reader's word, however long that takes."""
    drop_cells(stack, HE.LEASE_END)


def deaf_to_release(stack: ExitStack) -> None:
    """I06: what is finished and held takes no notice of an abort or of the public call."""
    swap(stack, HoldConnector, "release", lambda self, rid, cause: False)


def release_forgotten(stack: ExitStack) -> None:
    """Decode gives a load up, and tells nobody."""
    swap(stack, PullConnector, "let_go", lambda self, handle, grant, cause: None)


# --- one consumer -------------------------------------------------------------------------------------------------


def second_read(stack: ExitStack) -> None:
    """I12: whoever presents the handle may read, and is confirmed."""
    swap(stack, HoldConnector, "_is_theirs", staticmethod(lambda holder, link, frame: True))


def stranger_releases(stack: ExitStack) -> None:
    """A RELEASE counts, whoever sends it."""

    def released(self: HoldConnector, holder: Holder, link: Link, frame: Release) -> None:
        holder.apply(HE.RELEASE, cause=frame.cause)

    swap(stack, HoldConnector, "_released", released)


def any_answer(stack: ExitStack) -> None:
    """I07: an answer counts for its hold, whichever grant and process it names."""
    frame_in = PullConnector._frame

    def by_hold_alone(self: PullConnector, conn: Any, frame: Any) -> None:
        if isinstance(frame, (Confirmed, ReadFailed)):
            for reader in self.readers.values():
                if reader.handle.hold == frame.hold and reader.links:
                    src, grant = reader.handle.instance, reader.grant
                    frame = msgspec.structs.replace(frame, src=src, grant=grant)
                    break
        frame_in(self, conn, frame)

    swap(stack, PullConnector, "_frame", by_hold_alone)


def replay_computed(stack: ExitStack) -> None:
    """A spent handle is one like any other that could not be loaded: decode computes the prompt, and says nothing."""
    swap(stack, params_loads, "REPLAYS", frozenset())


def refusal_forgotten(stack: ExitStack) -> None:
    """Decode's edge turns a request away, and prefill holds its KV until the lease ends."""
    swap(stack, PullConnector, "refused", lambda self, handle, cause: None)


def reader_untold(stack: ExitStack) -> None:
    """Prefill takes a hold back under its reader, and lets that wait for its next renewal."""
    set_holder(stack, {(H.BOUND, HE.CANCEL): (H.REVOKED, _OVER)})


# --- the confirmation ---------------------------------------------------------------------------------------------


def commit_unconfirmed(stack: ExitStack) -> None:
    """I23: a read that has ended is taken for good."""
    committed = (L.READY, (LA.DISARM, *_GIVE_UP, LA.RECEIVED, LA.COMMIT))
    set_reader(stack, {(L.READING, LE.LANDED_ALL): committed})


def confirm_too_early(stack: ExitStack) -> None:
    """CONFIRM leaves with READ, and a yes is kept until the last page has come."""
    begun = (L.READING, (LA.READ, LA.CONFIRM))
    set_reader(stack, {(L.PARKED, LE.START): begun})


def half_a_read(stack: ExitStack) -> None:
    """The pages of one link are enough."""
    derive = Reader._derive

    def derived(self: Reader) -> None:
        if self.state is L.READING and any(len(pages) == len(self.blocks) for pages in self.landed.values()):
            self.apply(LE.LANDED_ALL)
        else:
            derive(self)

    swap(stack, Reader, "_derive", derived)


def always_yes(stack: ExitStack) -> None:
    """CONFIRM is answered from what was, not from what is."""
    set_holder(stack, {(H.REVOKED, HE.CONFIRM): (H.REVOKED, (HA.CONFIRMED,))})


def refusal_ignored(stack: ExitStack) -> None:
    """Any answer to CONFIRM is taken for a yes."""
    set_reader(stack, {(L.CONFIRMING, LE.REFUSED): (L.READY, (LA.DROP_LEASE, LA.COMMIT))})


def silence_is_yes(stack: ExitStack) -> None:
    """Nobody is there to confirm, and what was read is used."""
    set_reader(stack, {(L.CONFIRMING, LE.PEER_GONE): (L.READY, (LA.DROP_LEASE, LA.COMMIT))})


# --- prompt, gate, fence ------------------------------------------------------------------------------------------


def no_digest(stack: ExitStack) -> None:
    """Neither side compares prompts, or names."""
    unfit = HoldConnector._unfit

    def pages_alone(self: HoldConnector, holder: Holder, link: Link, read: Read) -> Cause | None:
        theirs = msgspec.structs.replace(read, prompt=holder.request.prompt, rid=holder.request.rid)
        return unfit(self, holder, link, theirs)

    swap(stack, ParamsDecodeNode, "_misfit", lambda self, event, handle: None)
    swap(stack, HoldConnector, "_unfit", pages_alone)


def any_pages(stack: ExitStack) -> None:
    """Prefill brings whatever pages are asked for."""

    def prompts_alone(self: HoldConnector, holder: Holder, link: Link, read: Read) -> Cause | None:
        tail = holder.pages[len(holder.pages) - len(read.src_pages) :]
        theirs = msgspec.structs.replace(read, src_pages=tail, rid=holder.request.rid)
        return unfit(self, holder, link, theirs)

    unfit = HoldConnector._unfit
    swap(stack, HoldConnector, "_unfit", prompts_alone)


def bytes_before_confirm(stack: ExitStack) -> None:
    """What the engine says leaves as it comes."""
    run = ParamsDecodeNode._run

    def open_gate(self: ParamsDecodeNode, request: Scheduled) -> None:
        run(self, request)
        if isinstance(self.out[-1], RunWhole):
            self.out[-1] = msgspec.structs.replace(self.out[-1], gated=False)
        else:
            self.out.append(Ungate(request.rid))

    swap(stack, ParamsDecodeNode, "_run", open_gate)


def freed_before_fence(stack: ExitStack) -> None:
    """An abort frees decode's pages while its own read still places bytes in them."""
    set_reader(stack, {(L.READING, LE.CANCEL): (L.FAILED, (LA.DISARM, *_GIVE_UP))})


def head_of_bad_pages(stack: ExitStack) -> None:
    """Where some pages did not come, those behind them count all the same."""

    def all_of_them(self: Reader) -> int:
        return len(self.blocks) if any(self.landed.values()) else 0

    swap(stack, Reader, "head", property(all_of_them))


# --- rules of others, for the incidents ---------------------------------------------------------------------------


def wrong_id(stack: ExitStack) -> None:
    """I07: prefill is told decode's own number of the read, where it knows holds by its own."""
    send = PullConnector.send

    def misnamed(self: PullConnector, link: Link, frame: Any) -> bool:
        if isinstance(frame, Release):
            frame = msgspec.structs.replace(frame, hold=HoldNo(1_000_000 + frame.grant))
        return send(self, link, frame)

    swap(stack, PullConnector, "send", misnamed)


def untold_end(stack: ExitStack) -> None:
    """I04: an abort that finds the load just over waits for its report, which was there before."""
    finished = PullConnector.request_finished

    def delaying(self: PullConnector, request: Any, blocks: Any) -> Any:
        told = finished(self, request, blocks)
        return msgspec.structs.replace(told, delay_free=True) if request.handle is not None else told

    swap(stack, PullConnector, "request_finished", delaying)


def handles_for_all(stack: ExitStack) -> None:
    """I12: whoever presents a handle is a reader of it, and may renew it too."""

    def renew(self: HoldConnector, link: Link, frame: Renew) -> None:
        held = tuple(number for number in frame.holds if number in self.holds)
        for number in held:
            self.node.timers.set(("lease", number), self.node.now + self.lease_s)
        src, dst, rank = self.instance, link.there.instance, link.here
        self.send(link, Renewed(src=src, dst=dst, rank=rank, holds=held, lease_s=self.lease_s))

    second_read(stack)
    swap(stack, HoldConnector, "_renew", renew)
