"""Prefill's side of one room: applies SENDER of rooms/table.py, keeps the pages, the writes outstanding and the row.

One machine for all ranks of a data parallel group, which compute in step: links are a set, as at decode. Pages may be
written over a link once the GRANTs of all links of the room are in. A GRANT may say that decode has the prompt's first
pages already: these are computed, or shared, and kept here as all others, and not moved.

Success must not overtake the bytes: SUCCESS goes out when the last write is visible at decode. DRAINED goes out when
nothing of ours can still write: no step of the engine touches the pages and no write is outstanding.
"""

from __future__ import annotations

from typing import Protocol

from ..effects import AbortEngine, AnswerRow, CancelMoves, MovePages
from ..errors import Cause
from ..events import LegArrived
from ..frames import Abort, Announce, Drained, Failed, Frame, FrameIdentity, Grant, PromptId, Ready, Row, Success
from ..ids import NO_GRANT, ConnId, GrantNo, Instance, Link, MoveNo, PageId, Rid, Room
from ..layout import pages_for
from ..node import Node
from ..pages import Owner, Page
from ..prompt_pages import Prompt
from .table import SA, SE, SENDER, KVPoll, S, sender_poll


class Desk(Protocol):
    """What a sender needs of its node beside the outbox and the ledger."""

    instance: Instance

    @property
    def node(self) -> Node: ...

    def next_move(self, sender: Sender) -> MoveNo: ...

    def conn_of(self, link: Link) -> ConnId:
        """The session that is up; NO_CONN where none is."""
        ...

    def send(self, link: Link, frame: Frame) -> bool: ...

    def keep(self, sender: Sender, state: Page) -> None:
        """Its prompt is computed and nothing touches its pages, which are in `state`: whole ones are cached."""
        ...

    def release(self, sender: Sender) -> None:
        """It does not read the shared pages any more."""
        ...

    def hold_left_s(self, sender: Sender) -> float: ...

    def settled(self, sender: Sender) -> None:
        """The machine has moved: clocks and queues follow."""
        ...


