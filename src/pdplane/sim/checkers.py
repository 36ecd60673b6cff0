"""What must hold of pages in every run. Kept apart from the core: nothing here asks a machine, a table or the ledger's
owner map what it believes. The checkers watch events and effects go by, the fabric's bytes, and the clock (ends.py).

O1  no write lands that no grant named.            O2  no page is handed out while somebody holds it.
O3  decode starts on, and goes on with, its own pages alone; no SUCCESS overtakes the bytes of its link.
O4  no page is handed out while an older write can land in it, and no write lands outside its grant's life.

A shared page has no holder, and whoever shares it is a reader: while it has any, nobody is handed it, no grant names
it, and a write that lands there lands in nobody's page.

In the params dialect prefill may reuse a page that a late read still brings over: what lands then is another's, and no
rule is broken until a byte of the answer leaves. Whose bytes they are is judged there (engine.py, hold_rules.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from pdplane.core.aggregated import AggregatedNode
from pdplane.core.effects import (
    ArmGrant,
    DisarmGrant,
    Effect,
    ExtendPages,
    Lane,
    Note,
    RestoreEngine,
    RunDecode,
    RunPrefill,
    RunWhole,
)
from pdplane.core.frames import Success
from pdplane.core.ids import GrantNo, Instance, PageId, Rank, Rid, Room, Seat
from pdplane.core.params.decode import ParamsDecodeNode
from pdplane.core.params.prefill import ParamsPrefillNode
from pdplane.core.rooms.decode import DecodeNode
from pdplane.core.rooms.prefill import PrefillNode
from pdplane.core.slices import Slice
from pdplane.transport.memory import Batch

from .content import PAGE_SIZE, Work


class Violation(Exception):
    """A rule does not hold. `rule` is its short name."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


class Watched(Protocol):
    """A process as the checkers see it."""

    instance: Instance
    side: str
    alive: bool
    node: DecodeNode | PrefillNode | AggregatedNode | ParamsDecodeNode | ParamsPrefillNode


class Hold(msgspec.Struct):
    """Somebody holds a page. `grant` 0: not under a grant (engine growth, prefill). `closed`: no write is due any
    more."""

    rid: Rid
    grant: GrantNo
    closed: bool = False


class Armed(msgspec.Struct, frozen=True):
    """What one grant named, and what of the prompt's head was there before, to be shared."""

    pages: tuple[PageId, ...]
    shared: tuple[PageId, ...]


