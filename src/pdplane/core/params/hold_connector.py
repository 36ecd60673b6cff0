"""The connector of prefill's scheduler in the params dialect: all of its holds, and what decodes say of them.

Every hold has a number that is never reused, and a lease in the node's heap of clocks, so that an expired one never
hides behind a renewed one (I24). What is over is kept by number, without pages, to say what became of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from ..acceptor import Acceptor
from ..connector import Finished, KVConnectorBase
from ..effects import ConnectData, SendFrame, Teardown
from ..errors import Cause
from ..events import Accepted, ConnLost, Event, FrameIn, KVOutput, MoveDone, RequestArrived
from ..frames import Beat, Confirm, Confirmed, Frame, HoldIdentity, Read, ReadFailed, Release, Renew, Renewed
from ..ids import ConnId, GrantNo, HoldNo, Instance, Link, MoveNo, PageId, Rank, Rid
from ..node import Node
from ..session import NO_CONN, Gone, Identity, Notice, Up, links_between
from .holder import Consumer, Holder
from .table import HE, H

MAX_OVER = 65_536


class HoldConnector(KVConnectorBase):
    """connector.KVConnector of a prefill. The lease runs from the answer, from each READ and each renewal anew.
    What peers are told goes into the node's outbox as it is decided."""

    def __init__(self, node: Node, me: Identity, beat: Callable[[Instance], Beat]) -> None:
        super().__init__()
        self.node = node
        self.instance = me.instance
        self.lease_s = node.limits.hold_term_s
        self.sessions = Acceptor(me, node.limits.session, node.out, beat)
        self.holds: dict[HoldNo, Holder] = {}
        self._by_rid: dict[Rid, Holder] = {}
        self._over: OrderedDict[HoldNo, Holder] = OrderedDict()
        self._by_move: dict[MoveNo, tuple[Holder, Link]] = {}
        self._links: dict[Link, frozenset[tuple[Rank, Rank]]] = {}
        self._output = KVOutput()
        self._me = me
        self._numbers = self._moves = 0

    # --- the scheduler's hooks --------------------------------------------------------------------------------------

    def request_finished(self, request: RequestArrived, blocks: Sequence[PageId]) -> Finished:
        """The prompt is computed: held from now on."""
        if not blocks:
            return Finished()
        self._numbers += 1
        holder = Holder(HoldNo(self._numbers), request, tuple(blocks), self)
        self.holds[holder.number] = self._by_rid[request.rid] = holder
        self._keep(holder.number)
        self.node.note(request.rid, None, H.HELD, f"hold {holder.number}, {len(blocks)} pages")
        return Finished(delay_free=True, lease_s=self.lease_s, hold=holder.number)

    # --- for the scheduler around it --------------------------------------------------------------------------------

    def take_output(self) -> KVOutput:
        output, self._output = self._output, KVOutput()
        return output

    def take_event(self, event: Event) -> None:
        now = self.node.now
        match event:
            case FrameIn(conn, frame):
                self._frame(conn, frame)
            case MoveDone(move, error):
                holder, link = self._by_move.pop(move, (None, None))
                if holder and link and error:
                    holder.move_failed(link, error)
            case Accepted(conn, here):
                self.sessions.accepted(conn, here, now)
            case ConnLost(conn):
                self.sessions.lost(conn, now)
            case _:
                self.node.count("late", type(event).__name__)

    def tick(self) -> float | None:
        """Sessions' clocks; when they want the next."""
        self._notices(self.sessions.tick(self.node.now))
        return self.sessions.next_due()

    def due(self, kind: str, name: object) -> None:
        if kind == "lease" and isinstance(name, int) and (holder := self.holds.get(HoldNo(name))):
            text = f"nobody has read hold {name} of prefill {self.instance} within its lease of {self.lease_s:g} s"
            if holder.consumer:
                text = (
                    f"the lease of hold {name} of prefill {self.instance} ended while {holder.consumer.instance} read"
                )
            holder.apply(HE.LEASE_END, cause=Cause("expired", text, 409, retryable=True, side="prefill"))

    def release(self, rid: Rid, cause: Cause) -> bool:
        """By exact name; False where nothing is held under it."""
        holder = self._by_rid.get(rid)
        if holder is None:
            return False
        holder.apply(HE.CANCEL, cause=cause)
        return True

    # --- Desk of holders --------------------------------------------------------------------------------------------

    def next_move(self, holder: Holder, link: Link) -> MoveNo:
        self._moves += 1
        number = MoveNo(self._moves)
        self._by_move[number] = (holder, link)
        return number

    def identity(self, link: Link, hold: HoldNo, grant: GrantNo) -> HoldIdentity:
        return HoldIdentity(hold=hold, grant=grant, src=self.instance, dst=link.there.instance, rank=link.here)

    def send(self, link: Link, frame: Frame) -> None:
        conn = self.sessions.conn_of(link)
        if conn != NO_CONN:
            self.node.out.append(SendFrame(conn, frame))

    def sent(self, holder: Holder) -> None:
        """Its pages may go: the scheduler hears it in this very turn."""
        self._output.finished_sending.add(holder.request.rid)

    def ended(self, holder: Holder) -> None:
        """Over: kept by number alone, without pages, for as long as anybody may come with it."""
        self.node.timers.clear(("lease", holder.number))
        del self.holds[holder.number]
        del self._by_rid[holder.request.rid]
        holder.pages = ()
        holder.forget_at = self.node.now + self.node.limits.tombstone_s
        self._over[holder.number] = holder
        while self._over and (len(self._over) > MAX_OVER or self._oldest.forget_at <= self.node.now):
            self._over.popitem(last=False)

    @property
    def _oldest(self) -> Holder:
        return next(iter(self._over.values()))

    # --- peers ------------------------------------------------------------------------------------------------------

    def _frame(self, conn: ConnId, frame: Frame) -> None:
        self._notices(self.sessions.frame(conn, frame, self.node.now))
        if not isinstance(frame, (Read, Confirm, Release, Renew)):
            return
        link = self.sessions.link_of(conn)
        if link is None:
            return
        if (frame.dst, frame.src, frame.rank) != (self.instance, link.there.instance, link.here):
            self.node.count("late", "identity")
            if frame.dst != self.instance:
                self.sessions.reject(conn, frame.dst, self.node.now)
        elif isinstance(frame, Renew):
            self._renew(link, frame)
        else:
            self._hold_frame(link, frame)

    def _hold_frame(self, link: Link, frame: Read | Confirm | Release) -> None:
        holder = self.holds.get(frame.hold) or self._over.get(frame.hold)
        if holder is None:
            self._unknown(link, frame)
        elif isinstance(frame, Release):
            self._released(holder, link, frame)
        elif isinstance(frame, Confirm):
            holder.apply(
                HE.CONFIRM if self._is_theirs(holder, link, frame) else HE.CONFIRM_OTHER, link=link, frame=frame
            )
        elif holder.consumer and not self._is_theirs(holder, link, frame):
            holder.apply(HE.READ_OTHER, link=link, frame=frame)
        elif not holder.over and (unfit := self._unfit(holder, link, frame)):
            holder.apply(HE.READ_UNFIT, cause=unfit, link=link, frame=frame)
        else:
            holder.apply(HE.READ, link=link, frame=frame)
            if not holder.over:
                self._keep(holder.number)  # a sign of life as good as a renewal

    @staticmethod
    def _is_theirs(holder: Holder, link: Link, frame: Read | Confirm) -> bool:
        return holder.consumer == Consumer(link.there.instance, frame.grant)

    def _released(self, holder: Holder, link: Link, frame: Release) -> None:
        """Its consumer's word, or that of one who was meant to be it and never began, and knows its name."""
        if holder.consumer:
            theirs = holder.consumer == Consumer(link.there.instance, frame.grant)
        else:
            theirs = holder.request.rid == frame.rid
        if theirs:
            holder.apply(HE.RELEASE, cause=frame.cause)
        else:
            self.node.count("late", "release")

    def _unfit(self, holder: Holder, link: Link, read: Read) -> Cause | None:
        """O1, rule 2: exactly the last pages of this hold, by its name, for its prompt, over the links there are."""
        ours = holder.request.prompt
        if read.prompt != ours:
            text = (
                f"hold {holder.number} is of another prompt: prefill {ours.digest.hex()} of {ours.tokens} tokens, "
                f"decode {read.prompt.digest.hex()} of {read.prompt.tokens} tokens"
            )
            return Cause("prompt_mismatch", text, 400, side="decode")
        if read.rid != holder.request.rid:
            text = f"remote_request_id {read.rid!r} is not what hold {holder.number} was answered to"
            return Cause("invalid_params", text, 400, side="decode", param="kv_transfer_params.remote_request_id")
        tail = holder.pages[len(holder.pages) - len(read.src_pages) :]
        if not read.src_pages or read.src_pages != tail or len(read.dst_pages) != len(tail):
            text = f"remote_block_ids do not name the last pages of hold {holder.number}, which has {len(holder.pages)}"
            return Cause("invalid_params", text, 400, side="decode", param="kv_transfer_params.remote_block_ids")
        named = frozenset(read.links or ((link.here, link.there.rank),))
        if named != self._links.get(link, frozenset()):
            text = f"the read of hold {holder.number} names other links than there are"
            return Cause("bad_grant", text, 502, side="decode")
        return None

    def _unknown(self, link: Link, frame: Read | Confirm | Release) -> None:
        self.node.count("late", "unknown_hold")
        cause = self._never_was(frame.hold)
        if isinstance(frame, Read):
            self.send(link, ReadFailed(**self.identity(link, frame.hold, frame.grant), cause=cause))
        elif isinstance(frame, Confirm):
            self.send(link, Confirmed(**self.identity(link, frame.hold, frame.grant), refusal=cause))

    def _never_was(self, hold: HoldNo) -> Cause:
        text = f"prefill {self.instance} holds nothing as {hold}: it never did, or it is long over"
        return Cause("unknown_hold", text, 404, side="prefill")

    def _renew(self, link: Link, renew: Renew) -> None:
        """A renewal moves the end of what is held, and revives nothing. A bound hold is its consumer's to renew."""
        peer, held = link.there.instance, []
        why: dict[HoldNo, Cause] = {}
        for number in renew.holds:
            holder = self.holds.get(number) or self._over.get(number)
            if holder is None:
                why[number] = self._never_was(number)
            elif holder.over or (holder.consumer and holder.consumer.instance != peer):
                why[number] = holder.refusal()
            else:
                held.append(number)
                self._keep(number)
        holds, why_not = tuple(held), why or msgspec.UNSET
        self.send(
            link,
            Renewed(src=self.instance, dst=peer, rank=link.here, holds=holds, lease_s=self.lease_s, why=why_not),
        )

    def _keep(self, hold: HoldNo) -> None:
        """Its lease runs from now."""
        self.node.timers.set(("lease", hold), self.node.now + self.lease_s)

    def _notices(self, notices: list[Notice]) -> None:
        for notice in notices:
            if isinstance(notice, Up):
                self._links[notice.link] = links_between(self._me, notice.link, notice.shape)
                self.node.out.append(ConnectData(notice.link, notice.endpoint, notice.slice))
            elif isinstance(notice, Gone):
                self._peer_gone(notice.instance)

    def _peer_gone(self, peer: Instance) -> None:
        """It can confirm nothing any more; what it has not asked for yet waits for its lease."""
        self.node.count("peer_gone")
        text = f"decode {peer} is gone: its session ended and did not come back"
        for holder in list(self.holds.values()):
            if holder.consumer and holder.consumer.instance == peer:
                holder.apply(HE.PEER_GONE, cause=Cause("peer_gone", text, 503, retryable=True, side="decode"))
        for link in [link for link in self._links if link.there.instance == peer]:
            del self._links[link]
        self.node.out.append(Teardown(peer))

    def holding(self, rid: Rid) -> bool:
        return rid in self._by_rid

    def told(self) -> list[dict[str, object]]:
        """What is held, for whoever asks."""
        return [
            {
                "rid": holder.request.rid,
                "hold": holder.number,
                "pages": len(holder.pages),
                "lease_left_s": round(max(0.0, self._ends_at(holder) - self.node.now), 3),
                "consumer": holder.consumer.instance if holder.consumer else None,
            }
            for holder in self.holds.values()
        ]

    def _ends_at(self, holder: Holder) -> float:
        return self.node.timers.when(("lease", holder.number)) or self.node.now