class Sender:
    """One room at prefill. `peer` is the decode instance that spoke first of it; another one is a duplicate."""

    def __init__(self, room: Room, arrived_at: float, desk: Desk) -> None:
        self.room = room
        self.arrived_at = arrived_at
        self.state = S.NEW
        self.leg: LegArrived | None = None
        self.peer: Instance | None = None
        self.links: dict[Link, None] = {}  # over which decode has spoken of this room
        self.asked: PromptId | None = None  # the prompt of decode's leg, where ANNOUNCE says it
        self.grants: dict[Link, Grant] = {}
        self._granted_on: dict[Link, ConnId] = {}  # the session on which the GRANT was said last
        self._named = NO_GRANT  # by an ABORT whose GRANT was lost on the way: DRAINED proves for that number
        self.pages: tuple[PageId, ...] = ()
        self.shared = 0  # of these, how many belong to the prefix cache
        self.cached_tokens = 0
        self.moved: dict[Link, int] = {}  # up to which page the transport has been told
        self.sending = 0  # up to which page some link has been handed its part, or needs none
        self.computed = 0  # tokens
        self.outstanding: set[MoveNo] = set()
        self.in_engine = False
        self.held = False  # computed ahead of the grant
        self.quarantined = False
        self.row: Row | None = None
        self.cause: Cause | None = None
        self._desk = desk
        self._node = desk.node

    @property
    def rid(self) -> Rid | None:
        return self.leg.rid if self.leg else None

    @property
    def grant(self) -> Grant | None:
        """The first part of it; all parts have one number, and name the same pages."""
        return next(iter(self.grants.values()), None)

    @property
    def grant_no(self) -> GrantNo:
        return self.grant.grant if self.grant else self._named

    @property
    def granted(self) -> bool:
        """The GRANTs of all links are in."""
        return self.grant is not None and len(self.grants) == max(1, len(self.grant.links))

    @property
    def own(self) -> tuple[PageId, ...]:
        """Its pages in the ledger; the others are the prefix cache's."""
        return self.pages[self.shared :]

    @property
    def prompt(self) -> Prompt:
        """What it asks of the pool. Its last token is computed here, so a page that ends with it is not shared."""
        assert self.leg is not None
        tokens = self.leg.prompt.tokens
        return Prompt(tokens, self.leg.page_keys, (tokens - 1) // self._node.limits.page_size)

    @property
    def poll(self) -> KVPoll:
        return sender_poll(self.state, wrote=self.sending > 0, failed=self.cause is not None)

    def apply(self, event: SE, *, cause: Cause | None = None, link: Link | None = None) -> None:
        """One cell of the table. `cause`: why, for events that end the room; the first one stays. `link`: who has
        asked, and is answered alone; otherwise everybody who has spoken of the room is."""
        step = SENDER.get((self.state, event))
        if step is None:
            self._node.count("late", f"{self.state}/{event}")
            return
        was, (self.state, actions) = self.state, step
        if cause is not None and self.state in (S.DRAINING, S.GONE):
            if self.cause is None and was is not S.SENT:
                self.cause = cause
            else:
                self._node.count("late_verdict", cause.code)
        if was is not self.state and self.rid:
            self._node.note(self.rid, self.room, self.state, str(cause) if cause else "")
        for action in actions:
            self._act(action, link)
        self._desk.settled(self)
        self._derive()

    # --- what edge, peer, engine and transport report ---------------------------------------------------------------

    def leg_in(self, leg: LegArrived) -> None:
        self.leg = leg
        self.apply(SE.LEG_WITH_GRANT if self.granted else SE.LEG)
        self._compare()

    def announced(self, link: Link, frame: Announce) -> None:
        self._met(link)
        self.asked = self.asked or frame.prompt
        self.apply(SE.ANNOUNCE, link=link)
        self._compare()

    def grant_in(self, link: Link, frame: Grant) -> None:
        """A GRANT, or a part of one. Said again, after a session was lost, it lets the writes go on: decode stands by
        it still. A session alone says nothing of a grant: decode may have proof by now that nobody writes under it."""
        self._met(link)
        first = self.grant
        if first and _said(frame) != _said(first):
            text = f"decode {self.peer} sent grant {frame.grant} twice, and not the same"
            self.apply(SE.CANCEL, cause=Cause("bad_grant", text, 502, side="decode"))
            return
        self.grants.setdefault(link, frame)
        self._granted_on[link] = self._desk.conn_of(link)
        if self.granted and (wrong := self._mismatch()):
            self.apply(SE.CANCEL, cause=wrong)
        else:
            self.apply(SE.GRANT if self.granted else SE.GRANT_PART, link=link)
            self._resume()

    def aborted(self, link: Link, frame: Abort) -> None:
        self._met(link)
        self._named = frame.grant
        self.apply(SE.ABORT, cause=frame.cause)

    def start(self, pages: tuple[PageId, ...], shared: int) -> None:
        """Its turn. The first `shared` of `pages` are held from the prefix cache, the others are `computing`."""
        self.pages, self.shared = pages, shared
        self.computed = self.cached_tokens = shared * self._node.limits.page_size
        self.in_engine = True
        self.apply(SE.START)

    def chunk(self, tokens: int) -> None:
        self.computed = max(self.computed, tokens)
        if self.state in (S.STREAMING, S.AHEAD):
            self.apply(SE.CHUNK)

    def sampled(self, row: Row) -> None:
        self.row = row
        self.computed = row.prompt_tokens
        if self.state is S.STREAMING:
            self.apply(SE.COMPUTED)

    def released(self, error: str) -> None:
        """The engine touches the pages no more."""
        self.in_engine = False
        if self.state in (S.AHEAD, S.STREAMING) and self.row is not None:
            self.apply(SE.COMPUTED)  # of what was ahead only now: held pages may be freed at once
        elif self.state in (S.STREAMING, S.AHEAD):
            cause = Cause("engine_error", error or "the engine gave the prompt up", 500, retryable=True, side="prefill")
            self.apply(SE.CANCEL, cause=cause)
        self._derive()

    def move_done(self, move: MoveNo, error: str) -> None:
        self.outstanding.discard(move)
        if error and self.state in (S.STREAMING, S.FLUSHING):
            text = f"moving pages to {self.peer} failed: {error}"
            self.apply(SE.WRITE_ERR, cause=Cause("transfer_failed", text, 502, retryable=True, side="prefill"))
        self._derive()

    def _resume(self) -> None:
        """Writes that waited for a session go out."""
        if self.state in (S.STREAMING, S.FLUSHING):
            self._move(whole=self.state is S.FLUSHING)
            self._derive()

    def _met(self, link: Link) -> None:
        self.peer = link.there.instance
        self.links[link] = None

    # --- table plumbing ---------------------------------------------------------------------------------------------

    def _derive(self) -> None:
        if self.outstanding or self.in_engine:
            return
        if self.state is S.FLUSHING and all(self._moved(link) == len(self.pages) for link in self.grants):
            self._mark_sending(len(self.pages))  # where decode had them, no link was handed anything
            self.apply(SE.WRITES_DONE)
        elif self.state is S.DRAINING:
            self.apply(SE.QUIET)

    def _compare(self) -> None:
        """Both legs are known: they must speak of the same tokens. Asked before anything is computed or written."""
        if self.state in (S.WAITING, S.ARMED, S.AHEAD, S.HELD) and (wrong := self._mismatch()):
            self.apply(SE.CANCEL, cause=wrong)

    def _mismatch(self) -> Cause | None:
        """The leg's prompt against the grant's: both sides must speak of the same tokens, and of as many pages. Asked
        before any write."""
        theirs = self.grant.prompt if self.grant else self.asked
        if theirs is None or self.leg is None:
            return None
        ours = self.leg.prompt
        if ours != theirs:
            text = (
                f"the legs carry different prompts: prefill {ours.digest.hex()} of {ours.tokens} tokens, "
                f"decode {theirs.digest.hex()} of {theirs.tokens} tokens"
            )
            return Cause("prompt_mismatch", text, 500, side="prefill")
        return self._miscounted(self.grant, ours.tokens) if self.grant else None

    def _miscounted(self, grant: Grant, tokens: int) -> Cause | None:
        """Pages that decode has and pages that it granted are together the prompt's, and what it has is full."""
        size, prefix = self._node.limits.page_size, grant.prefix_pages
        need = pages_for(tokens, size)
        text = f"decode granted {len(grant.pages)} pages for {tokens} tokens, which need {need}"
        if prefix and (prefix > tokens // size or prefix + len(grant.pages) != need):
            text = f"{text}, and says that it has {prefix} already, of {tokens // size} full ones"
            return Cause("bad_grant", text, 502, side="decode")
        if not prefix and len(grant.pages) != need:
            return Cause("prompt_mismatch", text, 500, side="prefill")
        return None

    def _act(self, action: SA, link: Link | None) -> None:
        match action:
            case SA.MOVE_FULL:
                self._move(whole=False)
            case SA.MOVE_REST:
                self._move(whole=True)
            case SA.SUCCESS:
                self._success([link] if link else list(self.grants))
            case SA.READY:
                self._ready([link] if link else list(self.links))
            case SA.FAILED:
                self._tell(Failed, link)
            case SA.DRAINED:
                self._tell(Drained, link)
            case SA.STOP:
                self._stop()
            case SA.HOLD:
                self.held = True
                self._node.ledger.shift(self.own, self._owner, Page.COMPUTING, Page.HELD)
            case SA.KEEP | SA.FREE if self.pages:
                self._give_back(action)
            case SA.QUARANTINE:
                self._quarantine()
            case SA.ANSWER if self.leg:
                assert self.cause is not None
                self._node.answer_failed(self.leg.rid, self.room, self.cause)
            case SA.ANSWER_SENT:
                assert self.leg is not None
                assert self.row is not None
                self._node.out.append(AnswerRow(self.leg.rid, self.row))
            case _:
                pass  # clocks, queue and tombstone are the node's, by `settled`

    @property
    def _owner(self) -> Owner:
        assert self.leg is not None
        return Owner(self.leg.rid)

    def _move(self, *, whole: bool) -> None:
        """Posts what is computed and not yet moved, on every link over whose session the grant was said."""
        if not self.granted:
            return
        full = min(self.computed // self._node.limits.page_size, len(self.pages))
        ready = len(self.pages) if whole else full
        for link, grant in self.grants.items():
            moved = self._moved(link)
            if ready > moved and self._desk.conn_of(link) == self._granted_on[link]:
                if not self.moved and self.rid:
                    self._node.note(self.rid, self.room, "moving")
                self._mark_sending(ready)
                number = self._desk.next_move(self)
                self.outstanding.add(number)
                self.moved[link] = ready
                had = grant.prefix_pages
                src, dst = self.pages[moved:ready], grant.pages[moved - had : ready - had]
                self._node.out.append(MovePages(number, grant.grant, link, src, dst))

    def _moved(self, link: Link) -> int:
        """The first page that this link is still to be told to move."""
        return self.moved.get(link, self.grants[link].prefix_pages)

    def _mark_sending(self, ready: int) -> None:
        """Pages up to here are read by writes from now on, or need none."""
        first = max(self.sending, self.shared)
        if ready > first:
            self._node.ledger.shift(self.pages[first:ready], self._owner, self._at_rest, Page.SENDING)
        self.sending = max(self.sending, ready)

    @property
    def _at_rest(self) -> Page:
        """The ledger's state of own pages that no write reads."""
        return Page.HELD if self.held else Page.COMPUTING

    def _stop(self) -> None:
        """Engine and queued writes are told; what runs, runs out. Pages drain."""
        if self.in_engine:
            assert self.leg is not None
            self._node.out.append(AbortEngine(self.leg.rid))
        self._node.out += [CancelMoves(grant.grant, link) for link, grant in self.grants.items()]
        ledger, owner = self._node.ledger, self._owner
        sent = max(self.sending, self.shared)
        ledger.shift(self.pages[self.shared : sent], owner, Page.SENDING, Page.DRAINING)
        ledger.shift(self.pages[sent:], owner, self._at_rest, Page.DRAINING)

    def _give_back(self, action: SA) -> None:
        """Its pages are nobody's to write or read for it any more."""
        assert self.leg is not None
        if action is SA.KEEP:
            self._desk.keep(self, Page.SENDING if self.state is S.SENT else Page.HELD)
        else:
            self._node.ledger.free(self.own, self._owner)
        self._desk.release(self)
        if self.quarantined:
            self._node.alarm(f"room {self.room}: {len(self.own)} quarantined pages at prefill are free again")
        self._node.note(self.leg.rid, self.room, "freed", f"{len(self.pages)} pages")
        self.pages, self.shared = (), 0

    def _quarantine(self) -> None:
        self.quarantined = True
        self._node.ledger.shift(self.own, self._owner, Page.DRAINING, Page.QUARANTINED)
        what = "a step of the engine" if self.in_engine else f"{len(self.outstanding)} writes to {self.peer}"
        self._node.alarm(f"room {self.room}: {len(self.own)} pages quarantined at prefill, {what} never returned")

    def _success(self, links: list[Link]) -> None:
        assert self.row is not None
        for link in links:
            self._desk.send(link, Success(**self._identity(link), row=self.row))

    def _ready(self, links: list[Link]) -> None:
        left = self._desk.hold_left_s(self)
        for link in links:
            self._desk.send(link, Ready(**self._identity(link), held_s=left))

    def _tell(self, kind: type[Failed] | type[Drained], link: Link | None) -> None:
        cause = self.cause or Cause("finished", f"room {self.room} is over", 409, side="prefill")
        for target in [link] if link else list(self.links):
            identity = self._identity(target)
            self._desk.send(target, Failed(**identity, cause=cause) if kind is Failed else Drained(**identity))

    def _identity(self, link: Link) -> FrameIdentity:
        instance = self._desk.instance
        return FrameIdentity(room=self.room, grant=self.grant_no, src=instance, dst=link.there.instance, rank=link.here)


def _said(grant: Grant) -> tuple[object, ...]:
    """What every GRANT of one number says alike."""
    return grant.pages, grant.prompt, grant.links, grant.prefix_pages