class Pages:
    """Who holds which page of which instance, by what effects and events said. `ranks`: of prefill's side. `confirms`:
    bytes are only good when decode has a confirmation (params)."""

    def __init__(self, works: Mapping[Rid, Work], *, fence: bool, ranks: int = 1, confirms: bool = False) -> None:
        self._works, self._fence, self._ranks, self._confirms = works, fence, ranks, confirms
        self._held: dict[Instance, dict[PageId, Hold]] = {}
        self._shared: dict[Instance, dict[Rid, tuple[PageId, ...]]] = {}  # pages of the prefix cache that are read
        self._armed: dict[tuple[Instance, GrantNo], Armed] = {}
        self._heads: dict[tuple[Instance, Rid], tuple[PageId, ...]] = {}  # of prompts at decode, as they were granted
        self._landed: dict[tuple[Instance, GrantNo, Seat, Rank], set[PageId]] = {}
        self._cached: dict[tuple[Instance, Room], int] = {}  # tokens of a prompt that were not computed again
        self._granting: dict[Instance, Rid] = {}
        self._taken: set[Rid] = set()  # as complete, by decode
        self.foreign = 0  # pages of loads in which another's bytes have landed

    def forget(self, instance: Instance) -> None:
        self._held.pop(instance, None)
        self._shared.pop(instance, None)

    def effect(self, who: Watched, effect: Effect, pending: Sequence[Batch]) -> None:
        me = who.instance
        match effect:
            case Note(rid, _, state):
                if state == "Granted" or (state == "Reading" and self._confirms):
                    self._granting[me] = rid
                elif state == "Success":
                    self._taken.add(rid)
                elif state == "Draining" and who.side == "decode":  # its own pages wait for a proof, no others
                    self._shared.get(me, {}).pop(rid, None)
                elif state == ("freed" if self._confirms else "Gone") or (state == "Sent" and who.side == "prefill"):
                    self._release(me, rid)
            case ArmGrant(grant, pages, _, head):
                self._nothing_can_land(me, (*pages, *head), pending)
                self._arm(me, self._granting.pop(me), grant, Armed(pages, head))
            case DisarmGrant(grant):
                armed = self._armed.get((me, grant))
                for page in armed.pages if armed else ():
                    hold = self._held.get(me, {}).get(page)
                    if hold and hold.grant == grant:
                        hold.closed = True
            case RunDecode(rid, pages):
                head = self._heads.get((me, rid), ())
                if pages[: len(head)] != head:
                    raise Violation("O3", f"{me} lets {rid} start on other pages than it shares: {pages}, not {head}")
                self._share(me, head, rid)
                self._claim(me, pages[len(head) :], Hold(rid, GrantNo(0)))
            case RunWhole(rid, pages, shared=shared):
                self._release(me, rid)  # what was granted to it; all of it goes on as the engine's
                self._claim(me, pages[shared:], Hold(rid, GrantNo(0)))
                self._share(me, pages[:shared], rid)
            case ExtendPages(rid, pages) | RestoreEngine(rid, pages):
                self._nothing_can_land(me, pages, pending)
                self._claim(me, pages, Hold(rid, GrantNo(0)))
            case RunPrefill(rid, pages, cached_tokens):
                shared = cached_tokens // PAGE_SIZE
                if cached_tokens >= self._works[rid].prompt_tokens:
                    raise Violation("cached", f"{me} lets {rid} compute nothing: {cached_tokens} tokens are shared")
                self._cached[me, self._works[rid].room] = cached_tokens
                if not self._confirms:
                    self._nothing_reads(me, pages[shared:], pending)
                self._claim(me, pages[shared:], Hold(rid, GrantNo(0)))
                self._share(me, pages[:shared], rid)
            case _:
                pass

    def released(self, who: Watched, rid: Rid) -> None:
        """The engine has let go. At prefill the writes may still read: those pages end with the room's note."""
        if who.side != "prefill":
            self._release(who.instance, rid)

    def retracted(self, who: Watched, rid: Rid) -> None:
        """The engine has laid it aside, and has let go of its pages."""
        self._release(who.instance, rid)

    def success(self, who: Watched, frame: Success, here: Rank) -> None:
        """Prefill says SUCCESS to decode's rank `here`: all bytes of this link are there, and the row is true."""
        armed = self._armed.get((frame.dst, frame.grant))
        landed = self._landed.get((frame.dst, frame.grant, Seat(who.instance, frame.rank), here), set())
        if armed is None or landed != set(armed.pages):
            text = f"{who.instance} says SUCCESS of grant {frame.grant} to {frame.dst}/{here}"
            granted = len(armed.pages) if armed else 0
            raise Violation("O3", f"{text}, where {len(landed)} of {granted} pages have landed")
        cached, row = self._cached.get((who.instance, frame.room), 0), frame.row
        if row.cached_tokens != min(cached, row.prompt_tokens - 1):
            text = f"{who.instance} says {row.cached_tokens} of {row.prompt_tokens} tokens were cached"
            raise Violation("cached", f"{text}, and shared {cached}")

    def landed(self, batch: Batch, data: bytes) -> None:
        """The bytes of `batch`, its slices one after the other, are in decode's pool."""
        me, grant = batch.dst.instance, batch.grant
        armed = self._armed.get((me, grant))
        if armed is None:
            raise Violation("O1", f"a write under grant {grant}, which {me} never gave, landed in its pool")
        for place, pair in enumerate(batch.pairs):
            hold = self._held.get(me, {}).get(pair.dst)
            if hold is None:
                raise Violation("O4", f"{me}: a write under grant {grant} landed in page {pair.dst}, which is free")
            if hold.grant != grant:
                owner = f"grant {hold.grant}" if hold.grant else "the engine"
                text = f"{me}: a write under grant {grant} landed in page {pair.dst} of {hold.rid} ({owner})"
                raise Violation("O4", text)
            if hold.closed:
                rule, when = ("O3", "was taken as complete") if hold.rid in self._taken else ("O4", "had given it up")
                raise Violation(rule, f"{me}: a write landed in page {pair.dst} after {hold.rid} {when}")
            self._landed.setdefault((me, grant, batch.src, batch.dst.rank), set()).add(pair.dst)
            work = self._works[hold.rid]
            first = len(armed.shared)
            if self._confirms:  # a load is the tail of its prompt
                first = -(-work.prompt_tokens // PAGE_SIZE) - len(armed.pages)
            index = first + armed.pages.index(pair.dst)
            size = batch.slice.size_bytes
            if data[place * size : (place + 1) * size] != _slice(
                work.tag(index, batch.src.rank.tp, self._ranks), batch.slice
            ):
                if self._confirms:
                    self.foreign += 1
                    continue
                raise Violation("O4", f"{me}: page {pair.dst} of {hold.rid} got what is not its page {index}")

    def whole(self, me: Instance, grant: GrantNo, lanes: Iterable[Lane]) -> set[PageId]:
        """The pages of a grant whose parts have come over all of its lanes by now."""
        parts = [self._landed.get((me, grant, lane.link.there, lane.link.here), set()) for lane in lanes]
        return set.intersection(*parts) if parts else set()

    def held_at(self, me: Instance) -> set[Rid]:
        """Who holds pages there now."""
        return {hold.rid for hold in self._held.get(me, {}).values()} | set(self._shared.get(me, {}))

    def _arm(self, me: Instance, rid: Rid, grant: GrantNo, armed: Armed) -> None:
        self._share(me, armed.shared, rid)
        self._claim(me, armed.pages, Hold(rid, grant))
        if (me, grant) in self._armed:
            raise Violation("O2", f"{me} gives grant number {grant} twice")
        self._armed[me, grant] = armed
        self._heads[me, rid] = armed.shared

    def _claim(self, me: Instance, pages: Iterable[PageId], hold: Hold) -> None:
        held = self._held.setdefault(me, {})
        for page in pages:
            other = held.get(page)
            if other is not None:
                raise Violation("O2", f"{me} hands page {page} to {hold.rid} while {other.rid} holds it")
            readers = [rid for rid, pages in self._shared.get(me, {}).items() if page in pages]
            if readers:
                raise Violation("O2", f"{me} hands page {page} to {hold.rid} while {readers[0]} shares it")
            held[page] = Hold(hold.rid, hold.grant)

    def _share(self, me: Instance, pages: tuple[PageId, ...], rid: Rid) -> None:
        for page in pages:
            if other := self._held.get(me, {}).get(page):
                raise Violation("O2", f"{me} lets {rid} share page {page}, which {other.rid} holds")
        if pages:
            self._shared.setdefault(me, {})[rid] = pages

    def _release(self, me: Instance, rid: Rid) -> None:
        held = self._held.get(me, {})
        for page in [page for page, hold in held.items() if hold.rid == rid]:
            del held[page]
        self._shared.get(me, {}).pop(rid, None)

    def _nothing_can_land(self, me: Instance, pages: Iterable[PageId], pending: Sequence[Batch]) -> None:
        """One-sided fabrics: what is posted will land, whatever was revoked. With a fence, landing is watched."""
        if self._fence:
            return
        wanted = set(pages)
        for batch in pending:
            if batch.dst.instance == me and any(pair.dst in wanted for pair in batch.pairs):
                raise Violation("O4", f"{me} hands out pages in which a write of grant {batch.grant} can still land")

    @staticmethod
    def _nothing_reads(me: Instance, pages: Iterable[PageId], pending: Sequence[Batch]) -> None:
        wanted = set(pages)
        for batch in pending:
            if batch.src.instance == me and batch.ghost is None and any(pair.src in wanted for pair in batch.pairs):
                raise Violation("O4", f"{me} hands out pages that move {batch.number} still reads")


def _slice(page: bytes, part: Slice) -> bytes:
    """What a link moves of a page, run by run."""
    starts = ((span.src + number * span.src_step, span.run) for span in part.spans for number in range(span.count))
    return b"".join(page[start : start + run] for start, run in starts)
